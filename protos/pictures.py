"""preprocessing.json: how an encoded picture becomes the pixels that a model takes.

Export writes the file, a server follows it, and both run this code: what export compared with the library's own preprocessing
is what a server does. The scaling and normalisation of pixels are in the model's graph. Pillow is imported when a picture is
opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from halfserve.protos.picture_files import MAX_PIXELS, PictureError, PictureFile

if TYPE_CHECKING:
    from PIL.Image import Image

PREPROCESSING: Final = "preprocessing.json"
# Bytes of memory for each pixel while a picture is decoded, converted and turned: measured, and rounded up. Pillow holds 4, and
# a second image for a moment; a progressive JPEG's coefficients, and WebP's canvases, come on top.
DECODING_BYTES: Final = {"JPEG": 9, "PNG": 9, "WEBP": 17}
PROGRESSIVE_BYTES: Final = 4
# Exif's orientations, as the numbers of Pillow's `Transpose` that turn them upright; see `ImageOps.exif_transpose`.
TURNS: Final[Mapping[int, Any]] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
SIDEWAYS: Final = range(5, 9)  # orientations that swap width and height
MAX_EDGE: Final = 16_384
PIXEL_BYTES: Final = 4  # bytes per pixel of Pillow's colour images
FILTERS: Final = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers
FLOOR, EVEN = "floor", "even"


@dataclass(frozen=True, kw_only=True)
class PicturePreparation:
    """Scaling and cropping of a picture that is upright and RGB.

    Attributes:
        height: The height of the result in pixels.
        width: The width of the result in pixels.
        resize: The height and width to scale to; or the new length of the shorter edge, with the aspect ratio kept.
        resample: The name of Pillow's filter.
        crop: How half a pixel before the middle part is rounded: "floor", or "even" for Python's `round`.
    """

    height: int
    width: int
    resize: tuple[int, int] | int
    resample: str
    crop: str = FLOOR

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: The sizes or names are not valid, or the scaled picture may be smaller than the result.
        """
        edges = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
        if not all(1 <= edge <= MAX_EDGE for edge in (self.height, self.width, *edges)):
            raise ValueError(f"has a size that is not from 1 to {MAX_EDGE}")
        if edges[0] < self.height or edges[1] < self.width:
            raise ValueError(f"scales to {edges[0]} by {edges[1]}, which is smaller than {self.height} by {self.width}")
        if self.resample not in FILTERS:
            raise ValueError(f"has the filter {self.resample!r}, expected one of {', '.join(FILTERS)}")
        if self.crop not in (FLOOR, EVEN):
            raise ValueError(f"rounds a crop by {self.crop!r}, expected {FLOOR} or {EVEN}")

    @classmethod
    def from_bytes(cls, content: bytes) -> PicturePreparation:
        """Read a preprocessing.json.

        Raises:
            ValueError: It is not one; the text says why.
        """
        try:
            read: Mapping[str, Any] = json.loads(content)
            resize = read["resize"]
            edges = [resize["shortest_edge"]] if "shortest_edge" in resize else [resize["height"], resize["width"]]
            height, width = read["height"], read["width"]
            if not all(type(size) is int for size in (height, width, *edges)):
                raise ValueError("has a size that is no whole number")
            return cls(
                height=height,
                width=width,
                resize=edges[0] if len(edges) == 1 else (edges[0], edges[1]),
                resample=str(read["resample"]),
                crop=str(read.get("crop", FLOOR)),
            )
        except KeyError as error:
            raise ValueError(f"lacks {error}") from None
        except (AttributeError, TypeError) as error:
            raise ValueError(f"is not as export writes it: {error}") from None

    def to_bytes(self) -> bytes:
        """Return the content of a preprocessing.json."""
        resize = self.resize
        content = {
            "height": self.height,
            "width": self.width,
            "resize": {"shortest_edge": resize} if isinstance(resize, int) else {"height": resize[0], "width": resize[1]},
            "resample": self.resample,
            "crop": self.crop,
        }
        return json.dumps(content, indent=2).encode() + b"\n"

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that a picture of these is scaled to."""
        if not isinstance(self.resize, int):
            return self.resize
        # As torchvision, timm and transformers round it.
        longer = int(self.resize * max(height, width) / min(height, width))
        return (longer, self.resize) if height >= width else (self.resize, longer)

    def applied(self, image: Image) -> Image:
        """Return an upright RGB picture, scaled and cut."""
        height, width = self.scaled(image.height, image.width)
        scaled = image.resize((width, height), FILTERS.index(self.resample))
        top, left = self._before(height - self.height), self._before(width - self.width)
        return scaled.crop((left, top, left + self.width, top + self.height))

    def _before(self, beyond: int) -> int:
        """Pixels before the middle part, of all that are left out."""
        return beyond // 2 if self.crop == FLOOR else round(beyond / 2)


class EncodedPicture:
    """A JPEG, PNG or WebP that is not decoded yet. It is decoded once, on any thread."""

    def __init__(self, data: bytes) -> None:
        """Read what the file says about itself; no library reads it yet.

        Raises:
            PictureError: It is no such picture, or too large, or takes too much work.
        """
        self._file = PictureFile.of(data)
        self.width, self.height = self._file.width, self._file.height

    @property
    def work(self) -> int:
        """The cost of decoding: values to decode, of about 4 ns each; see MAX_WORK."""
        return self._file.work

    def memory_bytes(self, preparation: PicturePreparation) -> int:
        """Bytes of memory that `pixels` takes, at most.

        Raises:
            PictureError: The scaled picture has more than MAX_PIXELS: it is very long and narrow.
        """
        width, height = (self.height, self.width) if self._file.orientation in SIDEWAYS else (self.width, self.height)
        scaled = preparation.scaled(height, width)
        largest = math.prod(scaled)
        if largest > MAX_PIXELS:
            raise PictureError(
                f"has {self.width} by {self.height} pixels, too long and narrow for this model, which scales it to "
                f"{largest:,} pixels, expected at most {MAX_PIXELS:,}; cut it"
            )
        between = scaled[1] * height  # scaled in one direction
        decoding = DECODING_BYTES[self._file.form] + PROGRESSIVE_BYTES * self._file.in_passes
        return max(
            decoding * self.width * self.height,
            PIXEL_BYTES * (self.width * self.height + between + 2 * largest),
        )

    def pixels(self, preparation: PicturePreparation) -> NDArray[np.uint8]:
        """Return the prepared pixels: uint8 (height, width, 3), RGB.

        Raises:
            PictureError: The file is broken or cut short.
            ImportError: Pillow is not installed.
        """
        from PIL import Image as PillowImage  # noqa: PLC0415  (an extra; the plugin registers itself)

        try:
            image: Image = PillowImage.open(BytesIO(self._file.content()), formats=(self._file.form,))
            _require_size(image, self.width, self.height)
            image.load()
            turn = TURNS.get(self._file.orientation)
            if turn is not None:
                image = image.transpose(turn)
            # Colours as transformers and timm take them: transparency is dropped.
            if image.mode != "RGB":
                image = image.convert("RGB")
        except Exception as error:  # its plugins raise anything, and warnings may be errors
            raise PictureError(f"cannot be decoded: {_reason(error)}; expected a whole file") from error
        return np.asarray(preparation.applied(image))


def prepared_pixels(data: bytes, preparation: PicturePreparation) -> NDArray[np.uint8]:
    """Return the pixels of an encoded picture: uint8 (height, width, 3), RGB.

    Raises:
        PictureError: The picture cannot be used.
        ImportError: Pillow is not installed.
    """
    picture = EncodedPicture(data)
    picture.memory_bytes(preparation)
    return picture.pixels(preparation)


def _require_size(image: Image, width: int, height: int) -> None:
    """Check that Pillow reads the size for which memory is reserved."""
    if image.size != (width, height):
        raise ValueError(f"its size is {image.width} by {image.height} pixels, and not {width} by {height}")


def _reason(error: Exception) -> str:
    text = str(error).partition(" <")[0]  # Pillow shows the object that holds the bytes
    return text or type(error).__name__
