"""Answer some requests of a batch from the fp32 twin."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from serve.engine.precision_guard.non_finite import non_finite_mask
from serve.engine.precision_guard.parts import Part
from serve.engine.precision_guard.twin import Fp32Twin
from serve.engine.tensors import Array, Tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TwinAnswers:
    """A batch's outputs with the twin's in the rows of some requests.

    Attributes:
        outputs: of the whole batch, in the interface's dtypes.
        beyond: for each of those requests, by its place in the batch: the outputs with values that are finite in fp32 and that
            the interface's dtype cannot hold, and how many there are.
        failure: why the twin has no answer; None where it has.
    """

    outputs: Tensors
    beyond: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    failure: str | None = None

    def trouble(self, index: int, wanted: Sequence[str]) -> str | None:
        """Why the twin's answer to a request, of which some outputs are wanted, is no good; None where it is."""
        if self.failure is not None:
            return self.failure
        found = [(name, count) for name, count in self.beyond[index].items() if name in wanted]
        if not found:
            return None
        name, count = found[0]
        dtype = self.outputs[name].dtype
        return (
            f"in fp32 they are finite, but {count} of output {name!r} are beyond {dtype}'s range; "
            "the model has to be exported with float32 outputs to answer this"
        )


class Fallback:
    """Runs the twin on the rows of the requests that fp16 failed on."""

    def __init__(self, twin: Fp32Twin) -> None:
        self._twin = twin

    def answer(self, inputs: Tensors, outputs: Tensors, places: Mapping[int, Part]) -> TwinAnswers:
        """Compute the answers anew.

        Args:
            inputs: of the batch.
            outputs: of the batch, from the fp16 model; left as they are.
            places: which rows, by the request's place in the batch.
        """
        try:
            answers = self._twin.answer({name: _gather(array, places) for name, array in inputs.items()})
        except Exception as error:  # noqa: BLE001  (whatever a runtime raises must not fail the rest of the batch)
            logger.warning("the fp32 twin failed: %s", error)
            return TwinAnswers(outputs=outputs, failure="the fp32 twin failed on it too")
        replaced = {name: array.copy() for name, array in outputs.items()}
        beyond: dict[int, dict[str, int]] = {index: {} for index in places}
        for name, array in replaced.items():
            for index, exact in _dealt_out(answers[name], places):
                part = places[index]
                if exact.shape != array[part].shape:
                    failure = f"the fp32 twin answers with output {name!r} of another shape, {list(exact.shape)}"
                    return TwinAnswers(outputs=outputs, failure=failure)
                with np.errstate(over="ignore", invalid="ignore"):
                    array[part] = exact
                lost = int(np.count_nonzero(non_finite_mask(array[part]) & ~non_finite_mask(exact)))
                if lost:
                    beyond[index][name] = lost
        return TwinAnswers(outputs=replaced, beyond=beyond)


def _gather(array: Array, places: Mapping[int, Part]) -> Array:
    rows = [array[part] for part in places.values()]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _dealt_out(answer: Array, places: Mapping[int, Part]) -> Iterator[tuple[int, Array]]:
    start = 0
    for index, part in places.items():
        if isinstance(part, slice):
            end = start + part.stop - part.start
            yield index, answer[start:end]
            start = end
        else:
            yield index, answer
