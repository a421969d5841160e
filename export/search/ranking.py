"""In which order nodes are tried: what the training record knows first, then by the blame of their roundings, then the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from export.search.blame import Edge
from export.search.measurement import Measurement
from export.search.searched_model import SearchedModel


def ranked_steps(
    searched: SearchedModel,
    candidates: Collection[str],
    edges: Sequence[Edge],
    measured: Measurement,
    first: Sequence[Collection[str]] = (),
) -> list[tuple[str, ...]]:
    """Groups of nodes, each to be added to those before it; every candidate is in one.

    Args:
        searched: The model.
        candidates: The nodes that may be kept.
        edges: Roundings, the most blamed first; the nodes at both ends of one belong together.
        measured: The nodes' own errors, by which those without blame are ordered.
        first: Groups to put before all others.
    """
    left = dict.fromkeys(name for name in searched.nodes if name in set(candidates))
    steps: list[tuple[str, ...]] = []
    for group in (*first, *((edge.maker, edge.taker) for edge in edges)):
        step = tuple(name for name in dict.fromkeys(group) if name in left)
        for name in step:
            del left[name]
        if step:
            steps.append(step)
    outputs = {node.name: list(node.output) for node in searched.prepared.graph.node}
    rest = sorted(left, key=lambda name: -(measured.local_error(outputs[name]) or 0.0))
    return [*steps, *((name,) for name in rest)]
