"""Find the smallest set of nodes that must stay float32 for a half-precision model to meet its budget.

An operator's name says little about whether a node tolerates float16, so this is measured: an instrumented run yields the
rounding errors at every node and their path to the outputs (`search.error_attribution`), which rank the nodes. The
search takes the shortest prefix of the ranking that meets the budget, then removes every node that is not needed. Each set is
judged as `verify` judges: simulated, then on the real runtime.

The search starts with all nodes in float32. Where that is over budget, no choice of nodes helps. Otherwise a set within the
budget is known from then on, and the smallest known one is returned however the search ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Unpack

import onnx
import onnx_ir

from halfserve.export.certificate.budget import Budget
from halfserve.export.conversion_settings import PipelineKeywords, PipelineSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource
from halfserve.export.search.error_attribution import (
    Edge,
    Reasons,
    RoundingErrors,
    blamed_edges,
    measure,
    ranked_steps,
    scalar_constants,
)
from halfserve.export.search.narrowing import Ending, OutOfRunsError, minimized, smallest_passing_prefix
from halfserve.export.search.result import Cost, KeptNodeCost, SearchResult
from halfserve.export.search.searched_model import SearchedModel, searched_model
from halfserve.export.search.trials import SearchTrial, Trials
from halfserve.export.verification.criteria import Criteria
from halfserve.export.verification.samples import Inputs
from halfserve.export.verification.sandbox import Sandbox

if TYPE_CHECKING:
    from torch import nn

    from halfserve.amp_core.recorder.record import Record
    from halfserve.export.verification.generated.lengths import LongerSizes
    from halfserve.export.verification.judging import Judge

# Autocast runs these in float16. Where one of them ran in float32 beside others in float16, its module was pinned.
_LOWERED = frozenset({"addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "convolution", "linear", "matmul", "mm"})
_HALF = frozenset({"float16", "bfloat16"})


def find_fp32_nodes(
    model: onnx.ModelProto | onnx_ir.Model,
    inputs: Inputs,
    *,
    budget: Budget,
    reference: nn.Module | ModelSource | ModelFile | None = None,
    record: Record | None = None,
    batch_size: int = 32,
    progress: Callable[[str], None] | None = None,
    task: Judge | None = None,
    lengths: LongerSizes | None = None,
    **options: Unpack[PipelineKeywords],
) -> SearchResult:
    """Find the smallest set of nodes to keep in float32.

    A set of k among n nodes takes about 2*log2(n) + 3*k conversions. The result is deterministic unless `max_minutes` or an
    interrupt ends the search. After KeyboardInterrupt the best set so far is returned, once a set within the budget is known.

    Args:
        model: The float32 model before conversion, at most 2 GiB; not changed.
        inputs: Samples, as in `halfserve.export.verification.verify.verify`.
        budget: The limits that the set must meet.
        reference: The float32 torch module or ONNX model to compare with; by default the model itself.
        record: A recording of the training. Nodes of modules that left float16's range there, or that were pinned to float32,
            are tried first where errors are attributed to them.
        batch_size: Samples per run.
        progress: Called with a text before each step.
        task: Judges the first output in the terms of the model's task, in place of its rows' argmax.
        lengths: Sizes beside the samples' on which the budget must hold, with `adversarial`; none by default.
        options: The fields of `PipelineSettings`.

    Raises:
        ExportError: The model cannot be read, converted or run on the samples, or a list names a missing operator or node.
        UsageError: A limit is out of range.
        KeyboardInterrupt: The interrupt came before a set within the budget was known.
    """
    criteria = Criteria(budget=budget, reference=reference, record=record, batch_size=batch_size, task=task, lengths=lengths)
    settings = PipelineSettings.of_call("find_fp32_nodes", **options)
    return search_fp32_nodes(model, inputs, settings, criteria, progress or (lambda _: None))


def search_fp32_nodes(
    model: onnx.ModelProto | onnx_ir.Model,
    inputs: Inputs,
    settings: PipelineSettings,
    criteria: Criteria,
    progress: Callable[[str], None],
) -> SearchResult:
    """Find the smallest set of nodes for one conversion's settings; see `find_fp32_nodes`."""
    progress("searching: preparing the model")
    searched = searched_model(model, settings)
    with Sandbox() as sandbox:
        trials = Trials(searched, inputs, sandbox, criteria, progress)
        return _Search(searched, trials, criteria.record, progress).result()


class _Search:
    def __init__(self, searched: SearchedModel, trials: Trials, record: Record | None, tell: Callable[[str], None]) -> None:
        self._searched, self._trials, self._tell = searched, trials, tell
        self._seeds = frozenset(seeds_of(record, searched)) if record is not None else frozenset()
        self._forced: frozenset[str] = frozenset()
        self._candidates: list[str] = []
        self._measured: list[RoundingErrors] = []
        self._unmeasured, self._untried = "", ""

    def result(self) -> SearchResult:
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
        """Try smaller sets; returns what ended the search and whether the best set is proved minimal."""
        try:
            members = smallest_passing_prefix(self._ranked, self._passes)
            _, minimal = minimized(members or self._candidates, self._passes)
        except OutOfRunsError:
            minimal = False
        except KeyboardInterrupt:
            return "interrupted", False
        return ("complete", True) if minimal else (self._trials.usage.reached or "complete", False)

    def _passes(self, names: frozenset[str]) -> bool:
        """Return whether a set is within budget; a set that cannot be converted is not, so that earlier results are kept."""
        try:
            return self._trials.run(names).passed
        except ExportError as error:
            self._untried = f"a set of {len(names)} nodes could not be tried ({error})"
            return False

    def _ranked(self, members: list[str]) -> list[tuple[str, ...]]:
        """Return the candidates outside a set, ranked by the errors that remain when the set stays float32."""
        if self._trials.usage.reached == "max_minutes":  # a measurement takes as long as several runs
            raise OutOfRunsError
        rest = [name for name in self._candidates if name not in set(members)]
        trial = self._trials.known(members)
        if not rest or trial is None:
            return []
        measured = self._measure(members)
        edges = self._edges(measured, trial, breaking=_breaks(measured, trial))
        recorded: list[str] = []
        for edge in edges if self._seeds and not members else ():
            ends = {edge.producer, edge.consumer} & set(rest)
            if edge.is_heavy and ends <= self._seeds:
                recorded += sorted(ends)
        return ranked_steps(self._searched, rest, edges, measured, [recorded, trial.risky])

    def _measure(self, members: list[str]) -> RoundingErrors:
        if self._unmeasured:
            return RoundingErrors()
        self._tell(f"searching: measuring {len(self._searched.nodes)} nodes")
        try:
            self._measured.append(measure(self._searched, self._forced.union(members), self._trials.feeds))
        except ExportError as error:
            self._unmeasured = f"the nodes could not be measured one by one ({error}), so they were tried in the graph's order"
            return RoundingErrors()
        return self._measured[-1]

    def _edges(self, measured: RoundingErrors, trial: SearchTrial, *, breaking: bool) -> list[Edge]:
        return blamed_edges(self._searched, measured, dict.fromkeys(trial.over, 1.0), breaking=breaking)

    def _result(self, trial: SearchTrial, ending: Ending, *, minimal: bool) -> SearchResult:
        present = set(self._searched.present(trial.kept))
        names = [name for name in self._searched.nodes if name in present]
        measured = self._measured[0] if self._measured else RoundingErrors()
        edges = self._edges(measured, self._trials.run(()), breaking=False)
        note = "; ".join(text for text in (self._unmeasured, self._untried) if text)
        reasons = Reasons(self._searched, measured, edges, scalar_constants(self._searched.prepared))
        return SearchResult(
            keep_fp32_nodes=tuple(names),
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
            explanation=_explained(self._searched.settings, self._trials, trial, self._candidates, ending, note=note),
        )

    def _kept(self, name: str, trial: SearchTrial, measured: RoundingErrors, reasons: Reasons) -> KeptNodeCost:
        node = self._searched.nodes[name]
        outputs = [value for proto in self._searched.prepared.graph.node if proto.name == name for value in proto.output]
        without = self._trials.known(trial.kept - {name})
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


def _breaks(measured: RoundingErrors, trial: SearchTrial) -> bool:
    """Return whether overflows matter: they reach an output, or the output's error exceeds what finite errors explain.

    Many overflows are harmless, such as a mask before a softmax.
    """
    accumulated = [measured.relative_accumulated(name) for name in trial.over]
    return trial.non_finite or not accumulated or trial.error > 2 * max(accumulated)


def seeds_of(record: Record, searched: SearchedModel) -> list[str]:
    """Return nodes of modules whose forward pass exceeded float16's range or was pinned to float32, in the graph's order.

    A consumer of an overflowing value must stay float32 too, so the nodes right after an overflowing module are included.
    """
    overflowing = {entry.module for entry in record.risky() if entry.direction == "forward" and entry.magnitudes.lost_above}
    pinned = set(_pinned(record))
    near = [name for name, node in searched.nodes.items() if _is_in(node.module, overflowing, deep=False)]
    made = {value for node in searched.prepared.graph.node if node.name in set(near) for value in node.output}
    behind = {node.name for node in searched.prepared.graph.node if not made.isdisjoint(node.input)}
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
    """Return whether a node's module is, or with `deep` lies within, one of the modules; the recorded root is "."."""
    if module is None:
        return False
    own = module or "."
    return own in modules or (deep and any(own.startswith(f"{path}.") for path in modules if path != "."))


def _explained(
    settings: PipelineSettings, trials: Trials, best: SearchTrial, candidates: Collection[str], ending: Ending, *, note: str
) -> str:
    """Explain a result that is not minimal or not within the budget; empty otherwise."""
    text = _unfinished(ending, settings) if best.passed else _hopeless(settings, trials, best, candidates)
    return "; ".join(part for part in (text, note) if part)


def _unfinished(ending: Ending, settings: PipelineSettings) -> str:
    text = {
        "complete": "",
        "max_runs": f"the limit of {settings.max_runs} runs ended the search: allow more with --max-runs (max_runs)",
        "max_minutes": f"the limit of {settings.max_minutes} min ended the search: allow more with --max-minutes (max_minutes)",
        "interrupted": "an interrupt ended the search: search again without one",
    }[ending]
    return f"{text}; this is the smallest set found, and a smaller one may do" if text else ""


def _hopeless(settings: PipelineSettings, trials: Trials, whole: SearchTrial, candidates: Collection[str]) -> str:
    """Explain why even the set of all candidates is over budget."""
    if not candidates:
        return "every node that could stay float32 already does"
    if not whole.violations:
        return "nothing was compared: no output has elements on these samples; give others"
    offence, why = _first(whole.violations), _why(settings, trials, whole)
    return f"no choice of nodes can meet the budget: even with all {len(candidates)} in float32: {offence}; {why}"


def _first(violations: Collection[str]) -> str:
    first, *rest = violations
    return first + (f", and {len(rest)} more" if rest else "")


def _why(settings: PipelineSettings, trials: Trials, whole: SearchTrial) -> str:
    if not whole.outputs:
        return "precision is not the cause"
    if own := trials.original_violations():
        return f"the float32 ONNX model itself is over budget beside the reference: {_first(own)}"
    if settings.keep_io_types is not True:
        types = "keep_io_types=True or --keep-io-types"
        return f"rounding the inputs and outputs themselves is too much; let them keep their types ({types})"
    if whole.report.fp16_nodes:
        return f"{whole.report.fp16_nodes} nodes cannot stay float32"
    return "float32 itself does not meet it: allow more"
