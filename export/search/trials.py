"""Trials of a search: keep a set of nodes in float32, convert the rest, run the model and judge it as `verify` does.

The simulation runs first, since it rejects most sets. The real runtime, and a GPU where there is one, judge the others, so
that a set that passes here passes the final verification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir

from halfserve.export.certificate.verdicts import OutputVerdict, PrecisionVerdict, Risk
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, open_model
from halfserve.export.onnx_fp16.conversion_report import ConversionReport
from halfserve.export.onnx_fp16.convert import convert
from halfserve.export.search.narrowing import OutOfRunsError, Usage
from halfserve.export.search.searched_model import SearchedModel
from halfserve.export.verification.comparison import Comparison, allow_reference_noise
from halfserve.export.verification.criteria import Criteria
from halfserve.export.verification.executions import gpu_is_there, run_as_on_cuda, run_levels, run_simulated
from halfserve.export.verification.generated.adversarial import adversarial_cases
from halfserve.export.verification.generated.lengths import TARGETS, VaryingSizes
from halfserve.export.verification.judging import headroom
from halfserve.export.verification.samples import Feed, Inputs, inputs_of, make_feeds
from halfserve.export.verification.sandbox import RunResult, Sandbox, on_disk
from halfserve.export.verification.ties import judge_results

MEASURED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class SearchTrial:
    """Result of one trial.

    Attributes:
        kept: The nodes that stayed float32.
        passed: Whether all outputs were within the budget in every execution.
        outputs: Verdicts on the samples; of the simulation alone where that was over budget.
        violations: Everything that was over budget.
        report: The conversion's report.
        over: Names of the outputs that were over budget.
        risky: Nodes whose sums exceed float16's range, where the target runtime sums in float16.
    """

    kept: frozenset[str]
    passed: bool
    report: ConversionReport
    outputs: tuple[OutputVerdict, ...] = ()
    violations: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    risky: tuple[str, ...] = ()

    @property
    def non_finite(self) -> bool:
        return any(output.figures.non_finite for output in self.outputs) or any(
            "NaN or infinite" in text for text in self.violations
        )

    @property
    def error(self) -> float:
        """Largest scaled error of any output; infinite where a value is NaN or infinite, or the model did not run."""
        if self.non_finite or not self.outputs:
            return math.inf
        errors = [
            output.figures.max_scaled_error for output in self.outputs if output.figures.floating and output.figures.elements
        ]
        return max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)


class Trials:
    """Runs trials of one model on fixed samples, each set once, within limits.

    Attributes:
        feeds: The user's batches, then those of the adversarial cases that count; the longest ones of a large model left out,
            as a measurement takes several times the memory of a run.
        usage: Runs and time used.
    """

    def __init__(
        self,
        searched: SearchedModel,
        inputs: Inputs,
        sandbox: Sandbox,
        criteria: Criteria,
        progress: Callable[[str], None],
    ) -> None:
        settings = searched.settings
        adversarial, lengths, reference = settings.adversarial, criteria.lengths, criteria.reference
        self.usage = Usage(settings)
        self._searched, self._sandbox, self._progress = searched, sandbox, progress
        self._budget = budget = criteria.budget_of(settings.half.name)
        self._float16_sums = settings.accumulators == "float16"
        self._original = open_model(on_disk(open_model(searched.original), sandbox))
        self._has_own_reference = reference is not None
        wanted = inputs_of(self._original.outline)
        feeds = make_feeds(wanted, inputs, criteria.batch_size)
        cases = adversarial_cases(wanted, feeds.batches, resizable=feeds.resizable) if adversarial else []
        cases = [case for case in cases if case.factor is None or budget.min_headroom > 1]
        longer = VaryingSizes(self._original.outline).cases(feeds, lengths.sizes) if adversarial and lengths is not None else []
        small = self._original.size_bytes <= MEASURED_BYTES
        measured = [
            case for case in longer if small or all(max(array.shape, default=0) <= TARGETS[0] for array in case.feed.values())
        ]
        self._user_batches = len(feeds.batches)
        self.feeds: tuple[Feed, ...] = (*feeds.batches, *(case.feed for case in (*cases, *measured)))
        cases += longer
        compared = self._original if reference is None else reference
        self._comparison = Comparison(
            compared, self._original, sandbox, feeds, cases, self._original, criteria.task, settings.half
        )
        if budget.max_abs_error is None:  # `verify` does this for a model over budget, and a search begins with one
            allow_reference_noise(self._comparison, budget)
        self._done: dict[frozenset[str], SearchTrial] = {}

    def known(self, kept: Iterable[str]) -> SearchTrial | None:
        return self._done.get(frozenset(kept))

    @property
    def best(self) -> SearchTrial | None:
        """The smallest set within the budget."""
        return min((trial for trial in self._done.values() if trial.passed), key=lambda trial: len(trial.kept), default=None)

    def run(self, kept: Iterable[str]) -> SearchTrial:
        """Try a set. A model that cannot be opened or run counts as over budget.

        Raises:
            ExportError: The model cannot be converted.
            OutOfRunsError: A limit is reached and the set is new.
        """
        key = frozenset(kept)
        if key not in self._done:
            if self.usage.reached is not None:
                raise OutOfRunsError
            self._progress(self._announcement(len(key)))
            with self._sandbox.discarding():
                self._done[key] = self._tried(key)
            self.usage.runs += 1
        return self._done[key]

    def original_violations(self) -> list[str]:
        """Violations of the float32 ONNX model itself against a separate reference.

        Raises:
            ExportError: The model cannot be run.
        """
        if not self._has_own_reference:
            return []
        compared = self._comparison
        result = run_levels(compared, self._budget, below=False).answer
        verdicts = compared.judge("float32", compared.user_answers("float32", result), self._budget).verdicts
        return [f"output {verdict.name!r}: {text}" for verdict in verdicts for text in verdict.violations]

    def _announcement(self, count: int) -> str:
        usage, best = self.usage, self.best
        found = "" if best is None else f"; enough so far: {len(best.kept)}"
        return (
            f"searching: run {usage.runs + 1} of at most {usage.settings.max_runs}, {usage.seconds / 60:.1f} min: "
            f"{count} of {len(self._searched.nodes)} nodes in float32{found}"
        )

    def _tried(self, kept: frozenset[str]) -> SearchTrial:
        settings = self._searched.settings
        keeping = replace(settings, keep_fp32_nodes=(*settings.keep_fp32_nodes, *self._searched.present(kept)))
        converted = convert(onnx_ir.from_proto(self._searched.original), keeping)
        try:
            return self._judged(kept, open_model(onnx_ir.to_proto(converted.model)), converted.report)
        except ExportError as error:
            return SearchTrial(kept=kept, passed=False, violations=(f"cannot be run: {error}",), report=converted.report)

    def _judged(self, kept: frozenset[str], candidate: ModelFile, report: ConversionReport) -> SearchTrial:
        compared = self._comparison.of(candidate)
        simulated = run_simulated(
            candidate,
            self._sandbox,
            compared.staged,
            user_batches=self._user_batches,
            products=self._float16_sums,
            half=compared.half,
        )
        risks = simulated.risks if self._float16_sums else ()
        verdict = self._verdict(compared, "rounded", simulated.answer, risks)
        outputs, adversarial = verdict.outputs, verdict.adversarial
        for execution, answer in self._others(compared) if verdict.passed else ():
            verdict = self._verdict(compared, execution, answer)
            outputs, adversarial = (*outputs, *verdict.outputs), (*adversarial, *verdict.adversarial)
            if not verdict.passed:
                break
        over = [output.name for output in outputs if output.violations]
        over += [case.output for case in adversarial if case.violations and (case.factor or 1.0) <= self._budget.min_headroom]
        return SearchTrial(
            kept=kept,
            passed=verdict.passed,
            outputs=outputs,
            violations=tuple(verdict.violations),
            report=report,
            over=tuple(dict.fromkeys(name for name in over if name)),
            risky=tuple(risk.node for risk in risks),
        )

    def _others(self, compared: Comparison) -> Iterator[tuple[str, RunResult]]:
        """Results as CUDA computes it, of the CPU provider at its highest sound level, and of a GPU where there is one."""
        if self._searched.settings.target_device != "cpu":
            on_cuda = run_as_on_cuda(compared.candidate, self._sandbox, compared.staged, compared.half)
            if on_cuda is not None:
                yield "cuda", on_cuda
        yield "runtime", run_levels(compared, self._budget, below=False).answer
        on_gpu = compared.on_cuda() if gpu_is_there() else None
        if on_gpu is not None:
            yield "gpu", on_gpu

    def _verdict(self, compared: Comparison, execution: str, answer: RunResult, risks: Sequence[Risk] = ()) -> PrecisionVerdict:
        """Return the verdict that `verify` would give on one execution."""
        judged = judge_results(compared, {execution: answer}, self._budget)
        return PrecisionVerdict(
            budget=self._budget,
            outputs=judged.outputs,
            adversarial=judged.adversarial,
            headroom=headroom(judged.adversarial),
            accumulators="float16" if self._float16_sums else "float32",
            risks=tuple(risks),
        )
