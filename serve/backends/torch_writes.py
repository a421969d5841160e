"""Which of its tensors an exported program writes into: a buffer that keeps what one request left there is told to the next.

torch.export keeps `self.last.copy_(x)` as it stands, unless the program was made functional (`run_decompositions`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

OpOverload = torch._ops.OpOverload  # noqa: SLF001  (torch has no public name for the class)
HigherOrderOperator = torch._ops.HigherOrderOperator  # noqa: SLF001  (see above)
# Normalizations that train write these, and their schemas do not say so.
STATISTICS, TRAINING = frozenset({"running_mean", "running_var"}), frozenset({"training", "use_input_stats"})


def written(module: GraphModule) -> frozenset[str]:
    """Names of the placeholders whose tensors a graph may write into, by itself, through views, or in a subgraph."""
    targets = (target for node in module.graph.nodes for target in _targets(module, node))
    return frozenset(root for target in targets for root in _roots(target))


def _targets(module: GraphModule, node: Node) -> Iterator[Node]:
    """The nodes that one node writes into."""
    if isinstance(node.target, OpOverload):
        arguments = node.target._schema.arguments  # noqa: SLF001  (the only place where it says what it writes)
        given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | node.kwargs
        trains = any(given.get(name) is True for name in TRAINING)
        for argument in arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or (trains and argument.name in STATISTICS):
                yield from _nodes(given.get(argument.name))
    elif isinstance(node.target, HigherOrderOperator):
        taken = node.all_input_nodes
        inner = dict(module.named_modules())
        graphs = (inner.get(str(one.target)) for one in taken if one.op == "get_attr")
        if any(isinstance(graph, GraphModule) and written(graph) for graph in graphs):
            yield from taken  # which of them is not said in one way by all of these operators


def _nodes(given: Any) -> list[Node]:
    if isinstance(given, Node):
        return [given]
    return [one for one in given if isinstance(one, Node)] if isinstance(given, list | tuple) else []


def _roots(node: Node) -> Iterator[str]:
    """The placeholders that a node's tensor may be a view of."""
    pending, seen = [node], set[Node]()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op == "placeholder":
            yield one.name
        elif _may_be_view(one.target):
            pending += one.all_input_nodes


def _may_be_view(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return any(result.alias_info is not None for result in target._schema.returns)  # noqa: SLF001  (see above)
    return target is operator.getitem or isinstance(target, HigherOrderOperator)
