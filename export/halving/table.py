"""A report of `to_half` as a table that people read."""

from __future__ import annotations

from rich import box
from rich.table import Table

from export.halving.report import HalfReport, TensorDecision


def half_table(report: HalfReport, *, limit: int = 40) -> Table:
    """What happened to the tensors about which there is something to say; the others are counted in the title.

    Args:
        report: What `to_half` returned beside the module.
        limit: In rows; the caption says how many there are beyond.

    Returns:
        A row for each warning, repair, float32 module asked for and remarkable tensor, for `rich.print`.
    """
    counts = ", ".join(f"{count} {action}" for action, count in sorted(report.actions.items())) or "none"
    table = Table(title=f"tensors: {counts}", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("name", overflow="fold", min_width=12)
    table.add_column("elements", justify="right", no_wrap=True)
    table.add_column("action", no_wrap=True)
    table.add_column("why", overflow="fold")
    rows = [("", "", "warning", warning) for warning in report.warnings]  # first: a large model has more rows than the limit
    rows += [(", ".join(repair.nodes), "", "repaired", repair.text) for repair in report.repairs]
    rows += [(name or "(model)", "", "kept", reason) for name, reason in report.fp32_reasons]
    rows += [
        (tensor.name, f"{tensor.elements:,}", tensor.action, _why(tensor)) for tensor in report.tensors if tensor.is_remarkable
    ]
    for row in rows[:limit]:
        table.add_row(*row, style={"kept": "yellow", "warning": "red"}.get(row[2]))
    if len(rows) > limit:
        table.caption = f"{len(rows) - limit} rows more"
    return table


def _why(tensor: TensorDecision) -> str:
    ledger = tensor.ledger
    counts = [(ledger.overflow, "over 65504"), (ledger.flushed, "flushed to 0"), (ledger.subnormal, "subnormal")]
    losses = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    return f"{tensor.reason} ({losses})" if losses else tensor.reason
