"""At which optimisation level ONNX Runtime can be trusted with a model: some crash it, some change its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnxruntime

from export.certificate.budget import Budget
from export.certificate.certificate import OutputVerdict
from export.certificate.probe import Probe
from export.certificate.verdicts import LevelVerdict
from export.errors import ExportError
from export.verification.children import CPU, Answer, Children
from export.verification.comparison import Comparison
from export.verification.executions import INLINE_LIMIT_BYTES, LEVELS
from export.verification.judging import judge


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How ONNX Runtime's CPU provider takes the candidate.

    Attributes:
        answer: Its answers at the highest level that is sound, or else at the highest that gives any.
        probe: That level, and what happened at higher ones.
        levels: All of them.
    """

    answer: Answer
    probe: Probe
    levels: tuple[LevelVerdict, ...]


def run_levels(comparison: Comparison, children: Children, budget: Budget, *, below: bool = True) -> Runtime:
    """Run the candidate at each level: on all batches until one is sound, on the first batch below.

    A model of more than 256 MiB is not tried below, where opening it takes most of the time.

    Args:
        comparison: The models and their batches.
        children: Where they run.
        budget: The limits.
        below: Whether to try the levels below the highest sound one too.

    Raises:
        ExportError: The runtime refuses the model or crashes at every level, or fails on the user's samples.
    """
    levels: list[LevelVerdict] = []
    chosen: tuple[str, Answer] | None = None
    fallback: tuple[str, Answer] | None = None
    for level in LEVELS:
        batches = comparison.staged if chosen is None else comparison.staged[:1]
        answer = children.run(comparison.path, batches, level=level, provider=CPU)
        verdict = _verdict(comparison, level, answer, budget)
        levels.append(verdict)
        if chosen is None and verdict.trouble is None:
            chosen = level, answer
            if not below or comparison.candidate.size_bytes > INLINE_LIMIT_BYTES:
                break
        elif fallback is None and verdict.max_scaled_error is not None:
            fallback = level, answer
    working = chosen or fallback
    if working is None:
        raise ExportError(_hopeless(levels))
    above = levels[: LEVELS.index(working[0])]
    crashes = tuple(f"{verdict.level}: {verdict.trouble}" for verdict in above)
    return Runtime(answer=working[1], probe=Probe(level=working[0], crashes=crashes), levels=tuple(levels))


def _verdict(comparison: Comparison, level: str, answer: Answer, budget: Budget) -> LevelVerdict:
    expected = comparison.expected[: len(answer.batches)]
    reached = answer.batches[: len(expected)]
    failed = next((batch for batch in reached if isinstance(batch, str)), None)
    cut_off = answer.trouble is not None and len(reached) < len(comparison.expected)
    if cut_off or failed is not None:
        return LevelVerdict(provider=CPU, level=level, trouble=answer.trouble if cut_off else failed)
    values = [batch for batch in reached if not isinstance(batch, str)]
    verdicts = judge(comparison.outputs, "runtime", expected, values, budget, comparison.yardsticks).verdicts
    broken = [f"output {verdict.name!r}: {text}" for verdict in verdicts for text in verdict.violations]
    return LevelVerdict(
        provider=CPU,
        level=level,
        trouble=f"over budget: {broken[0]}" if broken else None,
        max_scaled_error=_worst(verdicts),
    )


def _worst(verdicts: Sequence[OutputVerdict]) -> float:
    errors = [verdict.figures.max_scaled_error for verdict in verdicts]
    return max((error for error in errors if math.isfinite(error)), default=math.nan)


def _hopeless(levels: Sequence[LevelVerdict]) -> str:
    troubles = {verdict.trouble or "" for verdict in levels}
    crashed = any("killed by" in trouble or "exit status" in trouble or "no answer" in trouble for trouble in troubles)
    if not crashed:
        return f"ONNX Runtime cannot open or run the model: {levels[0].trouble}"
    listed = "; ".join(f"{verdict.level}: {verdict.trouble}" for verdict in levels)
    return (
        f"ONNX Runtime {onnxruntime.__version__} crashes on the model ({listed}); "
        "try another release of it, or keep the affected block in float32"
    )
