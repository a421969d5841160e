"""Encoded pictures in a BYTES tensor, for an input that takes pixels: decoded and prepared on the thread that computes."""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import Final

import numpy as np

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.pictures import EncodedPicture, PictureError, PicturePreparation
from halfserve.serve.engine.errors import InvalidArgumentError, UnsupportedError
from halfserve.serve.engine.repository.picture_inputs import LACKING
from halfserve.serve.engine.requests import LateArray
from halfserve.serve.engine.tensors import ANY_SIZE, Array, TensorSpec

LARGE_BYTES: Final = 2**26  # memory to decode a picture from which on only one is decoded at a time
_large: Final = Lock()  # held while a large picture is decoded, so that all instances together decode one


def encoded_spec(spec: TensorSpec, dimensions: int) -> TensorSpec:
    """Return the spec of encoded pictures that an input takes in place of pixels: BYTES of shape [n], or [n, 1]."""
    shape = (ANY_SIZE, 1) if dimensions == 2 else (ANY_SIZE,)
    return TensorSpec(name=spec.name, datatype=BY_WIRE["BYTES"], shape=shape)


def late_pictures(name: str, encoded: Array | LateArray, preparation: PicturePreparation) -> LateArray:
    """Return prepared pixels, uint8 (n, height, width, 3), of encoded pictures (n,) or (n, 1), which are read on first use."""
    shape = (encoded.shape[0], preparation.height, preparation.width, 3)

    def read() -> Array:
        pictures = encoded.read() if isinstance(encoded, LateArray) else encoded
        pixels = np.empty(shape, np.uint8)
        for index, data in enumerate(pictures.ravel().tolist()):
            try:
                pixels[index] = _pixels(data, preparation)
            except PictureError as error:
                raise InvalidArgumentError(f"input {name!r} has an element {index} that {error}") from None
            except ImportError:
                raise UnsupportedError(f"input {name!r} takes no encoded pictures here: {LACKING}") from None
        return pixels

    return LateArray(shape, read)


def _pixels(data: bytes, preparation: PicturePreparation) -> Array:
    picture = EncodedPicture(data)
    prepare = partial(picture.pixels, preparation)
    if picture.memory_bytes(preparation) <= LARGE_BYTES:
        return prepare()
    with _large:
        return prepare()
