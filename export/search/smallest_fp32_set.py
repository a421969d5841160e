"""The smallest set of nodes that must stay float32 for an fp16 model to meet its budget.

A node either bears float16 or does not, and its operator's name says little about which. So this is measured: an instrumented
run tells what rounding does at every node, and how the errors reach the outputs (`export.search.blame`). That gives a ranking,
whose shortest prefix that meets the budget is looked for by doubling and halving; then everything that is not needed is left
out of it. Every set is judged as `verify` judges: what the simulation accepts, the real runtime runs too.

The search starts from all nodes in float32. Where that is over budget, no choice of nodes can help. Otherwise there is a set
within the budget from then on, and the smallest one that was found is returned however the search ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Literal

import onnx
import onnx_ir

from export.certificate.budget import Budget
from export.errors import ExportError
from export.files.model_file import ModelFile, ModelSource
from export.onnx_fp16.settings import settings_of
from export.search.blame import Edge, blamed_edges
from export.search.explanation import explained
from export.search.limits import MAX_RUNS, Ending, SearchLimits
from export.search.measurement import Measurement, measure
from export.search.narrowing import OutOfRunsError, enough, without_the_needless
from export.search.ranking import ranked_steps
from export.search.reasons import Reasons, scalar_constants
from export.search.result import Cost, KeptNodeCost, SearchResult
from export.search.searched_model import SearchedModel, searched_model
from export.search.seeds import seeds_of
from export.search.trials import Trial, Trials
from export.verification.children import Children
from export.verification.feeds import Inputs

if TYPE_CHECKING:
    from torch import nn

    from amp_core.recorder import Record


def find_fp32_nodes(
    model: onnx.ModelProto | onnx_ir.Model,
    inputs: Inputs,
    *,
    budget: Budget,
    reference: nn.Module | ModelSource | ModelFile | None = None,
    keep_io_types: bool | Collection[str] = True,
    op_block_list: Collection[str] = (),
    node_block_list: Collection[str] = (),
    repair: bool = True,
    record: Record | None = None,
    max_runs: int = MAX_RUNS,
    max_minutes: float | None = None,
    batch_size: int = 32,
    adversarial: bool = True,
    accumulators: Literal["float32", "float16"] = "float32",
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Find the smallest set of nodes to keep in float32.

    A set of k among n nodes takes about 2*log2(n) + 3*k conversions. The same model and samples give the same set every time,
    unless `max_minutes` or an interrupt ends the search. On KeyboardInterrupt the best set so far is returned, as at a limit,
    once all nodes in float32 were found within the budget.

    Args:
        model: The float32 model, as it is before conversion; at most 2 GiB. It is not changed.
        inputs: Samples, as `export.verification.verify.verify` takes them.
        budget: The limits that the set must meet.
        reference: The float32 torch module or ONNX model to compare with; by default the model itself.
        keep_io_types: As `convert` takes it.
        op_block_list: Operators that stay float32 whatever is found.
        node_block_list: Nodes that stay float32 whatever is found.
        repair: Whether the conversion repairs first.
        record: What was recorded while the model was trained. What is to blame in modules that left float16's range there, or
            were pinned to float32, is tried first and at once.
        max_runs: How many sets may be tried at most; at least 2. With few the set is good, but not proved minimal.
        max_minutes: After how many minutes no further set is tried; the first two are in any case.
        batch_size: How many samples run at once.
        adversarial: Whether the budget must hold on samples at the edge of the given ones too.
        accumulators: In which type the target runtime sums; with "float16", sums that outgrow it are over budget.
        progress: Is told each step before it begins.

    Raises:
        ExportError: The model cannot be read, converted or run on the samples, or a list names what is not there.
        UsageError: A limit is out of range.
        KeyboardInterrupt: It came before a set was found within the budget.
    """
    limits = SearchLimits(max_runs=max_runs, max_minutes=max_minutes)
    tell = progress or _silent
    tell("searching: preparing the model")
    searched = searched_model(model, settings_of(keep_io_types, op_block_list, node_block_list, repair))
    with Children() as children:
        trials = Trials(
            searched,
            inputs,
            children,
            reference=reference,
            budget=budget,
            batch_size=batch_size,
            adversarial=adversarial,
            float16_sums=accumulators == "float16",
            limits=limits,
            progress=tell,
        )
        return _Search(searched, trials, record, tell).result()


class _Search:
    def __init__(self, searched: SearchedModel, trials: Trials, record: Record | None, tell: Callable[[str], None]) -> None:
        self._searched, self._trials, self._tell = searched, trials, tell
        self._seeds = frozenset(seeds_of(record, searched)) if record is not None else frozenset()
        self._forced: frozenset[str] = frozenset()
        self._candidates: list[str] = []
        self._measured: list[Measurement] = []
        self._unmeasured, self._untried = "", ""

    def result(self) -> SearchResult:
        """Search."""
        nothing = self._trials.run(())
        if nothing.passed:
            return self._result(nothing, "complete", minimal=True)
        self._forced = frozenset(node.name for node in nothing.report.kept)
        self._candidates = [name for name in self._searched.nodes if name not in self._forced]
        everything = self._trials.run(self._candidates)
        if not everything.passed:
            return self._result(everything, "complete", minimal=False)
        ending, minimal = self._narrow()
        return self._result(self._trials.best or everything, ending, minimal=minimal)

    def _narrow(self) -> tuple[Ending, bool]:
        """Try smaller and smaller sets: what ended that, and whether each member of the best set is known to be needed."""
        try:
            members = enough(self._ranked, self._passes)
            _, minimal = without_the_needless(members or self._candidates, self._passes)
        except OutOfRunsError:
            minimal = False
        except KeyboardInterrupt:
            return "interrupted", False
        return ("complete", True) if minimal else (self._trials.usage.reached or "complete", False)

    def _passes(self, names: frozenset[str]) -> bool:
        """Whether a set is within budget. One that cannot be tried is not: what was found before it must not be lost."""
        try:
            return self._trials.run(names).passed
        except ExportError as error:
            self._untried = f"a set of {len(names)} nodes could not be tried ({error})"
            return False

    def _ranked(self, members: list[str]) -> list[tuple[str, ...]]:
        """The candidates that are not in a set, by what is to blame when that set stays float32."""
        if self._trials.usage.reached == "max_minutes":  # a measurement takes as long as several runs
            raise OutOfRunsError
        rest = [name for name in self._candidates if name not in set(members)]
        trial = self._trials.known(members)
        if not rest or trial is None:
            return []
        measured = self._measure(members)
        edges = self._edges(measured, trial, breaking=_breaks(measured, trial))
        remembered: list[str] = []
        for edge in edges if self._seeds and not members else ():
            ends = {edge.maker, edge.taker} & set(rest)
            if edge.is_heavy and ends <= self._seeds:
                remembered += sorted(ends)
        return ranked_steps(self._searched, rest, edges, measured, [remembered, trial.risky])

    def _measure(self, members: list[str]) -> Measurement:
        if self._unmeasured:
            return Measurement()
        self._tell(f"searching: measuring {len(self._searched.nodes)} nodes")
        try:
            self._measured.append(measure(self._searched, self._forced.union(members), self._trials.feeds))
        except ExportError as error:
            self._unmeasured = f"the nodes could not be measured one by one ({error}), so they were tried in the graph's order"
            return Measurement()
        return self._measured[-1]

    def _edges(self, measured: Measurement, trial: Trial, *, breaking: bool) -> list[Edge]:
        return blamed_edges(self._searched, measured, dict.fromkeys(trial.over, 1.0), breaking=breaking)

    def _result(self, trial: Trial, ending: Ending, *, minimal: bool) -> SearchResult:
        present = set(self._searched.present(trial.blocked))
        names = [name for name in self._searched.nodes if name in present]
        measured = self._measured[0] if self._measured else Measurement()
        edges = self._edges(measured, self._trials.run(()), breaking=False)
        note = "; ".join(text for text in (self._unmeasured, self._untried) if text)
        reasons = Reasons(self._searched, measured, edges, scalar_constants(self._searched.prepared))
        return SearchResult(
            node_block_list=tuple(names),
            kept=tuple(self._kept(name, trial, measured, reasons) for name in names),
            runs=self._trials.usage.runs,
            seconds=self._trials.usage.seconds,
            ending=ending,
            measurements=len(self._measured),
            outputs=trial.outputs,
            violations=trial.violations,
            passed=trial.passed,
            minimal=minimal and trial.passed and not self._untried,
            candidates=len(self._candidates or self._searched.nodes),
            explanation=explained(self._searched.settings, self._trials, trial, self._candidates, ending, note=note),
        )

    def _kept(self, name: str, trial: Trial, measured: Measurement, reasons: Reasons) -> KeptNodeCost:
        node = self._searched.nodes[name]
        outputs = [value for proto in self._searched.prepared.graph.node if proto.name == name for value in proto.output]
        without = self._trials.known(trial.blocked - {name})
        return KeptNodeCost(
            node=name,
            op_type=node.op_type,
            module=node.module,
            source=node.source,
            reason=reasons.of(name),
            local_error=measured.local_error(outputs),
            propagated_error=without.error if without is not None else None,
            cost=Cost(
                casts=None if without is None else trial.report.casts_added - without.report.casts_added,
                weight_bytes=node.weight_bytes,
            ),
        )


def _breaks(measured: Measurement, trial: Trial) -> bool:
    """Whether what overflows on the way matters: it reaches an output, or an output is further off than errors alone explain.

    Much that overflows does no harm, such as a mask on its way into a softmax.
    """
    carried = [measured.relative_carried(name) for name in trial.over]
    return trial.non_finite or not carried or trial.error > 2 * max(carried)


def _silent(_: str) -> None:
    pass
