"""A conversion as people read it: how much is float16, what is not and why, what was repaired and rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from export.onnx_fp16.report import ConversionReport, KeptNode

SHOWN = 20  # of a list; the rest is counted
EXAMPLES = 3  # of nodes that stay float32 for one reason


def conversion_table(
    report: ConversionReport, *, source_bytes: int | None = None, size_bytes: int | None = None, certified: bool = False
) -> Group:
    """Tables of the nodes that stayed float32 and of the repairs, where there are any, and a few lines with the totals.

    Args:
        report: What the conversion did.
        source_bytes: Size of the float32 model.
        size_bytes: Size of the float16 model.
        certified: Whether the certificate's table follows, which says size and rounding too.
    """
    tables = [table for table in (_kept(report.kept), _repairs(report), _weights(report)) if table is not None]
    return Group(*tables, *(Text(line) for line in _facts(report, source_bytes, size_bytes, certified=certified)))


def _kept(kept: Sequence[KeptNode]) -> Table | None:
    if not kept:
        return None
    title = f"{_counted(len(kept), 'node')} in float32"
    if len(kept) > SHOWN:
        return _by_reason(kept, title)
    table = _table(title, "node", "operator", "reason", "module", "source")
    for node in kept:
        _add(table, node.name, node.op_type, node.reason, node.module or "", node.source or "")
    return table


def _by_reason(kept: Sequence[KeptNode], title: str) -> Table:
    """Too many to name one by one: a row for each reason, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for node in kept:
        groups.setdefault(node.reason, []).append(node.name)
    table = _table(title, "nodes", "reason", "such as")
    for reason, names in sorted(groups.items(), key=lambda group: -len(group[1]))[:SHOWN]:
        _add(table, str(len(names)), reason, ", ".join(names[:EXAMPLES]))
    table.caption, table.caption_justify = Text("--json lists all"), "left"
    return table


def _repairs(report: ConversionReport) -> Table | None:
    if not report.repairs:
        return None
    table = _table(_counted(len(report.repairs), "repair"), "repair", "nodes", "what was done")
    for repair in report.repairs[:SHOWN]:
        nodes = ", ".join(repair.nodes[:3]) + (f" and {len(repair.nodes) - 3} more" if len(repair.nodes) > 3 else "")
        _add(table, repair.pass_name, nodes, repair.text)
    return _ended(table, len(report.repairs))


def _weights(report: ConversionReport) -> Table | None:
    """Weights that lost numbers altogether; subnormal ones only lost digits, and are in the totals."""
    lost = [weight for weight in report.weights if weight.ledger.overflow or weight.ledger.flushed]
    if not lost:
        return None
    table = _table("weights that lost numbers", "tensor", "elements", "over 65504", "became 0", "subnormal")
    for weight in sorted(lost, key=lambda weight: (-weight.ledger.overflow, -weight.ledger.flushed))[:SHOWN]:
        counts = (weight.elements, weight.ledger.overflow, weight.ledger.flushed, weight.ledger.subnormal)
        _add(table, weight.name, *(f"{count:,}" for count in counts))
    return _ended(table, len(lost))


def _facts(report: ConversionReport, source_bytes: int | None, size_bytes: int | None, *, certified: bool) -> list[str]:
    ledger, nodes = report.ledger, _counted(report.float_nodes, "node")
    without = f", {report.unsupported_nodes} more have no float16" if report.unsupported_nodes else ""
    casts = _counted(abs(report.casts_added), "cast") + (" fewer" if report.casts_added < 0 else " added")
    lines = [f"float16   {report.fp16_nodes} of {nodes} that compute on floats{without}; {casts}"]
    if report.converted_before:
        lines.insert(0, "the model had been converted with these settings before, and is left as it is")
    if report.random_nodes:
        more = f" and {len(report.random_nodes) - EXAMPLES} more" if len(report.random_nodes) > EXAMPLES else ""
        drawn = f"{', '.join(report.random_nodes[:EXAMPLES])}{more}"
        lines.append(f"random    {drawn}: what depends on them differs from run to run, and a comparison proves little of it")
    if certified:
        return lines
    lines.append(f"rounding  {ledger.overflow:,} overflow, {ledger.flushed:,} flushed, {ledger.subnormal:,} subnormal")
    if size_bytes is not None and source_bytes:
        lines.append(f"size      {size_bytes:,} bytes, {size_bytes / source_bytes:.0%} of float32's {source_bytes:,}")
    return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))  # names come from models: brackets in them are no markup


def _ended(table: Table, total: int) -> Table:
    if total > SHOWN:
        table.caption = Text(f"and {total - SHOWN} more; --json lists all")
        table.caption_justify = "left"
    return table


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
