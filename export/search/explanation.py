"""What a search says when it found nothing that is enough, or not the least."""

from __future__ import annotations

from collections.abc import Collection

from export.onnx_fp16.settings import Settings
from export.search.limits import Ending, SearchLimits
from export.search.trials import Trial, Trials


def explained(
    settings: Settings, trials: Trials, best: Trial, candidates: Collection[str], ending: Ending, *, note: str
) -> str:
    """A few sentences; empty where there is nothing to say.

    Args:
        settings: What the user asked for.
        trials: All that was tried.
        best: The trial that is returned.
        candidates: The nodes that could have been kept.
        ending: What ended the search.
        note: What went wrong on the way.

    Raises:
        ExportError: A model cannot be run.
    """
    text = _unfinished(ending, trials.usage.limits) if best.passed else _hopeless(settings, trials, best, candidates)
    return "; ".join(part for part in (text, note) if part)


def _unfinished(ending: Ending, limits: SearchLimits) -> str:
    text = {
        "complete": "",
        "max_runs": f"the limit of {limits.max_runs} runs ended the search: allow more with --max-runs (max_runs)",
        "max_minutes": f"the limit of {limits.max_minutes} min ended the search: allow more with --max-minutes (max_minutes)",
        "interrupted": "an interrupt ended the search: search again without one",
    }[ending]
    return f"{text}; this is the smallest set found, and a smaller one may do" if text else ""


def _hopeless(settings: Settings, trials: Trials, whole: Trial, candidates: Collection[str]) -> str:
    """Why not even the set of all candidates is within the budget."""
    if not candidates:
        return "there is no node that could stay float32 and does not already"
    if not whole.violations:
        return "nothing was compared: no output has elements on these samples; give others"
    why = _why(settings, trials, whole)
    return (
        f"no choice of nodes can meet the budget: even with all {len(candidates)} in float32: {_first(whole.violations)}; {why}"
    )


def _first(violations: Collection[str]) -> str:
    first, *rest = violations
    return first + (f", and {len(rest)} more" if rest else "")


def _why(settings: Settings, trials: Trials, whole: Trial) -> str:
    if not whole.outputs:
        return "this is no question of precision"
    if own := trials.original_violations():
        return f"the float32 ONNX model itself is over budget beside the reference: {_first(own)}"
    if settings.keep_io_types is not True:
        return "rounding the inputs and outputs themselves is too much; let them keep their types (--keep-io-types)"
    if whole.report.fp16_nodes:
        return f"{whole.report.fp16_nodes} nodes cannot stay float32"
    return "float32 itself does not meet it: allow more"
