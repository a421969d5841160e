"""Pictures: how a library prepares them, as a preprocessing.json that is proved on real ones, and pictures as samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfserve.export.captured_samples import captured_files
from halfserve.export.export_errors import ExportError
from halfserve.export.samples import Samples
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.tasks.served_models import Preprocessing
from halfserve.export.to_onnx.capture import one_line
from halfserve.protos.captured_requests import is_capture
from halfserve.protos.picture_files import MAX_PIXELS
from halfserve.protos.pictures import EVEN, FILTERS, PREPROCESSING, PicturePreparation, prepared_pixels

if TYPE_CHECKING:
    from PIL.Image import Image


# The library's preparation of an upright RGB picture: float32 (3, height, width).
LibraryPreparation = Callable[["Image"], NDArray[np.float32]]
# Of a pixel's 255 levels. Both compute in float32, which leaves 0.0001; one pixel that is rounded otherwise would be 1.
MAX_DIFFERENCE = 0.01
LEVIT_RATIO = 256 / 224
CONVNEXT_UNCUT = 384  # ConvNeXT's pictures of this edge length and above are not cropped
UPRIGHT = 0x112  # Exif's tag of the orientation
TURNED = 6  # its value for a picture that lies on its side


def of_transformers(processor: Any, height: int, width: int) -> PicturePreparation:
    """Return how an image processor of transformers scales and cuts pictures to this size.

    Raises:
        KeyError, TypeError, ValueError: It does something else.
    """
    content, kind = processor.to_dict(), type(processor).__name__.removesuffix("Pil")
    if not content.get("do_resize") or content.get("do_pad"):
        raise ValueError("it does not scale pictures to one size")
    size: Mapping[str, Any] = content["size"]
    edge: Any = None if size.get("longest_edge") else size.get("shortest_edge")
    resize: tuple[int, int] | int
    if kind == "ConvNextImageProcessor":
        resize = int(edge / content["crop_pct"]) if edge < CONVNEXT_UNCUT else (edge, edge)
    elif kind == "LevitImageProcessor" and edge:
        resize = int(LEVIT_RATIO * edge)
    elif kind == "PoolFormerImageProcessor" and content["crop_pct"] is not None:
        resize = int((edge or size["height"]) / content["crop_pct"])
    else:
        resize = edge or (size["height"], size["width"])
    return PicturePreparation(height=height, width=width, resize=resize, resample=FILTERS[int(content["resample"])])


def of_timm(known: Mapping[str, Any], height: int, width: int) -> PicturePreparation:
    """Return how timm's transform for evaluation, with these settings, scales and cuts pictures.

    Raises:
        KeyError, TypeError, ValueError: It does something else.
    """
    edges = (math.floor(height / known["crop_pct"]), math.floor(width / known["crop_pct"]))
    if known["crop_mode"] not in ("center", "squash"):
        raise ValueError(f"it cuts in the mode {known['crop_mode']!r}")
    resize = edges[0] if known["crop_mode"] == "center" and edges[0] == edges[1] else edges
    return PicturePreparation(height=height, width=width, resize=resize, resample=known["interpolation"], crop=EVEN)


def proved(
    preprocessing: Preprocessing, made: Callable[[], tuple[PicturePreparation, LibraryPreparation]], library: str
) -> tuple[Preprocessing, str]:
    """Add the preparation of pictures to what the graph does to pixels, if it gives what the library's own does.

    `made` returns the preparation, and the library's own.

    Returns:
        The preprocessing, with the preparation if it is proved, and what the report says about it.
    """
    try:
        preparation, theirs = made()
        differences = [_difference(preprocessing, preparation, theirs, data) for data in proof_pictures()]
    except Exception as error:  # noqa: BLE001  (the library's code, with a user's settings; the report says why)
        reason = one_line(error)
    else:
        largest = max(differences)
        if largest <= MAX_DIFFERENCE:
            return replace(preprocessing, pictures=preparation), (
                f"{PREPROCESSING} prepares pictures as {library} does: on {len(differences)} pictures they differ by at most "
                f"{largest:.1g} of a pixel's 255 levels"
            )
        reason = f"it differs by {largest:.3g} of a pixel's 255 levels from what a server would do"
    return preprocessing, (
        f"no {PREPROCESSING} is written, so that clients scale and cut pictures themselves, as {library} does: {reason}"
    )


def _difference(
    preprocessing: Preprocessing, preparation: PicturePreparation, theirs: LibraryPreparation, data: bytes
) -> float:
    """Return the largest between what the network gets of a picture, by this preparation and by the library's, in pixels'
    levels.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415  (an extra)

    factor = preprocessing.scale / np.array(preprocessing.std)
    offset = -np.array(preprocessing.mean) / np.array(preprocessing.std)
    ours = prepared_pixels(data, preparation) * factor.astype(np.float32) + offset.astype(np.float32)
    if preprocessing.is_bgr:
        ours = ours[..., ::-1]
    with Image.open(BytesIO(data)) as picture:
        expected = theirs(ImageOps.exif_transpose(picture).convert("RGB")).transpose(1, 2, 0)
    if ours.shape != expected.shape:
        raise ValueError(f"it makes images of {expected.shape[0]} by {expected.shape[1]} pixels")
    return float((np.abs(ours - expected) / np.abs(factor)).max())


def proof_pictures() -> Iterator[bytes]:
    """Return encoded pictures: of both orientations, small, of odd sizes, grey, transparent, with a palette, turned by Exif."""
    from PIL import Image  # noqa: PLC0415  (an extra)

    folder = files("halfserve.export.tasks").joinpath("pictures")
    contents = {name: folder.joinpath(f"{name}.jpg").read_bytes() for name in ("astronaut", "cat", "coffee", "galaxies")}
    astronaut, cat, coffee, galaxies = (Image.open(BytesIO(content)) for content in contents.values())
    turned = Image.Exif()
    turned[UPRIGHT] = TURNED
    yield from contents.values()
    yield _encoded(cat, "JPEG", exif=turned)
    yield _encoded(cat.rotate(90, expand=True), "PNG")
    yield _encoded(cat.resize((333, 251)), "PNG")
    yield _encoded(coffee.resize((61, 40)), "PNG")
    yield _encoded(coffee, "WEBP")
    yield _encoded(astronaut.convert("L"), "JPEG")
    yield _encoded(galaxies.convert("P"), "PNG")
    yield _encoded(Image.merge("RGBA", (*astronaut.split(), astronaut.convert("L"))), "PNG")


def _encoded(picture: Image, form: str, **options: Any) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


PICTURES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
SHIPPED_PICTURES = "the samples are crops of pictures that halfserve ships; give --samples FOLDER for a verdict on your own"
SHIPPED = ("astronaut.jpg", "cat.jpg", "coffee.jpg", "galaxies.jpg")
# Of the shorter side: parts of a picture at several scales are different samples.
SCALES = (1.0, 0.75, 0.5)


def picture_samples(preprocessing: Preprocessing, options: SourceOptions) -> Samples:
    """Pictures at the network's size: the user's, or crops of halfserve's own; uint8, shape (samples, height, width, 3).

    Raises:
        ExportError: The user's samples cannot be read.
    """
    from PIL import Image  # noqa: PLC0415  (an extra)

    note, traffic = "", None
    if options.samples is not None and is_capture(options.samples):
        contents, traffic = captured_files(options.samples, options.max_samples)
        if not contents:
            raise ExportError(f"the captured requests in {options.samples} hold no picture files; give those of other clients")
        images = [_read_picture(f"captured picture {number}", BytesIO(file)) for number, file in enumerate(contents)]
    elif options.samples is not None:
        images = read_pictures(options.samples, options.max_samples)
    else:
        folder, note = files("halfserve.export.tasks").joinpath("pictures"), SHIPPED_PICTURES
        images = [crop for name in SHIPPED for crop in _crops(Image.open(BytesIO(folder.joinpath(name).read_bytes())))]
    prepared = (_prepared(image, preprocessing) for image in images)
    rows = [torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in prepared]
    stacked = torch.stack(rows).reshape(len(rows), preprocessing.height, preprocessing.width, 3)
    return Samples(inputs={"image": stacked}, labels=None, note=note, traffic=traffic)


def served_preparation(preprocessing: Preprocessing) -> dict[str, bytes]:
    """Return the file of a version by which a server prepares pictures; none where their preparation is not known."""
    return {} if preprocessing.pictures is None else {PREPROCESSING: preprocessing.pictures.to_bytes()}


def _prepared(image: Image, preprocessing: Preprocessing) -> Image:
    """As a server prepares it, where that is known."""
    if preprocessing.pictures is not None:
        return preprocessing.pictures.applied(image.convert("RGB"))
    return image.convert("RGB").resize((preprocessing.width, preprocessing.height))


def _crops(picture: Image) -> Iterator[Image]:
    """Square parts of a picture, from its corners and its middle, at several scales."""
    for scale in SCALES:
        side = int(min(picture.size) * scale)
        right, low = picture.width - side, picture.height - side
        for left, top in {(0, 0), (right, 0), (0, low), (right, low), (right // 2, low // 2)}:
            yield picture.crop((left, top, left + side, top + side))


def read_pictures(folder: Path, count: int) -> list[Image]:
    """Return the first pictures of a folder, by name.

    Raises:
        ExportError: It is no folder, has no picture, or one cannot be read.
    """
    if not folder.is_dir():
        raise ExportError(f"{folder} is no folder; expected a folder of pictures")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)[:count]
    if not paths:
        raise ExportError(f"{folder} has no picture; expected files that end in {', '.join(sorted(PICTURES))}")
    return [_read_picture(str(path), path) for path in paths]


def _read_picture(name: str, file: Path | BytesIO) -> Image:
    from PIL import Image, ImageOps  # noqa: PLC0415  (an extra)

    try:
        with Image.open(file) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise ExportError(
                    f"{name} has {picture.width} by {picture.height} pixels; expected at most {MAX_PIXELS:,} in all"
                )
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ExportError(f"{name} is no picture that can be read: {error}") from error
