"""A placement as people read it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from export.placement.audit import Placement
    from export.placement.predict_cuda import CudaWarning

SHOWN = 8  # of a list; the rest is counted


def placement_lines(placement: Placement) -> list[str]:
    """The placement in a few lines: nodes per provider, casts, copies, islands, and what CUDA would not take."""
    nodes = ", ".join(f"{sum(counts.values())} on {_short(name)}" for name, counts in placement.assigned.items()) or "none"
    casts = f"casts {placement.casts_in_file} in the file"
    if placement.casts_at_runtime is not None:
        casts += f", {placement.casts_at_runtime} when it runs; copies {placement.copies}"
    lines = [f"placement {nodes}; {casts}; float32 islands {len(placement.islands)}"]
    lines += [f"runtime   {crash}" for crash in placement.crashes]
    lines += [f"on CUDA   {line}" for line in _cuda_lines(placement.cuda)]
    return lines


def placement_table(placement: Placement) -> Group:
    """All of it: operators per provider, islands with their reasons, and CUDA's warnings."""
    providers = _table(f"placement by ONNX Runtime {placement.runtime} at {placement.level}", "provider", "nodes", "operators")
    for name, counts in placement.assigned.items():
        _add(providers, _short(name), str(sum(counts.values())), _counted(counts))
    islands = _table("float32 islands", "nodes", "operators", "reason")
    for island in placement.islands:
        names = ", ".join(island.nodes[:SHOWN]) + (
            f" and {len(island.nodes) - SHOWN} more" if len(island.nodes) > SHOWN else ""
        )
        _add(islands, names, _counted(island.op_types), "; ".join(island.reasons) or "the model has it so")
    return Group(providers, *([islands] if placement.islands else []), *(Text(line) for line in placement_lines(placement)))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))  # names come from models: brackets in them are no markup


def _cuda_lines(warnings: tuple[CudaWarning, ...]) -> list[str]:
    texts = Counter(warning.text for warning in warnings)
    first = {warning.text: warning.node for warning in reversed(warnings)}
    lines = [f"{first[text]}{f' and {count - 1} more' if count > 1 else ''}: {text}" for text, count in texts.most_common()]
    return [*lines[:SHOWN], *([f"{len(lines) - SHOWN} more kinds of nodes"] if len(lines) > SHOWN else [])]


def _counted(counts: dict[str, int]) -> str:
    most = Counter(counts).most_common()
    text = ", ".join(name if count == 1 else f"{count} {name}" for name, count in most[:SHOWN])
    return text + (f" and {len(most) - SHOWN} more kinds" if len(most) > SHOWN else "")


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")
