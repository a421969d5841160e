"""Binds an ensemble's graph to the models that are served for its steps now, and plans each selection of outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from halfserve.serve.engine.ensembles.bound_step import OUTSIDE, BoundStep, StepInput, TensorSource, sources_of
from halfserve.serve.engine.ensembles.graph import EnsembleGraph
from halfserve.serve.engine.errors import BackendError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import CallingExecution, Parameter, RemarkedAnswer
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors, TensorSpec

MAX_PLANS: Final = 256  # most selections of outputs whose plan is kept


class WantedOutput:
    """One output of the ensemble, and the step that computes it."""

    __slots__ = ("_dimensions", "_is_open", "_source", "_spec", "name", "step", "tensor")

    def __init__(self, step: int, tensor: str, source: TensorSource, spec: TensorSpec) -> None:
        """`step` and `tensor`: index of the step, and name in its answer; `spec`: the output as the ensemble declares it."""
        self.name = spec.name
        self.step = step
        self.tensor = tensor
        self._source = source
        self._spec = spec
        self._dimensions = len(spec.shape)
        sizes = zip(source.spec.shape, spec.shape, strict=False)
        self._is_open = len(source.spec.shape) != len(spec.shape) or any(own not in {ANY_SIZE, given} for given, own in sizes)

    @property
    def is_as_answered(self) -> bool:
        """Whether the step's tensor is the ensemble's, under the same name and without a change of its shape."""
        return self.name == self.tensor and not self._is_open and self._source.spec.model_shape is None

    def taken(self, array: Array) -> Array:
        """Return the step's array in the ensemble's shape.

        Raises:
            BackendError: the shape differs from the ensemble's declaration.
        """
        if self._source.spec.model_shape is not None:
            array = self._source.spec.to_client(array)
        if self._is_open:
            shape = array.shape
            if len(shape) == self._dimensions - 1 and not self._source.batched:
                array = array[None]
            elif len(shape) == self._dimensions + 1 and shape[0] == 1 and self._source.batched:
                array = array[0]
            wrong = self._spec.mismatch(array.shape)
            if wrong is not None:
                raise BackendError(f"{self._source.what}, which is the output {self.name!r} of the ensemble, {wrong}")
        return array


class ExecutionPlan:
    """The steps to compute for one selection of outputs.

    Attributes:
        count: number of steps to compute.
        starts: indices of the steps that wait for no other.
        waits: number of steps that each step waits for, by its index.
        followers: indices of the steps that wait for each step, by its index.
        asked: the outputs that each step has to compute, by its index.
        row_bytes: bytes of one row of each step's answer, by its index; None for open sizes and texts.
    """

    __slots__ = ("_is_as_answered", "_wanted", "asked", "count", "followers", "row_bytes", "starts", "waits")

    def __init__(self, graph: EnsembleGraph, wanted: Sequence[WantedOutput], steps: Sequence[BoundStep]) -> None:
        needed = sorted(graph.needed(output.name for output in wanted))
        before = {index: graph.waits_for(index) for index in needed}
        size = len(graph.steps)
        self.count = len(needed)
        self.starts = tuple(index for index in needed if not before[index])
        self.waits = [len(before.get(index, ())) for index in range(size)]
        self.followers = tuple(tuple(other for other in needed if index in before[other]) for index in range(size))
        read = {tensor for index in needed for tensor in graph.steps[index].inputs.values()}
        for_steps = [
            [output for output, tensor in step.outputs.items() if tensor in read and index in before]
            for index, step in enumerate(graph.steps)
        ]
        for output in wanted:
            for_steps[output.step].append(output.tensor)
        self.asked = tuple(tuple(dict.fromkeys(names)) for names in for_steps)
        self.row_bytes = tuple(step.row_bytes(names) for step, names in zip(steps, self.asked, strict=True))
        self._wanted = tuple(wanted)
        names = tuple(output.name for output in wanted)
        self._is_as_answered = all(
            output.is_as_answered and output.step == wanted[0].step and self.asked[output.step] == names for output in wanted
        )

    def outputs(self, answers: Sequence[Tensors]) -> Tensors:
        """Assemble the ensemble's answer from the steps' answers, which are given by the steps' indices.

        Raises:
            BackendError: a shape differs from the ensemble's declaration.
        """
        if self._is_as_answered:
            answer = answers[self._wanted[0].step]
            if self.count == 1 or not any(isinstance(one, RemarkedAnswer) for one in answers):
                return answer
        outputs: dict[str, Array] = {}
        for output in self._wanted:
            outputs[output.name] = output.taken(answers[output.step][output.tensor])
        remarks: dict[str, Parameter] = {}
        for answer in answers:
            if isinstance(answer, RemarkedAnswer):
                remarks.update(answer.parameters)
        return RemarkedAnswer(outputs, remarks) if remarks else outputs


class Binding:
    """The models of an ensemble's steps from one change of the served models to the next. A request keeps its binding to its
    end.

    Attributes:
        caller: the ensemble as the caller of its steps' models.
        models: models of the steps, in the order of the steps.
        steps: the steps with their models, in the same order.
    """

    def __init__(self, graph: EnsembleGraph, models: Sequence[Model], max_batch_size: int, caller: CallingExecution) -> None:
        """`models` fit the graph (see `misfit`); they are held until `retire`."""
        self._graph = graph
        self.caller = caller
        self.models = tuple(models)
        self._sources = sources_of(graph, models, batched=max_batch_size > 0)
        self.steps = tuple(self._bound(index, max_batch_size) for index in range(len(graph.steps)))
        self._plans: dict[tuple[str, ...], ExecutionPlan] = {}
        self._in_flight = 0
        self._is_retired = False
        self._idle: asyncio.Event | None = None
        for model in set(self.models):
            model.holders.append(self)

    def plan(self, outputs: tuple[str, ...]) -> ExecutionPlan:
        """Return the plan for these outputs of the ensemble."""
        plan = self._plans.get(outputs)
        if plan is None:
            plan = ExecutionPlan(self._graph, [self._wanted(name) for name in outputs], self.steps)
            if len(self._plans) < MAX_PLANS:
                self._plans[outputs] = plan
        return plan

    def labels_of(self, output: str) -> Sequence[str]:
        """Return the class names of an output of the ensemble, which are those of the model that computes it."""
        writer = self._graph.writers[output]
        return self.models[writer].labels_of(self._output_of(writer, output))

    def begin(self) -> None:
        """Count a request that uses the models."""
        self._in_flight += 1

    def end(self) -> None:
        """Count the end of a request that used the models."""
        self._in_flight -= 1
        if not self._in_flight:
            if self._idle is not None:
                self._idle.set()
                self._idle = None
            if self._is_retired:
                self._let_go()

    def retire(self) -> None:
        """Release the models once the requests that use them have ended; no further request may use them."""
        self._is_retired = True
        if not self._in_flight:
            self._let_go()

    async def released(self) -> None:
        """Wait until no request uses the models."""
        if self._in_flight:
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()

    def _let_go(self) -> None:
        # Otherwise a model and this object would refer to each other, and an unloaded model would stay in memory.
        for model in set(self.models):
            if self in model.holders:
                model.holders.remove(self)

    def _bound(self, index: int, max_batch_size: int) -> BoundStep:
        step, model = self._graph.steps[index], self.models[index]
        taken = tuple(spec for spec in model.inputs.values() if spec.name in step.inputs)
        links = [self._link(spec, step.inputs[spec.name], step.label) for spec in taken]
        own = self._graph.inputs
        # With a direct step, the model's request is the ensemble's.
        is_direct = (
            all(step.inputs[spec.name] == spec.name for spec in taken)
            and [(spec.name, spec.shape, spec.optional) for spec in own]
            == [(spec.name, spec.shape, spec.optional) for spec in taken]
            and all(spec.model_shape is None for spec in taken)
            and (model.max_batch_size > 0) == (max_batch_size > 0)
        )
        return BoundStep(index, step, model, links, is_direct=is_direct)

    def _link(self, spec: TensorSpec, tensor: str, label: str) -> StepInput:
        writer = self._graph.writers.get(tensor, OUTSIDE)
        return StepInput(writer, self._output_of(writer, tensor), tensor, self._sources[tensor], spec, label)

    def _wanted(self, name: str) -> WantedOutput:
        writer = self._graph.writers[name]
        spec = next(spec for spec in self._graph.outputs if spec.name == name)
        return WantedOutput(writer, self._output_of(writer, name), self._sources[name], spec)

    def _output_of(self, writer: int, tensor: str) -> str:
        if writer == OUTSIDE:
            return tensor
        return next(output for output, written in self._graph.steps[writer].outputs.items() if written == tensor)
