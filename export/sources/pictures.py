"""Pictures as samples: the user's, or the ones that come with halfserve."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from halfserve.export.errors import ExportError
from halfserve.export.samples import Samples
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.tasks.image_models import Preprocessing
from halfserve.protos.pictures import MAX_PIXELS, PREPROCESSING

if TYPE_CHECKING:
    from PIL.Image import Image

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

    note = ""
    if options.samples is not None:
        images: list[Image.Image] = read_pictures(options.samples, options.max_samples)
    else:
        folder, note = files("halfserve.export.tasks").joinpath("pictures"), SHIPPED_PICTURES
        images = [crop for name in SHIPPED for crop in _crops(Image.open(BytesIO(folder.joinpath(name).read_bytes())))]
    prepared = (_prepared(image, preprocessing) for image in images)
    rows = [torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in prepared]
    stacked = torch.stack(rows).reshape(len(rows), preprocessing.height, preprocessing.width, 3)
    return Samples(inputs={"image": stacked}, labels=None, note=note)


def served_preparation(preprocessing: Preprocessing) -> dict[str, bytes]:
    """The file of a version by which a server prepares pictures; none where their preparation is not known."""
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
    """The first pictures of a folder, by name.

    Raises:
        ExportError: It is no folder, has no picture, or one cannot be read.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415  (an extra)

    if not folder.is_dir():
        raise ExportError(f"{folder} is no folder; expected a folder of pictures")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)[:count]
    if not paths:
        raise ExportError(f"{folder} has no picture; expected files that end in {', '.join(sorted(PICTURES))}")
    pictures = []
    for path in paths:
        try:
            with Image.open(path) as picture:
                if picture.width * picture.height > MAX_PIXELS:
                    raise ExportError(
                        f"{path} has {picture.width} by {picture.height} pixels; expected at most {MAX_PIXELS:,} in all"
                    )
                pictures.append(ImageOps.exif_transpose(picture).convert("RGB"))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ExportError(f"{path} is no picture that can be read: {error}") from error
    return pictures
