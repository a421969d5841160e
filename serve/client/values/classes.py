"""What a classification (`top_k=`) answers, as values."""

from __future__ import annotations

from dataclasses import dataclass

from serve.client.errors import InferenceClientError
from serve.client.values.tensors import Array


@dataclass(frozen=True)
class Class:
    """One of the best classes of a row.

    Attributes:
        index: of the class.
        value: of the output for it.
        label: its name; empty where the model has none.
    """

    index: int
    value: float
    label: str


def classes_of(output: Array) -> list[list[Class]]:
    """The classes of each row, best first.

    Args:
        output: that was asked for with `top_k`: an object array [rows, k] or [k] of b"value:index[:label]".

    Raises:
        InferenceClientError: the elements do not read like that; was the output asked for with `top_k`?
    """
    rows = output.reshape(-1, output.shape[-1]) if output.ndim and output.size else output.reshape(0, 0)
    return [[_class(element) for element in row] for row in rows]


def _class(element: object) -> Class:
    text = element.decode("utf-8", "replace") if isinstance(element, bytes) else str(element)
    value, _, rest = text.partition(":")
    index, _, label = rest.partition(":")
    try:
        return Class(int(index), float(value), label)
    except ValueError:
        raise InferenceClientError(
            f"{text[:40]!r} is no class, expected VALUE:INDEX[:LABEL]; was the output asked for with top_k?", code="INTERNAL"
        ) from None
