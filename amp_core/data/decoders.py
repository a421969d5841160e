"""From the bytes of a shard's member to a tensor, a number or whatever its format holds."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amp_core.data.errors import DataError

Decoder = Callable[[bytes], Any]


def _npy(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


def _pt(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _image(content: bytes) -> Tensor:
    """Decode an image to uint8 of shape [1, height, width] if it is gray, else [3, height, width]."""
    from PIL import Image  # noqa: PLC0415  (only those who read images need Pillow)

    with Image.open(io.BytesIO(content)) as image:
        pixels = np.array(image if image.mode in {"L", "RGB"} else image.convert("RGB"))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1).contiguous()


def _integer(content: bytes) -> int:
    return int(content)


def _text(content: bytes) -> str:
    return content.decode("utf-8")


_IMAGES = ("png", "jpg", "jpeg", "webp", "ppm")
DECODERS: dict[str, Decoder] = {
    "npy": _npy,
    "pt": _pt,
    "pth": _pt,
    "json": json.loads,
    "cls": _integer,
    "txt": _text,
    **dict.fromkeys(_IMAGES, _image),
}


def decoder_for(field: str, own: Mapping[str, Decoder]) -> Decoder:
    """The decoder of a field.

    Args:
        field: Such as `image.npy`.
        own: Of the user's, by a field's whole name or by what follows its last dot; they come before ours.

    Raises:
        DataError: If there is none, or it needs a package that is not installed.
    """
    kind = field.rpartition(".")[2]
    if field in own or kind in own:
        return own.get(field) or own[kind]
    if kind not in DECODERS:
        raise DataError(
            f"there is no decoder for the field {field!r}; known are {', '.join(DECODERS)}, "
            f"or give your own: decode={{{kind!r}: function of bytes}}"
        )
    if kind in _IMAGES and importlib.util.find_spec("PIL") is None:
        raise DataError(f"decoding {field!r} needs Pillow; install it by `pip install pillow`")
    return DECODERS[kind]
