"""One try: a set of nodes stays float32, the rest is converted, simulated as a GPU computes it, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir

from export.certificate.budget import Budget
from export.certificate.certificate import OutputVerdict, anything_compared
from export.errors import ExportError
from export.files.model_file import ModelFile, open_model
from export.onnx_fp16.convert import convert
from export.onnx_fp16.report import ConversionReport
from export.search.narrowing import OutOfRunsError
from export.search.searched_model import SearchedModel
from export.verification.adversarial import adversarial_cases
from export.verification.children import Children, Feed, Value
from export.verification.data_dependence import data_dependent_values
from export.verification.edge_cases import judge_cases
from export.verification.executions import on_disk, open_reference, run_simulated
from export.verification.feeds import Inputs, make_feeds
from export.verification.interface import inputs_of
from export.verification.judging import Output, judge


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one set.

    Attributes:
        blocked: The set.
        passed: Whether all outputs were within the budget.
        outputs: Figures and violations on the samples.
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
        runs: How many trials were made.
    """

    def __init__(
        self,
        searched: SearchedModel,
        inputs: Inputs,
        children: Children,
        *,
        budget: Budget,
        batch_size: int,
        adversarial: bool,
        float16_sums: bool,
        max_runs: int,
        progress: Callable[[str], None],
    ) -> None:
        self._searched, self._children, self._budget = searched, children, budget
        self._float16_sums, self._max_runs, self._progress = float16_sums, max_runs, progress
        reference = open_model(searched.original)
        wanted = inputs_of(reference.outline)
        feeds = make_feeds(wanted, inputs, batch_size)
        cases = adversarial_cases(wanted, feeds.batches, resizable=feeds.resizable) if adversarial else []
        self._cases = [case for case in cases if case.factor is None]
        self._usual = len(feeds.batches)
        self.feeds: tuple[Feed, ...] = (*feeds.batches, *(case.feed for case in self._cases))
        self._staged = children.stage(self.feeds)
        self._outputs = _outputs(reference)
        answers = open_reference(on_disk(reference, children), children, self._staged)
        self._expected = _whole(answers[: self._usual])
        self._expected_cases = answers[self._usual :]
        self._done: dict[frozenset[str], Trial] = {}
        self.runs = 0

    @property
    def runs_left(self) -> int:
        """How many more trials may be made."""
        return self._max_runs - self.runs

    def known(self, blocked: Iterable[str]) -> Trial | None:
        """The trial of a set, if there was one."""
        return self._done.get(frozenset(blocked))

    def run(self, blocked: Iterable[str]) -> Trial:
        """Try a set. A model that cannot be opened or run is over budget, with the reason.

        Raises:
            ExportError: The model cannot be converted.
            OutOfRunsError: The limit is reached, and this set was not tried before.
        """
        key = frozenset(blocked)
        if key not in self._done:
            if self.runs_left <= 0:
                raise OutOfRunsError
            self.runs += 1
            self._progress(f"searching: run {self.runs}, {len(key)} of {len(self._searched.nodes)} nodes in float32")
            self._done[key] = self._tried(key)
        return self._done[key]

    def passing(self) -> list[Trial]:
        """All trials that were within the budget, the smallest sets first."""
        return sorted((trial for trial in self._done.values() if trial.passed), key=lambda trial: len(trial.blocked))

    def closest(self) -> Trial:
        """The trial that came closest to the budget; of equal ones the smallest."""
        return min(self._done.values(), key=lambda t: (not t.passed, not t.outputs, t.non_finite, t.error, len(t.blocked)))

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
        simulated = run_simulated(candidate, self._children, self._staged, usual=self._usual, products=self._float16_sums)
        answer = simulated.answer
        if answer.trouble is not None:
            raise ExportError(answer.trouble)
        judged = judge(self._outputs, "rounded", self._expected, _whole(answer.batches[: self._usual]), self._budget)
        edge = {"rounded": answer.batches[self._usual :]}
        lines = judge_cases(self._cases, self._expected_cases, edge, judged.verdicts, self._outputs, self._budget)
        texts = [f"output {output.name!r}: {text}" for output in judged.verdicts for text in output.violations]
        texts += [f"output {line.output!r} on {line.case}: {text}" for line in lines for text in line.violations]
        over = [verdict.name for verdict in judged.verdicts if verdict.violations]
        over += [line.output for line in lines if line.violations]
        risks = simulated.risks if self._float16_sums else ()
        texts += [str(risk) for risk in risks]
        return Trial(
            blocked=blocked,
            passed=anything_compared(judged.verdicts) and not texts,
            outputs=judged.verdicts,
            violations=tuple(texts),
            report=report,
            over=tuple(dict.fromkeys(over)),
            risky=tuple(risk.node for risk in risks),
        )


def _outputs(model: ModelFile) -> list[Output]:
    dependent = data_dependent_values(model.outline.graph)
    return [Output(name=value.name, data_dependent=value.name in dependent) for value in model.outline.graph.output]


def _whole(answers: Sequence[list[Value] | str]) -> list[list[Value]]:
    for answer in answers:
        if isinstance(answer, str):
            raise ExportError(f"the model fails on the samples: {answer}")
    return [answer for answer in answers if not isinstance(answer, str)]
