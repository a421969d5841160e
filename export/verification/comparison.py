"""One reference and one candidate, their batches in files, and the reference's answers to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from export.errors import ExportError
from export.files.model_file import ModelFile, ModelSource, open_model
from export.verification.adversarial import Case
from export.verification.children import CUDA, Answer, Children, Feed, StagedFeed, Value
from export.verification.data_dependence import data_dependent_values
from export.verification.executions import LEVELS, on_disk, open_reference
from export.verification.feeds import Feeds
from export.verification.interface import inputs_of
from export.verification.judging import Output, learned_yardsticks
from export.verification.metrics import Array

if TYPE_CHECKING:
    from torch import nn


class Comparison:
    """The batches of the user come first, adversarial ones after them; every execution answers to all in this order.

    Attributes:
        candidate: The candidate.
        source: The float32 ONNX model: the reference where it is one, else what the candidate was made from, where known.
        children: Where models run.
        staged: All batches.
        outputs: The candidate's outputs.
        expected: The reference's answers to the user's batches.
        expected_cases: Its answers to the adversarial ones, or the errors they end in.
        yardsticks: What the errors of each output are divided by; replaced where the reference's own noise is allowed for.
        batches: The user's batches.
        reference_bytes: Size of the reference, where it is ONNX.
        reference_graph: Its graph, where it is ONNX.
        reference_path: Its file, where it has one.
        notes: What else is to be said of the reference.
    """

    def __init__(
        self,
        reference: nn.Module | ModelSource | ModelFile,
        candidate: ModelFile,
        children: Children,
        feeds: Feeds,
        cases: Sequence[Case],
        source: ModelFile | None = None,
    ) -> None:
        self.candidate = candidate
        self._reference: nn.Module | ModelFile = (
            open_model(reference) if isinstance(reference, onnx.ModelProto | bytes | str | Path) else reference
        )
        self.source = self._reference if isinstance(self._reference, ModelFile) else source
        self.children = children
        self._levels: Sequence[str] = LEVELS
        self._usual = len(feeds.batches)
        self.batches = feeds.batches
        batches = [*feeds.batches, *(case.feed for case in cases)]
        self.staged = children.stage(batches)
        self.outputs = _outputs(candidate.outline.graph)
        self.reference_bytes: int | None = None
        self.reference_graph: onnx.GraphProto | None = None
        self.reference_path: Path | None = None
        answers = self._reference_answers(batches, self.staged)
        self.notes = self._notes(answers)
        self.expected = whole(answers[: self._usual], "the reference model")
        self.expected_cases = tuple(answers[self._usual :])
        self.yardsticks = learned_yardsticks(self.outputs, self.expected)

    def of(self, candidate: ModelFile) -> Comparison:
        """The same reference, batches and answers, and another candidate."""
        other = copy(self)
        other.candidate = candidate
        vars(other).pop("path", None)
        return other

    @cached_property
    def path(self) -> Path:
        """Where children find the candidate.

        Raises:
            ExportError: It has to be written, and the disk is full.
        """
        return on_disk(self.candidate, self.children)

    @property
    def staged_cases(self) -> list[StagedFeed]:
        """The adversarial batches."""
        return self.staged[self._usual :]

    def usual(self, execution: str, answer: Answer) -> list[list[Value]]:
        """An execution's answers to the user's batches.

        Raises:
            ExportError: It crashed, was refused, or failed on one.
        """
        if answer.trouble is not None and len(answer.batches) < self._usual:
            raise ExportError(f"the fp16 model ({execution}) cannot be run: {answer.trouble}")
        return whole(answer.batches[: self._usual], f"the fp16 model ({execution})")

    def edge(self, answer: Answer) -> tuple[list[Value] | str, ...]:
        """An execution's answers to the adversarial batches; what a crash cut off is an error with its text."""
        reached = answer.batches[self._usual :]
        missing = len(self.staged) - self._usual - len(reached)
        return (*reached, *([answer.trouble or "not run"] * missing))

    def on_cuda(self) -> Answer | None:
        """The candidate's answers on a GPU; None where ONNX Runtime cannot use one."""
        answer = self.children.run(self.path, self.staged, level="ORT_ENABLE_ALL", provider=CUDA)
        return answer if CUDA in answer.providers or answer.crash else None

    def asked_again(self) -> list[list[Value]]:
        """The reference's answers to the user's batches once more, which are others where it keeps state or is random.

        An ONNX file is not asked: nothing stays in it, and ONNX Runtime draws the same numbers in every process.

        Raises:
            ExportError: It fails on one.
        """
        if isinstance(self._reference, ModelFile):
            return self.expected
        return whole(self._reference_answers(self.batches, self.staged[: self._usual]), "the reference model")

    def on_rounded_inputs(self) -> list[list[Value]]:
        """The reference's answers to the user's batches with all that is float32 or float64 in them rounded to float16.

        Raises:
            ExportError: It fails on one.
        """
        return self.answers_to([{name: rounded_to_half(array) for name, array in batch.items()} for batch in self.batches])

    def answers_to(self, batches: Sequence[Feed]) -> list[list[Value]]:
        """The reference's answers to other batches.

        Raises:
            ExportError: It fails on one.
        """
        return whole(self._reference_answers(batches, self.children.stage(batches)), "the reference model")

    def at_another_level(self) -> Iterator[list[list[Value]]]:
        """An ONNX reference's answers to the user's batches where the runtime fuses nothing, so that it sums in another order.

        Raises:
            ExportError: It fails on one.
        """
        if isinstance(self._reference, ModelFile):
            self._levels = LEVELS[-1:]
            answers = self._reference_answers(self.batches, self.staged[: self._usual])
            self._levels = LEVELS
            yield whole(answers, "the reference model")

    def _reference_answers(self, batches: Sequence[Feed], staged: Sequence[StagedFeed]) -> Sequence[list[Value] | str]:
        if isinstance(self._reference, ModelFile):
            return self._onnx_answers(self._reference, staged)
        from export.verification.torch_reference import run_torch  # noqa: PLC0415  (torch is slow to import)

        return run_torch(self._reference, batches)

    def _notes(self, answers: Sequence[list[Value] | str]) -> tuple[str, ...]:
        if isinstance(self._reference, ModelFile):
            return ()
        from export.verification.torch_reference import fast_path_note  # noqa: PLC0415  (as above)

        return fast_path_note(self._reference, self.batches, answers)

    def _onnx_answers(self, reference: ModelFile, batches: Sequence[StagedFeed]) -> Sequence[list[Value] | str]:
        self.reference_bytes, self.reference_path = reference.size_bytes, reference.path
        self.reference_graph = reference.outline.graph
        theirs = [value.name for value in inputs_of(reference.outline)]
        ours = [value.name for value in inputs_of(self.candidate.outline)]
        if len(theirs) != len(ours):
            both = f"{len(theirs)} inputs ({', '.join(theirs)}), the fp16 model {len(ours)} ({', '.join(ours)})"
            raise ExportError(f"the reference takes {both}; is this the model that was converted?")
        names = dict(zip(ours, ours if set(theirs) == set(ours) else theirs, strict=True))
        staged: list[StagedFeed] = [{names[name]: file for name, file in feed.items()} for feed in batches]
        return open_reference(on_disk(reference, self.children), self.children, staged, self._levels)


def whole(answers: Sequence[list[Value] | str], who: str) -> list[list[Value]]:
    """Answers none of which may be an error.

    Raises:
        ExportError: One is; the text says whose.
    """
    for answer in answers:
        if isinstance(answer, str):
            raise ExportError(f"{who} fails on the samples: {answer}")
    return [answer for answer in answers if not isinstance(answer, str)]


def rounded_to_half(array: Array) -> Array:
    """A float32 or float64 array with the numbers that float16 would hold; any other as it is."""
    if array.dtype not in (np.float32, np.float64):
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(array.dtype)


def _outputs(graph: onnx.GraphProto) -> list[Output]:
    dependent = data_dependent_values(graph)
    return [Output(name=value.name, data_dependent=value.name in dependent) for value in graph.output]
