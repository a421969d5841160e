"""Whether a request fits a model's metadata: found out before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from serve.client.errors import InvalidRequest

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelMetadataResponse


def fits(given: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether a shape is the expected one, in which -1 stands for any size."""
    return len(given) == len(expected) and all(e in (-1, g) for g, e in zip(given, expected, strict=True))


def check_shape(given: Sequence[int], expected: Sequence[int], where: str) -> None:
    """Refuse a shape that the model does not take.

    Raises:
        InvalidRequest: it is another; the text gives both, and says so if only the batch dimension is missing.
    """
    if fits(given, expected):
        return
    missing = len(expected) > 0 and expected[0] == -1 and fits(given, expected[1:])
    advice = "; only the batch dimension is missing: give array[None]" if missing else ""
    raise InvalidRequest(f"{where} has the shape {list(given)}, expected {list(expected)} (-1: any size){advice}")


def check_outputs(metadata: ModelMetadataResponse, names: Iterable[str]) -> None:
    """Refuse names that are no outputs of the model.

    Raises:
        InvalidRequest: the first such name, beside those that there are.
    """
    known = [tensor.name for tensor in metadata.outputs]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"model {metadata.name!r} has no output {name!r}; its outputs are: {', '.join(known)}")
