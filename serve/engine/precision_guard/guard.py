"""Checks a model's outputs between the computation and the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from operator import and_, or_

from halfserve.serve.engine.errors import InferenceError, NonFiniteError
from halfserve.serve.engine.precision_guard.non_finite import bad_stretches, check_of, count_non_finite, has_non_finite
from halfserve.serve.engine.precision_guard.tally import GuardCounters, GuardEvent, Tally
from halfserve.serve.engine.precision_guard.twin import Fallback, Part, Shadow, parts
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors, TensorSpec


class GuardPolicy(StrEnum):
    """Treatment of a request with non-finite outputs whose inputs are finite."""

    OFF = "off"
    COUNT = "count"
    REJECT = "reject"
    FALLBACK = "fallback"


def what_is_bad(counts: Mapping[str, int], outputs: Tensors, part: Part) -> str:
    """Describe the counts as a part of a sentence: "output 'y' holds 3 of 10 values that are NaN or infinite"."""
    return " and ".join(
        f"output {name!r} holds {count} of {outputs[name][part].size} values that are NaN or infinite"
        for name, count in counts.items()
    )


@dataclass(frozen=True)
class GuardVerdict:
    """The changes that the guard makes to a batch.

    Attributes:
        outputs: outputs to answer from, in place of the model's.
        rejected: errors of rejected requests, by their place in the batch.
    """

    outputs: Tensors
    rejected: Mapping[int, InferenceError]


class PrecisionGuard:
    """Guards one model version. `after` is called on worker threads, the other methods on any thread."""

    def __init__(
        self,
        outputs: Sequence[TensorSpec],
        tally: Tally,
        *,
        policy: GuardPolicy,
        batched: bool,
        fallback: Fallback | None = None,
        shadow: Shadow | None = None,
        degraded_not_ready: bool = False,
    ) -> None:
        """Make the guard of one model version.

        Args:
            outputs: the model's outputs, with the datatypes that `after` gets.
            tally: counts the findings.
            policy: treatment of non-finite answers.
            batched: whether the model has a batch dimension.
            fallback: answers in fp32; needed for that policy.
            shadow: compares samples with the fp32 twin.
            degraded_not_ready: whether a degraded model is not ready; see `blocks_readiness`.
        """
        checks = [(spec.name, check_of(spec.datatype)) for spec in outputs]
        self._checks = [(name, check) for name, check in checks if check is not None]
        self._tally = tally
        self._policy = policy
        self._batched = batched
        self._fallback = fallback
        self._shadow = shadow
        self._degraded_not_ready = degraded_not_ready

    @property
    def degraded(self) -> bool:
        """Whether the model's answers have drifted from the fp32 twin's."""
        return self._tally.degraded

    @property
    def blocks_readiness(self) -> bool:
        """Whether the model is degraded, and its configuration makes a degraded model not ready."""
        return self._degraded_not_ready and self._tally.degraded

    def counters(self) -> GuardCounters:
        return self._tally.counters()

    def recent_events(self) -> list[GuardEvent]:
        """Return the latest events, newest first."""
        return self._tally.recent_events()

    def stop(self) -> None:
        """End the shadow's thread."""
        if self._shadow is not None:
            self._shadow.stop()

    def after(self, requests: Sequence[InferRequest], inputs: Tensors, outputs: Tensors) -> GuardVerdict | None:
        """Check a computed batch, whose inputs may end in padding; None if the answers can be sent unchanged."""
        shadow = self._shadow
        if shadow is not None:
            shadow.until -= len(requests)
            if shadow.until <= 0:
                shadow.sample(requests, inputs, outputs)
        for name, is_bad in self._checks:
            if is_bad(outputs[name]):
                return self._judge(requests, inputs, outputs)
        return None

    def _judge(self, requests: Sequence[InferRequest], inputs: Tensors, outputs: Tensors) -> GuardVerdict | None:
        # perf_analyzer sends random bytes: nearly all of its requests get here, so that this path must be cheap.
        places = list(parts(requests, inputs, batched=self._batched))
        if len(requests) == 1 and _from_inputs(inputs, places[0]):
            self._tally.bad_inputs({name: 1 for name, is_bad in self._checks if is_bad(outputs[name])})
            return None
        # A request that was computed alone has finite inputs, as just checked.
        innocent = [0] if places[0] is ... else self._innocent(requests, inputs, outputs)
        bad: dict[int, dict[str, int]] = {}
        for index in innocent:
            part = places[index]
            counts = {name: count for name, _ in self._checks if (count := count_non_finite(outputs[name][part]))}
            if self._policy is GuardPolicy.COUNT or not any(name in counts for name in requests[index].outputs):
                self._tally.bad_answer(counts, "non_finite", f"passed on: {what_is_bad(counts, outputs, part)}")
            else:
                bad[index] = counts
        if not bad:
            return None
        if self._fallback is not None:
            return self._answer_in_fp32(self._fallback, requests, inputs, outputs, bad, places)
        rejected: dict[int, InferenceError] = {}
        for index, counts in bad.items():
            text = what_is_bad(counts, outputs, places[index])
            self._tally.bad_answer(counts, "rejected", f"rejected: {text}")
            rejected[index] = NonFiniteError(text)
        return GuardVerdict(outputs, rejected)

    def _innocent(self, requests: Sequence[InferRequest], inputs: Tensors, outputs: Tensors) -> list[int]:
        """Return the requests with non-finite outputs and finite inputs. Requests with non-finite inputs are only counted."""
        ends = list(accumulate([request.rows for request in requests]))
        guilty = [False] * len(requests)
        for array in inputs.values():
            guilty = list(map(or_, guilty, bad_stretches(array, ends)))
        innocent: set[int] = set()
        from_inputs: dict[str, int] = {}
        for name, _ in self._checks:
            bad = bad_stretches(outputs[name], ends)
            if bad == guilty:
                from_inputs[name] = bad.count(True)
            else:
                from_inputs[name] = sum(map(and_, bad, guilty))
                innocent.update([index for index, is_bad in enumerate(bad) if is_bad and not guilty[index]])
        if any(from_inputs.values()):
            self._tally.bad_inputs(from_inputs)
        return sorted(innocent)

    def _answer_in_fp32(
        self,
        fallback: Fallback,
        requests: Sequence[InferRequest],
        inputs: Tensors,
        outputs: Tensors,
        bad: Mapping[int, Mapping[str, int]],
        places: Sequence[Part],
    ) -> GuardVerdict:
        answers = fallback.answer(inputs, outputs, {index: places[index] for index in bad})
        rejected: dict[int, InferenceError] = {}
        for index, counts in bad.items():
            text = what_is_bad(counts, outputs, places[index])
            trouble = answers.trouble(index, requests[index].outputs)
            if trouble is None:
                requests[index].response_parameters = {"halfserve.precision": "fp32"}
                self._tally.bad_answer(counts, "fallback", f"answered in fp32: {text}")
            else:
                self._tally.bad_answer(counts, "rejected", f"rejected, as fp32 does not help: {text}; {trouble}")
                rejected[index] = NonFiniteError(text, trouble)
        return GuardVerdict(answers.outputs, rejected)


def _from_inputs(inputs: Tensors, part: Part) -> bool:
    return any(has_non_finite(array[part], likely=True) for array in inputs.values())
