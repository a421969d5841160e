"""A record as a table that people read."""

from __future__ import annotations

from rich import box
from rich.table import Table

from amp_core.recorder.entry import Entry
from amp_core.recorder.module_spans import OUTSIDE, ROOT
from amp_core.recorder.record import Record

_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_NAMES = {ROOT: "(model)", OUTSIDE: "(outside)"}


def module_name(path: str) -> str:
    """What people are shown for a module's path."""
    return _NAMES.get(path, path)


def table(record: Record, *, limit: int = 40) -> Table:
    """What ran in which dtype and range: first what float16 would turn into infinity or zero, then the rest as it first ran.

    Args:
        record: What to show.
        limit: In rows; the caption says how many there are beyond.

    Returns:
        A row for each module, operation, direction, output and combination of dtypes, for `rich.print`.
    """
    risky = record.risky()
    shown = dict.fromkeys((*risky, *record.entries))
    steps = f"{record.steps} recorded step{'' if record.steps == 1 else 's'}"
    title = f"{steps}: dtypes and ranges, and what float16 would lose"
    # Eighty columns are enough for names of two levels.
    result = Table(title=title, caption=_caption(record, len(risky), limit), box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    result.add_column("module", overflow="fold", min_width=11)
    result.add_column("op", overflow="fold", min_width=12)
    result.add_column("", no_wrap=True)
    result.add_column("dtype", overflow="fold")
    for heading in ("calls", "min", "max", "inf %", "0 %"):
        result.add_column(heading, justify="right", no_wrap=True)
    for entry in list(shown)[:limit]:
        style = "red" if entry.magnitudes.lost_above else "yellow" if entry.magnitudes.lost_below else None
        result.add_row(*_row(entry), style=style)
    return result


def _row(entry: Entry) -> tuple[str, ...]:
    magnitudes = entry.magnitudes
    output = f" [{entry.output}]" if entry.output else ""
    return (
        module_name(entry.module),
        short_name(entry.op) + output,
        "fwd" if entry.direction == "forward" else "bwd",
        _dtypes(entry),
        f"{entry.calls:,}",
        _number(magnitudes.smallest),
        _number(magnitudes.largest),
        _percent(magnitudes.lost_above),
        _percent(magnitudes.lost_below),
    )


def short_name(op: str) -> str:
    """An operation's name without what says nothing: `addmm` for `aten.addmm.default`."""
    return op.removeprefix("aten.").removesuffix(".default")


def _dtypes(entry: Entry) -> str:
    given, made = [_SHORT.get(dtype, dtype) for dtype in dict.fromkeys(entry.inputs)], _SHORT.get(entry.dtype, entry.dtype)
    return made if given == [made] else f"{' '.join(given)}>{made}".lstrip()


def _number(magnitude: float | None) -> str:
    return "-" if magnitude is None else f"{magnitude:.1e}"


def _percent(share: float) -> str:
    return "-" if not share else "<0.01" if share < 0.0001 else f"{share:.2%}".removesuffix("%")


def _caption(record: Record, risky: int, limit: int) -> str:
    more = len(record.entries) - limit
    risk = f"{risky} of {len(record.entries)} would lose numbers in float16 (largest 65504, smallest 6e-08)"
    return f"{risk}; {more} rows more" if more > 0 else risk
