"""What a search found, as people read it."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from export.search.result import KeptNodeCost, SearchResult

SHOWN = 40  # of a list; the rest is counted


def search_table(result: SearchResult) -> Group:
    """A table of the nodes to keep, and a few lines with the totals and what is over budget."""
    lines = [f"searched  {_counted(result.candidates, 'node')} in {_counted(result.runs, 'run')}: {_verdict(result)}"]
    lines += [f"over      {text}" for text in result.violations[:SHOWN]]
    if result.explanation:
        lines.append(f"note      {result.explanation}")
    texts = [Text(line) for line in lines]
    return Group(_table(result), *texts) if result.kept else Group(*texts)


def _verdict(result: SearchResult) -> str:
    count = len(result.node_block_list)
    if not result.passed:
        return f"none is enough; the best attempt keeps {count}"
    if not count:
        return "all can be float16"
    return f"{count} must stay float32" if result.minimal else f"{count} in float32 are enough"


def _table(result: SearchResult) -> Table:
    table = Table(
        title=Text(f"{_counted(len(result.kept), 'node')} to keep in float32"),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1),
        pad_edge=False,
    )
    columns = ("node", "operator", "module", "source", "reason")
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in ("alone", "at outputs", "casts", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for kept in result.kept[:SHOWN]:
        table.add_row(*(Text(cell) for cell in _cells(kept)))
    if len(result.kept) > SHOWN:
        table.caption = Text(f"and {len(result.kept) - SHOWN} more; --json lists all")
        table.caption_justify = "left"
    return table


def _cells(kept: KeptNodeCost) -> tuple[str, ...]:
    casts = "" if kept.cost.casts is None else f"{kept.cost.casts:+d}"
    errors = (_error(kept.local_error), _error(kept.propagated_error))
    return (
        kept.node,
        kept.op_type,
        kept.module or "",
        kept.source or "",
        kept.reason,
        *errors,
        casts,
        f"{kept.cost.weight_bytes:,}",
    )


def _error(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.1e}" if math.isfinite(error) else "NaN or inf"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
