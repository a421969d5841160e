"""Size of the float32 sets that different searches find, and the number of runs they need: `python benchmarks/search.py`.

Networks of 20 to 500 nodes with 1, 3 or 10 places that float16 breaks. The compared searches are this project's, the shortest
run of nodes in topological order from either end (bisection, as in other tools), and all nodes of the failing operators.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import onnx
from rich.console import Console
from rich.table import Table

from halfserve.export.certificate.budget import Budget
from halfserve.export.conversion_options import SearchLimits
from halfserve.export.onnx_fp16.settings import Settings
from halfserve.export.search.searched_model import SearchedModel, searched_model
from halfserve.export.search.smallest_fp32_set import find_fp32_nodes
from halfserve.export.search.trials import Trials
from halfserve.export.verification.sandbox import Sandbox
from tests.export.search.nets import planted, samples

BUDGET = Budget(max_scaled_error=0.02, min_agreement=0)
KINDS = ("overflow", "cancel", "exponential", "variance", "epsilon")
SIZES = ((8, 1), (60, 1), (230, 1), (60, 3), (230, 3), (200, 10))


def main() -> None:
    """Run all, and print a row for each network."""
    table = Table(title="float32 nodes (runs)")
    for column in ("nodes", "plants", "ours", "seconds", "topological", "by operator"):
        table.add_column(column, justify="right")
    for layers, count in SIZES:
        kinds = itertools.cycle(KINDS)
        model = planted(layers, {place * layers // count + layers // (2 * count): next(kinds) for place in range(count)})
        began = time.monotonic()
        found = find_fp32_nodes(model, samples(), budget=BUDGET, adversarial=False, repair=False)
        seconds = time.monotonic() - began
        searched = searched_model(model, Settings(repair=False))
        operators = {kept.op_type for kept in found.kept}
        of_them = sum(node.op_type in operators for node in searched.nodes.values())
        size, runs = bisected(searched)
        ours = f"{len(found.node_block_list)} ({found.runs} + {found.measurements} measured)"
        table.add_row(str(nodes_of(model)), str(count), ours, f"{seconds:.1f}", f"{size} ({runs})", str(of_them))
    Console().print(table)


def bisected(searched: SearchedModel) -> tuple[int, int]:
    """Length of the shortest run of nodes that passes, cut from the end first, then from the front; and the number of runs."""
    names = list(searched.nodes)
    with Sandbox() as children:
        trials = Trials(
            searched,
            samples(),
            children,
            budget=BUDGET,
            batch_size=32,
            adversarial=False,
            float16_sums=False,
            limits=SearchLimits(max_runs=1000),
            progress=lambda _: None,
        )
        end = smallest(len(names), lambda stop: trials.run(names[:stop]).passed)
        length = smallest(end, lambda size: trials.run(names[end - size : end]).passed)
        return length, trials.usage.runs


def smallest(limit: int, passes: Callable[[int], bool]) -> int:
    """The smallest number up to a limit for which `passes` is true."""
    low, high = -1, limit
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            high = middle
        else:
            low = middle
    return high


def nodes_of(model: onnx.ModelProto) -> int:
    """Number of nodes of a model."""
    return len(model.graph.node)


if __name__ == "__main__":
    main()
