"""A request's inputs of which one has encoded pictures in place of pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from halfserve.installation import install_hint
from halfserve.protos.pictures import PicturePreparation
from halfserve.serve.engine.tensors import Array, LateArray, LateInputs, Tensors

LACKING: Final[str] = f"the server lacks the package pillow; {install_hint('pictures')}"


@dataclass(frozen=True, kw_only=True)
class EncodedPictures:
    """Pictures that have not been decoded yet.

    Attributes:
        name: name of the input that takes them.
        files: picture files, a BYTES array of shape (n,) or (n, 1), which may not be parsed yet.
        shape: shape of their pixels, uint8 (n, height, width, 3).
        preparation: how they become pixels.
        client: the client whose turns they have.
    """

    name: str
    files: Array | LateArray
    shape: tuple[int, ...]
    preparation: PicturePreparation
    client: str

    def read(self) -> list[bytes]:
        """Return the picture files.

        Raises:
            InferenceError: the bytes differ from the request's declaration.
        """
        files = self.files.read() if isinstance(self.files, LateArray) else self.files
        found: list[bytes] = files.ravel().tolist()
        return found


class EncodedInputs(Mapping[str, Array]):
    """A request's inputs by name, without the pictures, which must be decoded before a model takes the inputs.

    Attributes:
        pictures: the pictures.
    """

    __slots__ = ("_others", "pictures")

    def __init__(self, pictures: EncodedPictures, arrays: Mapping[str, Array | LateArray]) -> None:
        """`arrays`: the inputs; the one of the pictures is left out."""
        self.pictures = pictures
        self._others = {name: array for name, array in arrays.items() if name != pictures.name}

    def __getitem__(self, name: str) -> Array:
        array = self._others[name]
        return array.read().reshape(array.shape) if isinstance(array, LateArray) else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)

    @property
    def nbytes(self) -> int:
        """Bytes of the other inputs that have been read."""
        return sum(array.nbytes for array in self._others.values() if not isinstance(array, LateArray))

    def with_pixels(self, pixels: Array) -> Tensors:
        """Return the inputs that the model takes."""
        arrays: dict[str, Array | LateArray] = {**self._others, self.pictures.name: pixels}
        read = {name: array for name, array in arrays.items() if not isinstance(array, LateArray)}
        return read if len(read) == len(arrays) else LateInputs(arrays)
