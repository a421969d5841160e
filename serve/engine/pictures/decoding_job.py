"""The pictures of one request while they are decoded, one after the other, in one or several turns."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from halfserve.protos.picture_files import PictureError
from halfserve.protos.pictures import EncodedPicture
from halfserve.serve.engine.errors import (
    BackendError,
    InferenceError,
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedError,
)
from halfserve.serve.engine.pictures.encoded_inputs import LACKING, EncodedPictures
from halfserve.serve.engine.tensors import Array

# A picture that takes no more is decoded at once, in up to 50 ms; of larger ones there is one at a time.
SMALL_WORK: Final = 2**23
SMALL_FILE_BYTES: Final = 2**22
READING_TIMES: Final = 3  # copies of a message while its files are read
TURN_S: Final = 0.02  # after which a request's further small pictures wait for its client's next turn

logger = logging.getLogger(__name__)


class DecodingJob:
    """The pictures of one request. `step` runs on a thread; everything else is for the event loop, between the steps.

    Attributes:
        client: the client whose turns they have.
        ended: called on the event loop when all are decoded, or with the error.
        pixel_bytes: memory of the pixels, from the first step until `DecodingThreads.end`.
        needs_bytes: memory that the next step takes besides.
        is_long: whether the next step takes longer than others may wait; the first one only finds that out.
        is_started: whether memory for the pixels is counted.
        is_running: whether a thread runs a step.
        is_over: whether the pixels are no longer wanted; a step in progress ends after its picture.
    """

    def __init__(
        self, pictures: EncodedPictures, size: int, small_bytes: int, ended: Callable[[InferenceError | None], None]
    ) -> None:
        """`size`: bytes of the request; `small_bytes`: memory of a picture that is decoded at once."""
        self.client = pictures.client
        self.ended = ended
        self.pixel_bytes = math.prod(pictures.shape)
        self._file_bytes = size
        self._small_bytes = small_bytes
        self._claim(small_bytes)
        self.is_long = self.is_started = self.is_running = self.is_over = False
        self._name, self._shape, self._preparation = pictures.name, pictures.shape, pictures.preparation
        self._pictures: EncodedPictures | None = pictures
        self._next = 0
        self._pixels: Array | None = None

    @property
    def is_done(self) -> bool:
        """Whether all pictures are decoded."""
        return self._next == self._shape[0]

    @property
    def has_pixels(self) -> bool:
        """Whether a picture has been decoded."""
        return self._next > 0

    def take_pixels(self) -> Array:
        """Return the pixels, uint8 (n, height, width, 3), once all pictures are decoded, and keep nothing."""
        pixels = self._pixels
        self.clear()
        return np.empty(self._shape, np.uint8) if pixels is None else pixels

    def clear(self) -> None:
        """Keep neither files nor pixels."""
        self._pictures = self._pixels = None

    def step(self, most_bytes: int) -> InferenceError | None:
        """Decode pictures until the turn ends, or until one needs more than this step may take.

        `most_bytes`: memory that a picture may take at most. Returns an error if a picture cannot be used.
        """
        name = self._name
        try:
            self._decode(most_bytes)
        except PictureError as error:
            what = "a picture" if self._shape[0] == 1 else f"an element {self._next}"
            return InvalidArgumentError(f"input {name!r} has {what} that {error}")
        except ImportError:
            return UnsupportedError(f"input {name!r} takes no encoded pictures here: {LACKING}")
        except MemoryError:
            return OutOfMemoryError()
        except InferenceError as error:
            return error.with_traceback(None)
        except Exception:
            logger.exception("a picture cannot be decoded")
            return BackendError(f"input {name!r} has a picture that cannot be decoded")
        return None

    def _decode(self, most_bytes: int) -> None:
        if self._pictures is None:
            return
        until = time.monotonic() + TURN_S
        files = self._pictures.read()  # again in each step: a job that waits holds no copy of its message
        while not (self.is_done or self.is_over):
            picture = self._opened(files[self._next], most_bytes)
            if picture is None:
                return
            if self._pixels is None:
                self._pixels = np.empty(self._shape, np.uint8)
            self._pixels[self._next] = picture.pixels(self._preparation)
            self._next += 1
            if self.is_long or time.monotonic() >= until:
                self._claim(self._small_bytes)
                self.is_long = False
                return

    def _claim(self, picture_bytes: int) -> None:
        """Claim the memory to read the files, and then to decode one picture."""
        self._picture_bytes = picture_bytes
        self.needs_bytes = max(READING_TIMES * self._file_bytes, self._file_bytes + picture_bytes)

    def _opened(self, file: bytes, most_bytes: int) -> EncodedPicture | None:
        """Return a picture that this step may decode; None, once it is noted what the next step needs, if it takes more."""
        if len(file) > SMALL_FILE_BYTES and not self.is_long:
            self.is_long = True
            return None
        picture = EncodedPicture(file)
        needs = picture.memory_bytes(self._preparation) + len(file)
        if needs > most_bytes:
            raise PictureError(
                f"has {picture.width} by {picture.height} pixels, which take {math.ceil(needs / 2**20)} MiB while they are "
                f"decoded, expected at most {most_bytes >> 20} MiB; send a smaller one, or start the server with a larger "
                "--max-buffered-mib"
            )
        is_long = self.is_long or needs > self._small_bytes or picture.work > SMALL_WORK
        if needs <= self._picture_bytes and is_long == self.is_long:
            return picture
        self._claim(max(needs, self._picture_bytes))
        self.is_long = is_long
        return None
