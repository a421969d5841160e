"""What clients and logs are told about values that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

from serve.engine.errors import BackendError
from serve.engine.precision_guard.parts import Part
from serve.engine.tensors import Tensors

ADVICE = "send inputs of the size that the model was verified with, or serve it with the guard's policy 'fallback'"


class NonFiniteError(BackendError):
    """An answer would have held NaN or infinities, though the request did not; the model's guard rejects such answers."""

    def __init__(self, what: str, trouble: str = ADVICE) -> None:
        super().__init__(f"{what}, though every input is finite; {trouble}")


def what_is_bad(counts: Mapping[str, int], outputs: Tensors, part: Part) -> str:
    """A part of a sentence: "output 'y' holds 3 values of 10 that are NaN or infinite"."""
    return " and ".join(
        f"output {name!r} holds {count} of {outputs[name][part].size} values that are NaN or infinite"
        for name, count in counts.items()
    )
