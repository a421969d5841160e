"""Where float16 already hurt while the model was trained: nodes to try first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from export.search.searched_model import SearchedModel

if TYPE_CHECKING:
    from amp_core.recorder import Record

# Autocast runs these in float16. Where one ran in float32 while another did not, somebody had pinned its module.
_LOWERED = frozenset({"addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "convolution", "linear", "matmul", "mm"})
_HALF = frozenset({"float16", "bfloat16"})


def seeds_of(record: Record, searched: SearchedModel) -> list[str]:
    """Nodes of the modules whose forward range exceeded float16's, or that were pinned to float32, in the graph's order.

    What takes an overflowing value must stay float32 too, so the nodes right behind a module that overflowed belong to it.
    """
    overflowing = {entry.module for entry in record.risky() if entry.direction == "forward" and entry.magnitudes.lost_above}
    pinned = set(_pinned(record))
    near = [name for name, node in searched.nodes.items() if _is_in(node.module, overflowing, deep=False)]
    behind = _takers(searched, set(near))
    chosen = {name for name, node in searched.nodes.items() if _is_in(node.module, pinned, deep=True)} | behind | set(near)
    return [name for name in searched.nodes if name in chosen]


def _pinned(record: Record) -> Iterator[str]:
    products = [entry for entry in record.entries if entry.direction == "forward" and _base(entry.op) in _LOWERED]
    if any(entry.dtype.removeprefix("torch.") in _HALF for entry in products):
        yield from (entry.module for entry in products if entry.dtype.removeprefix("torch.") == "float32")


def _base(op: str) -> str:
    parts = op.replace("::", ".").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _is_in(module: str | None, modules: set[str], *, deep: bool) -> bool:
    """Whether a node of this module is in one of those; the recorded model itself is ".", and everything is in that."""
    if module is None:
        return False
    own = module or "."
    return own in modules or (deep and any(own.startswith(f"{path}.") for path in modules if path != "."))


def _takers(searched: SearchedModel, makers: set[str]) -> set[str]:
    made = {value for node in searched.prepared.graph.node if node.name in makers for value in node.output}
    takers = {node.name for node in searched.prepared.graph.node if not made.isdisjoint(node.input)}
    return takers & searched.nodes.keys()
