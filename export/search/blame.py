"""Which roundings are to blame for the errors at a model's outputs.

Errors flow forward, blame flows back. At every value the half path's error has several parts: what each input brings in, and
what rounding the value itself adds. Blame that arrives at a value is shared out among these in proportion; what falls to the
rounding stays there, with the edge it came along, and the rest goes on to the inputs. Blame starts at the outputs that are over
budget. There are two kinds of it: NaN and infinities are healed in the half path, so they have no part in its errors, and blame
for them flows on its own, from every node that turns a finite value into one.

An edge is a value and a node that takes it. Its rounding goes away when the nodes at both ends stay float32, and only then.
That is why edges are ranked, and not nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from export.search.half_path import BROKEN, captured
from export.search.measurement import Measurement
from export.search.searched_model import SearchedModel

# Weighs what breaks over what only errs: no number of small errors makes up for one infinity.
_BREAKING = 1e6
_NEGLIGIBLE = 1e-9
_LARGE = 0.02


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A rounding: of a value, on its way into a node.

    Attributes:
        value: The value.
        maker: The node that makes it; empty for inputs and weights.
        taker: The node that takes it; empty where it leaves the model.
        blame: Its part of the outputs' errors; all parts add up to about 1, those of what breaks to much more.
    """

    value: str
    maker: str
    taker: str
    blame: float

    @property
    def is_heavy(self) -> bool:
        """Whether it has a large part in the errors, or in something that breaks."""
        return _LARGE <= self.blame <= 1 or self.blame >= _LARGE * _BREAKING


def blamed_edges(searched: SearchedModel, measured: Measurement, outputs: Mapping[str, float], *, breaking: bool) -> list[Edge]:
    """All edges with blame, most blamed first; of equal ones those that come first in the graph.

    Args:
        searched: The model.
        measured: What was measured in it.
        outputs: How much each output is to be explained, by name.
        breaking: Whether NaN or infinite values reach the outputs.
    """
    makers = {name: node for node in searched.prepared.graph.node for name in node.output if name}
    flows = [_Flow(searched, measured, makers, breaking=False)]
    total = sum(outputs.values()) or 1.0
    for name, weight in outputs.items():
        flows[0].arrive(name, "", weight / total)
    if breaking:
        flows.append(_Flow(searched, measured, makers, breaking=True))
    blame: dict[tuple[str, str], float] = defaultdict(float)
    for flow in flows:
        for edge, part in flow.run().items():
            blame[edge] += part
    order = {node.name: index for index, node in enumerate(searched.prepared.graph.node)}
    edges = [
        Edge(value=value, maker=makers[value].name if value in makers else "", taker=taker, blame=part)
        for (value, taker), part in blame.items()
        if part > _NEGLIGIBLE
    ]
    return sorted(edges, key=lambda e: (-e.blame, order.get(e.taker, len(order)), e.value))


class _Flow:
    """Blame of one kind on its way back through a model."""

    def __init__(
        self, searched: SearchedModel, measured: Measurement, makers: Mapping[str, onnx.NodeProto], *, breaking: bool
    ) -> None:
        self._graph, self._floats = searched.prepared.graph, searched.floats
        self._measured, self._makers, self._breaking = measured, makers, breaking
        self._arrived: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._stayed: dict[tuple[str, str], float] = defaultdict(float)

    def arrive(self, value: str, taker: str, blame: float) -> None:
        """Blame comes to a value from a node that takes it."""
        self._arrived[value][taker] += blame

    def run(self) -> dict[tuple[str, str], float]:
        """The blame of each edge (value, taker)."""
        for node in reversed(self._graph.node):
            for value in node.output:
                if value:
                    self._share_out(node, value)
        for value in [*(info.name for info in self._graph.input), *(tensor.name for tensor in self._graph.initializer)]:
            for taker, blame in self._arrived.get(value, {}).items():
                self._stay(value, taker, blame)
        return self._stayed

    def _stay(self, value: str, taker: str, blame: float) -> None:
        if blame:
            self._stayed[value, taker] += blame

    def _share_out(self, node: onnx.NodeProto, value: str) -> None:
        fresh, brought = self._measured.fresh.get(value, 0.0), self._brought(node, value)
        if self._breaking and any(error >= BROKEN for error in brought.values()):
            self.arrive(value, "", _BREAKING)
        elif not self._breaking:
            fresh = 0.0 if fresh >= BROKEN else fresh
            brought = {source: self._unbroken(source, error, value) for source, error in brought.items()}
        from_inputs = sum(brought.values())
        for taker, blame in self._arrived.get(value, {}).items():
            rounding = fresh if {node.name, taker} & self._measured.half else 0.0
            whole = rounding + from_inputs
            if not whole:
                self._pass_on(node, value, taker, blame)
                continue
            self._stay(value, taker, blame * rounding / whole)
            for source, error in brought.items():
                if error:
                    self.arrive(source, node.name, blame * error / whole)

    def _brought(self, node: onnx.NodeProto, value: str) -> dict[str, float]:
        """What each input brings into a value; of nodes with bodies, shared out by how wrong each is."""
        brought = dict(self._measured.brought.get(value, {}))
        together = brought.pop("", 0.0)
        if together:
            sources = [name for name in dict.fromkeys([*node.input, *captured(node)]) if name in self._floats]
            errors = {name: self._measured.relative_error(name) for name in sources}
            total = sum(errors.values())
            brought.update({name: together * error / total for name, error in errors.items() if total and error})
        return brought

    def _pass_on(self, node: onnx.NodeProto, value: str, taker: str, blame: float) -> None:
        """Where nothing was measured, as between integers, every input that a node makes has an equal part."""
        sources = [name for name in dict.fromkeys(node.input) if name in self._makers]
        if value in self._floats and self._floats.isdisjoint(sources):
            self._stay(value, taker, blame)
            return
        for source in sources:
            self.arrive(source, node.name, blame / len(sources))

    def _unbroken(self, source: str, error: float, value: str) -> float:
        """What an input brings in once it is healed: where it breaks something, about as much as it carries itself."""
        if error < BROKEN:
            return error
        return self._measured.relative_carried(source) * self._measured.scale.get(value, 0.0)
