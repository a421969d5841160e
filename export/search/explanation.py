"""What a search says when it found nothing that is enough, or not the least."""

from __future__ import annotations

from collections.abc import Collection

from export.onnx_fp16.settings import Settings
from export.search.trials import Trial, Trials


def explained(settings: Settings, trials: Trials, best: Trial, candidates: Collection[str], *, minimal: bool, note: str) -> str:
    """A few sentences; empty where there is nothing to say.

    Args:
        settings: What the user asked for.
        trials: All that was tried.
        best: The trial that is returned.
        candidates: The nodes that could have been kept.
        minimal: Whether every member of the set is known to be needed.
        note: What went wrong on the way.
    """
    if best.passed:
        rest = "" if minimal else f"the runs ended after {trials.runs}: a smaller set may do; allow more with max_runs"
        return "; ".join(text for text in (note, rest) if text)
    whole = trials.known(candidates)
    if not candidates:
        text = "there is no node that could stay float32 and does not already"
    elif whole is None:
        text = f"the runs ended after {trials.runs}: allow more with max_runs"
    elif whole.passed:
        text = "all nodes in float32 meet the budget, nothing less that was tried does"
    elif not whole.violations:
        text = "nothing was compared: no output has elements on these samples; give others"
    else:
        text = f"even with all {len(candidates)} nodes in float32: {_first(whole)}; {_why(settings, whole)}"
    return "; ".join(part for part in (text, note) if part)


def _first(trial: Trial) -> str:
    more = len(trial.violations) - 1
    return trial.violations[0] + (f", and {more} more" if more > 0 else "")


def _why(settings: Settings, whole: Trial) -> str:
    if not whole.outputs:
        return "this is no question of precision"
    if settings.keep_io_types is not True:
        return "rounding the inputs and outputs themselves is too much; let them keep their types (--keep-io-types)"
    if whole.report.fp16_nodes:
        return f"{whole.report.fp16_nodes} nodes cannot stay float32"
    return "the budget is tighter than two runs of the same float32 model agree"
