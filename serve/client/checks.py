"""Whether a request fits a model's metadata: found out before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

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


def check_text(value: object, what: str) -> None:
    """Refuse what the protocol cannot carry as text.

    Raises:
        InvalidRequest: it is no str, or holds half of a surrogate pair, which UTF-8 cannot say.
    """
    if not isinstance(value, str):
        raise InvalidRequest(f"{what} must be text, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} must be text that UTF-8 can say, not {value!r}: {error.reason}") from None


def is_above_0(value: object) -> bool:
    """Whether it is a number above 0; True and False are none."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool) and bool(value > 0)


def check_named(inputs: object) -> None:
    """Refuse inputs without names.

    Raises:
        InvalidRequest: they are no mapping.
    """
    if not isinstance(inputs, Mapping):
        raise InvalidRequest(f"inputs must be arrays by name, such as {{'x': array}}, not {type(inputs).__name__}")


def check_outputs(metadata: ModelMetadataResponse, names: Iterable[str]) -> None:
    """Refuse names that are no outputs of the model.

    Raises:
        InvalidRequest: the first such name, beside those that there are.
    """
    known = [tensor.name for tensor in metadata.outputs]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"model {metadata.name!r} has no output {name!r}; its outputs are: {', '.join(known)}")
