"""One try: a set of nodes stays float32, the rest is converted, run, and judged as `verify` judges it.

The simulation judges first, as it refuses most. What it accepts is judged by the real runtime too, on a GPU where there is one,
so that a set that passes here passes the final verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir

from export.certificate.budget import Budget
from export.certificate.certificate import Certificate, OutputVerdict
from export.certificate.probe import Probe
from export.certificate.risk import Risk
from export.errors import ExportError
from export.files.model_file import ModelFile, ModelSource, open_model
from export.onnx_fp16.convert import convert
from export.onnx_fp16.report import ConversionReport
from export.search.limits import SearchLimits, Usage
from export.search.narrowing import OutOfRunsError
from export.search.searched_model import SearchedModel
from export.verification.adversarial import adversarial_cases
from export.verification.children import Answer, Children, Feed
from export.verification.comparison import Comparison
from export.verification.edge_cases import headroom, judge_cases
from export.verification.executions import gpu_is_there, on_disk, run_simulated
from export.verification.feeds import Inputs, make_feeds
from export.verification.interface import inputs_of
from export.verification.judging import judge
from export.verification.levels import run_levels
from export.verification.own_noise import allow_own_noise
from export.verification.ties import settle_ties

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one set.

    Attributes:
        blocked: The set.
        passed: Whether all outputs were within the budget in every way of execution.
        outputs: Figures and violations on the samples; of the simulation alone where that was over budget.
        violations: Everything over budget, in words.
        report: What the conversion did.
        over: Names of the outputs that are over budget.
        risky: Nodes whose sums outgrow float16, where those count.
    """

    blocked: frozenset[str]
    passed: bool
    report: ConversionReport
    outputs: tuple[OutputVerdict, ...] = ()
    violations: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    risky: tuple[str, ...] = ()

    @property
    def non_finite(self) -> bool:
        """Whether an output has NaN or infinite values that the reference does not have."""
        return any(output.figures.non_finite for output in self.outputs) or any(
            "NaN or infinite" in text for text in self.violations
        )

    @property
    def error(self) -> float:
        """Largest error of any output in units of its scale; infinite where something is NaN or infinite, or nothing ran."""
        if self.non_finite or not self.outputs:
            return math.inf
        errors = [
            output.figures.max_scaled_error for output in self.outputs if output.figures.floating and output.figures.elements
        ]
        return max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)


class Trials:
    """Runs trials of one model on the same samples. Each set is tried once; the number of trials is limited.

    Attributes:
        feeds: The batches: the user's, then those of the adversarial cases that count.
        usage: The trials that were made and the time since the first was prepared, beside their limits.
    """

    def __init__(
        self,
        searched: SearchedModel,
        inputs: Inputs,
        children: Children,
        *,
        reference: nn.Module | ModelSource | ModelFile | None = None,
        budget: Budget,
        batch_size: int,
        adversarial: bool,
        float16_sums: bool,
        limits: SearchLimits,
        progress: Callable[[str], None],
    ) -> None:
        self.usage = Usage(limits)
        self._searched, self._children, self._budget = searched, children, budget
        self._float16_sums, self._progress = float16_sums, progress
        self._original = open_model(on_disk(open_model(searched.original), children))
        self._has_own_reference = reference is not None
        wanted = inputs_of(self._original.outline)
        feeds = make_feeds(wanted, inputs, batch_size)
        cases = adversarial_cases(wanted, feeds.batches, resizable=feeds.resizable) if adversarial else []
        self._cases = [case for case in cases if case.factor is None or budget.min_headroom > 1]
        self._usual, self._samples = len(feeds.batches), feeds.samples
        self.feeds: tuple[Feed, ...] = (*feeds.batches, *(case.feed for case in self._cases))
        compared = self._original if reference is None else reference
        self._comparison = Comparison(compared, self._original, children, feeds, self._cases, self._original)
        if budget.max_abs_error is None:  # as `verify` does for a model that is over budget, which is what a search begins with
            allow_own_noise(self._comparison, budget)
        self._done: dict[frozenset[str], Trial] = {}

    def known(self, blocked: Iterable[str]) -> Trial | None:
        """The trial of a set, if there was one."""
        return self._done.get(frozenset(blocked))

    @property
    def best(self) -> Trial | None:
        """The smallest set that was within the budget."""
        return min((trial for trial in self._done.values() if trial.passed), key=lambda trial: len(trial.blocked), default=None)

    def run(self, blocked: Iterable[str]) -> Trial:
        """Try a set. A model that cannot be opened or run is over budget, with the reason.

        Raises:
            ExportError: The model cannot be converted.
            OutOfRunsError: A limit is reached, and this set was not tried before.
        """
        key = frozenset(blocked)
        if key not in self._done:
            if self.usage.reached is not None:
                raise OutOfRunsError
            self._progress(self._announcement(len(key)))
            with self._children.discarding():
                self._done[key] = self._tried(key)
            self.usage.runs += 1
        return self._done[key]

    def original_violations(self) -> list[str]:
        """By how much the float32 ONNX model itself is over budget beside a reference of the user's own, in words.

        Raises:
            ExportError: It cannot be run.
        """
        if not self._has_own_reference:
            return []
        answer = run_levels(self._comparison, self._children, self._budget, below=False).answer
        answers = self._comparison.usual("float32", answer)
        compared = self._comparison
        verdicts = judge(compared.outputs, "float32", compared.expected, answers, self._budget, compared.yardsticks).verdicts
        return [f"output {verdict.name!r}: {text}" for verdict in verdicts for text in verdict.violations]

    def _announcement(self, count: int) -> str:
        usage, best = self.usage, self.best
        found = "" if best is None else f"; enough so far: {len(best.blocked)}"
        return (
            f"searching: run {usage.runs + 1} of at most {usage.limits.max_runs}, {usage.seconds / 60:.1f} min: "
            f"{count} of {len(self._searched.nodes)} nodes in float32{found}"
        )

    def _tried(self, blocked: frozenset[str]) -> Trial:
        settings = self._searched.settings
        converted = convert(
            onnx_ir.from_proto(self._searched.original),
            keep_io_types=settings.keep_io_types,
            op_block_list=settings.op_block_list,
            node_block_list=(*settings.node_block_list, *self._searched.present(blocked)),
            repair=settings.repair,
        )
        try:
            return self._judged(blocked, open_model(onnx_ir.to_proto(converted.model)), converted.report)
        except ExportError as error:
            return Trial(blocked=blocked, passed=False, violations=(f"cannot be run: {error}",), report=converted.report)

    def _judged(self, blocked: frozenset[str], candidate: ModelFile, report: ConversionReport) -> Trial:
        compared = self._comparison.of(candidate)
        simulated = run_simulated(candidate, self._children, compared.staged, usual=self._usual, products=self._float16_sums)
        risks = simulated.risks if self._float16_sums else ()
        verdict = self._verdict(compared, "rounded", simulated.answer, risks)
        outputs, lines = verdict.outputs, verdict.adversarial
        for execution, answer in self._real(compared) if verdict.passed else ():
            verdict = self._verdict(compared, execution, answer)
            outputs, lines = (*outputs, *verdict.outputs), (*lines, *verdict.adversarial)
            if not verdict.passed:
                break
        over = [output.name for output in outputs if output.violations]
        over += [line.output for line in lines if line.violations and (line.factor or 1.0) <= self._budget.min_headroom]
        return Trial(
            blocked=blocked,
            passed=verdict.passed,
            outputs=outputs,
            violations=tuple(verdict.violations),
            report=report,
            over=tuple(dict.fromkeys(name for name in over if name)),
            risky=tuple(risk.node for risk in risks),
        )

    def _real(self, compared: Comparison) -> Iterator[tuple[str, Answer]]:
        """The real runtime's answers: the CPU provider's at its highest sound level, and those of a GPU where there is one."""
        yield "runtime", run_levels(compared, self._children, self._budget, below=False).answer
        on_gpu = compared.on_cuda() if gpu_is_there() else None
        if on_gpu is not None:
            yield "cuda", on_gpu

    def _verdict(self, compared: Comparison, execution: str, answer: Answer, risks: Sequence[Risk] = ()) -> Certificate:
        """What `verify` would certify of one way of execution."""
        budget = self._budget
        answers = compared.usual(execution, answer)
        judged = judge(compared.outputs, execution, compared.expected, answers, budget, compared.yardsticks)
        edge = {execution: compared.edge(answer)}
        lines = judge_cases(self._cases, compared.expected_cases, edge, judged.verdicts, compared.outputs, budget)
        lines, _ = settle_ties(lines, self._cases, compared, judged.verdicts, budget)
        return Certificate(
            model="",
            onnx_sha256="",
            onnx_bytes=0,
            samples=self._samples,
            budget=budget,
            outputs=judged.verdicts,
            probe=Probe(level="", crashes=()),
            created_utc="",
            adversarial=lines,
            headroom=headroom(lines),
            accumulators="float16" if self._float16_sums else "float32",
            risks=tuple(risks),
        )
