"""What a search found, as people read it."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from export.search.result import KeptNodeCost, SearchResult

SHOWN = 40  # of a list; the rest is counted
COLUMNS = ("operator", "alone", "at outputs", "casts", "bytes")
NUMBERS = set(COLUMNS[1:])
ALWAYS = {"operator"}


def search_table(result: SearchResult) -> Group:
    """A table of the nodes to keep, where they are enough, and a few lines with the totals and what is over budget."""
    spent = f"{_counted(result.runs, 'run')}, {result.seconds / 60:.1f} min"
    lines = [f"searched  {_counted(result.candidates, 'node')} in {spent}: {_verdict(result)}"]
    lines += [f"over      {text}" for text in result.violations[:SHOWN]]
    if result.explanation:
        lines.append(f"note      {result.explanation}")
    texts = [Text(line) for line in lines]
    return Group(_table(result), *texts) if result.kept and result.passed else Group(*texts)


def _verdict(result: SearchResult) -> str:
    count = len(result.node_block_list)
    if not result.passed:
        return f"none is enough, not even all {count} in float32"
    if not count:
        return "all can be float16"
    return f"{count} must stay float32" if result.minimal else f"{count} in float32 are enough, perhaps fewer"


def _table(result: SearchResult) -> Table:
    table = Table(
        title=Text(f"{_counted(len(result.kept), 'node')} to keep in float32"),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1),
        pad_edge=False,
    )
    rows = [_cells(kept) for kept in result.kept[:SHOWN]]
    # A narrow terminal has no room for columns that say nothing.
    told = [place for place, column in enumerate(COLUMNS) if column in ALWAYS or any(row[place] for row in rows)]
    table.add_column("node and reason", overflow="fold")
    for place in told:
        table.add_column(COLUMNS[place], justify="right" if COLUMNS[place] in NUMBERS else "left", no_wrap=True)
    for kept, row in zip(result.kept, rows, strict=False):
        where = " ".join(part for part in (kept.module, kept.source) if part)
        story = "\n  ".join(part for part in (kept.node, where, kept.reason) if part)
        table.add_row(Text(story), *(Text(row[place]) for place in told))
    if len(result.kept) > SHOWN:
        table.caption = Text(f"and {len(result.kept) - SHOWN} more; --json lists all")
        table.caption_justify = "left"
    return table


def _cells(kept: KeptNodeCost) -> tuple[str, ...]:
    return (
        kept.op_type,
        _error(kept.local_error),
        _error(kept.propagated_error),
        f"{kept.cost.casts:+d}" if kept.cost.casts else "",
        f"{kept.cost.weight_bytes:,}" if kept.cost.weight_bytes else "",
    )


def _error(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.1e}" if math.isfinite(error) else "NaN or inf"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
