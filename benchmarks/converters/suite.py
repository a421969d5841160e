"""Runs a converter over cases in child processes and collects the verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx

from benchmarks.converters.float_share import Share, share_of
from benchmarks.converters.peers import converter
from tests.export.conversions.cases import Case, cases
from tests.export.conversions.crash_pool import Crash, CrashPool
from tests.export.conversions.judge import Verdict, failed, judge, judgeable


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one converter for one case.

    Attributes:
        case: The case's name.
        verdict: The judge's verdict.
        share: Nodes by type in the converted model; zeros if there is none.
    """

    case: str
    verdict: Verdict
    share: Share = field(default_factory=Share)


def judgeable_cases(kind: str, workers: int = 2) -> list[Case]:
    """The cases of a kind that ONNX Runtime's CPU runs right in float32."""
    every = list(cases(kind))
    with CrashPool(judgeable, workers=workers) as pool:
        return [case for case, counts in zip(every, pool.map((case,) for case in every), strict=True) if counts is True]


def outcomes(
    name: str, chosen: Sequence[Case], *, keep_io: bool, modelopt_python: str | None, workers: int = 2
) -> Iterator[Outcome]:
    """Convert and judge every case; a crash or a hang is a verdict."""
    with CrashPool(convert_and_judge, workers=workers, timeout_seconds=300) as pool:
        results = pool.map((name, modelopt_python, case, keep_io) for case in chosen)
        for case, result in zip(chosen, results, strict=True):
            yield Outcome(case=case.name, verdict=failed("crash", result.text)) if isinstance(result, Crash) else result


def convert_and_judge(name: str, modelopt_python: str | None, case: Case, keep_io: bool) -> Outcome:
    """Convert one case and judge the result."""
    try:
        converted = converter(name, modelopt_python)(case.model, keep_io)
    except Exception as error:  # noqa: BLE001  (converters raise anything)
        return Outcome(case=case.name, verdict=failed("convert", f"{type(error).__name__}: {error}"))
    verdict = judge(case, converted, keep_io)
    return Outcome(case=case.name, verdict=verdict, share=_share(converted))


def _share(converted: bytes) -> Share:
    try:
        return share_of(onnx.load_from_string(converted))
    except Exception:  # noqa: BLE001  (a broken model has no share)
        return Share()
