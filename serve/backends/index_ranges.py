"""The valid values of an input of indices, as far as a model's graph determines them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.tensors import Array, Tensors


@dataclass(frozen=True)
class IndexRange:
    """The valid values of an input, both ends included."""

    low: int
    high: int

    def outside(self, array: Array) -> int | None:
        """Return a value of the array that is not in the range; None if all are."""
        if not array.size:
            return None
        least, most = int(array.min()), int(array.max())
        return most if most > self.high else least if least < self.low else None


def check_indices(ranges: Mapping[str, IndexRange], inputs: Tensors) -> None:
    """Check the inputs whose range is known. Raises InvalidArgumentError: an input has a value outside its range."""
    for name, known in ranges.items():
        value = known.outside(inputs[name]) if name in inputs else None
        if value is not None:
            raise InvalidArgumentError(
                f"input {name!r} has the value {value}, expected {known.low} to {known.high}: it is the index of one of "
                f"{known.high + 1} rows"
            )
