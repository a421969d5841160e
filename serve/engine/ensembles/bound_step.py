"""A step of an ensemble with its model; makes the model's requests from the ensemble's tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final, TypeAlias

from halfserve.protos.request_parameters import PRIORITY, TIMEOUT
from halfserve.serve.engine.config.batching import Turn
from halfserve.serve.engine.ensembles.graph import EnsembleGraph, EnsembleStep
from halfserve.serve.engine.errors import BackendError, InferenceError, InvalidArgumentError, reworded
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import Answer, Done, InferRequest, Parameter
from halfserve.serve.engine.tensors import ANY_SIZE, Array, LateArray, LateInputs, RawInputs, Tensors, TensorSpec

MAX_SHAPES: Final = 1024  # most combinations of shapes whose check is kept
Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
OUTSIDE: Final = -1  # in place of a step's index, for a tensor that is an input of the ensemble


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """The source of a tensor of an ensemble.

    Attributes:
        spec: the tensor as clients of its writer see it.
        batched: whether it begins with a batch dimension.
        what: description of the source in error texts.
    """

    spec: TensorSpec
    batched: bool
    what: str


def sources_of(graph: EnsembleGraph, models: Sequence[Model], *, batched: bool) -> dict[str, TensorSource]:
    """Return the sources of the ensemble's tensors by name; a tensor that its step's model does not have is left out.

    `models`: models of the steps, in their order; `batched`: whether the ensemble has a batch dimension.
    """
    found = {
        spec.name: TensorSource(spec=spec, batched=batched, what=f"input {spec.name!r} of the ensemble")
        for spec in graph.inputs
    }
    for step, model in zip(graph.steps, models, strict=True):
        for output, tensor in step.outputs.items():
            if output in model.outputs:
                what = f"output {output!r} of {step.label}"
                found[tensor] = TensorSource(spec=model.outputs[output], batched=model.max_batch_size > 0, what=what)
    return found


class StepInput:
    """One input of a step, and the source of its tensor.

    Attributes:
        name: name of the model's input.
        optional: whether the model's request may leave it out.
        from_optional: whether the tensor is an input of the ensemble that a request may leave out.
        step: index of the step that writes the tensor; OUTSIDE for an input of the ensemble.
        tensor: name of the tensor in that step's answer, or among the ensemble's inputs.
    """

    __slots__ = ("_dimensions", "_label", "_source", "_spec", "_tensor", "from_optional", "name", "optional", "step", "tensor")

    def __init__(self, step: int, tensor: str, name: str, source: TensorSource, spec: TensorSpec, label: str) -> None:
        """`tensor`: name in the writer's answer; `name`: name of the ensemble's tensor; `label`: this step in error texts."""
        self.name = spec.name
        self.optional = spec.optional
        self.from_optional = step == OUTSIDE and source.spec.optional
        self.step = step
        self.tensor = tensor
        self._tensor = name
        self._source = source
        self._spec = spec
        self._label = label
        self._dimensions = len(spec.shape)

    def taken(self, array: Array) -> Array:
        """Return the writer's array in the shape that this step's model expects from clients."""
        if self._source.spec.model_shape is not None and self.step != OUTSIDE:
            array = self._source.spec.to_client(array)
        return array if array.ndim == self._dimensions else array.reshape(self.shape_of(array.shape))

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Adapt a shape to the batch dimension of this step: it is added, or removed if there is one row.

        Raises:
            InvalidArgumentError: the step has no batch dimension, and there are several rows.
        """
        if len(shape) == self._dimensions:
            return shape
        if len(shape) == self._dimensions - 1 and not self._source.batched:
            return (1, *shape)
        if len(shape) == self._dimensions + 1 and self._source.batched:
            if shape[0] == 1:
                return shape[1:]
            raise InvalidArgumentError(
                f"{self._label}: the model has no batch dimension, so it takes one row, but the tensor {self._tensor!r} has "
                f"{shape[0]}; send one row a request"
            )
        return shape

    def check(self, shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor.

        Raises:
            InferenceError: the shape does not fit; the message names the step at fault.
        """
        wrong = self._spec.mismatch(shape)
        if wrong is None:
            return
        declared = self._source.spec.shape
        if self.step != OUTSIDE and len(declared) == len(shape) and self._source.spec.mismatch(shape) is not None:
            raise BackendError(f"{self._source.what} has shape {list(shape)}, its model declares {list(declared)}")
        raise InvalidArgumentError(f"{self._label}: input {self.name!r} (the tensor {self._tensor!r}) {wrong}")


class _LateRead:
    """Reads an input of the ensemble on the thread that computes."""

    __slots__ = ("_inputs", "_name")

    def __init__(self, inputs: Tensors, name: str) -> None:
        self._inputs = inputs
        self._name = name

    def __call__(self) -> Array:
        return self._inputs[self._name]


class BoundStep:
    """A step and its model, for as long as the model is served.

    Attributes:
        index: index of the step in the ensemble's graph.
        label: name of the step in error texts.
        model: model that computes the step.
    """

    __slots__ = ("_default_turn", "_is_direct", "_known", "_links", "index", "label", "model")

    def __init__(self, index: int, step: EnsembleStep, model: Model, links: Sequence[StepInput], *, is_direct: bool) -> None:
        """`links`: the inputs, in the model's order; `is_direct`: whether they equal the ensemble's inputs in every respect."""
        self.index = index
        self.label = step.label
        self.model = model
        self._links = tuple(links)
        self._is_direct = is_direct
        self._known: dict[Shapes, tuple[int, Hashable, int]] = {}
        self._default_turn = model.queue_policy.turn(0, None)

    def request(self, whole: InferRequest, answers: Sequence[Tensors], outputs: tuple[str, ...], done: Done) -> InferRequest:
        """Make the request to the step's model.

        Args:
            whole: the ensemble's request.
            answers: answers of the computed steps, by the steps' indices.
            outputs: names of the model's outputs that are needed.
            done: called with the model's answer.

        Raises:
            InferenceError: a tensor does not fit the model.
        """
        inputs: Tensors
        if self._is_direct:
            inputs, rows, bucket, size = whole.inputs, whole.rows, whole.bucket, whole.size
        else:
            inputs, shapes = self._gathered(whole.inputs, answers)
            known = self._known.get(shapes)
            rows, bucket, size = self._measured(shapes) if known is None else known
        turn = self._turn(whole)
        return whole.derived(
            inputs,
            outputs,
            rows,
            bucket,
            done,
            turn.level,
            None if turn.delay_after_s is None else monotonic() + turn.delay_after_s,
            None if turn.drop_after_s is None else monotonic() + turn.drop_after_s,
            size,
        )

    def row_bytes(self, outputs: tuple[str, ...]) -> int | None:
        """Return the bytes of a row of these outputs, or of the whole answer without a batch dimension; None for texts and open
        sizes.
        """
        first, total = 1 if self.model.max_batch_size else 0, 0
        for name in outputs:
            spec = self.model.outputs[name]
            if spec.datatype.itemsize is None or ANY_SIZE in spec.shape[first:]:
                return None
            total += math.prod(spec.shape[first:]) * spec.datatype.array_dtype.itemsize
        return total

    def _gathered(self, given: Tensors, answers: Sequence[Tensors]) -> tuple[Tensors, Shapes]:
        """Return the inputs by name, in the model's own shapes, and their shapes as clients see them; None for one left out."""
        arrays: dict[str, Array] = {}
        late: dict[str, Array | LateArray] = {}
        shapes: list[tuple[int, ...] | None] = []
        for link in self._links:
            if _is_left_out(link, given, answers):
                self._require_optional(link)
                shapes.append(None)
                continue
            if link.step == OUTSIDE:
                shape = _late_shape(given, link.tensor)
                if shape is not None:
                    shape = link.shape_of(shape)
                    own = self.model.inputs[link.name].shape_for_model(shape)
                    late[link.name] = LateArray(own, _LateRead(given, link.tensor))
                    shapes.append(shape)
                    continue
                array = link.taken(given[link.tensor])
            else:
                array = link.taken(answers[link.step][link.tensor])
            shapes.append(array.shape)
            spec = self.model.inputs[link.name]
            if spec.model_shape is not None:
                link.check(array.shape)
                array = array.reshape(spec.shape_for_model(array.shape))
            arrays[link.name] = array
        return (LateInputs({**arrays, **late}) if late else arrays), tuple(shapes)

    def _require_optional(self, link: StepInput) -> None:
        """Check that an input whose tensor is absent may be left out."""
        if link.optional:
            return
        if link.step == OUTSIDE:
            raise InvalidArgumentError(f"{self.label}: input {link.name!r} needs {link.tensor!r}, which the request leaves out")
        raise BackendError(f"{self.label}: input {link.name!r} needs {link.tensor!r}, which its step has not answered")

    def _measured(self, shapes: Shapes) -> tuple[int, Hashable, int]:
        """Check inputs of these shapes, and return their rows, bucket and bytes."""
        given = [(link, shape) for link, shape in zip(self._links, shapes, strict=True) if shape is not None]
        for link, shape in given:
            link.check(shape)
        rows = self.model.rows_of({link.name: shape for link, shape in given}, f"{self.label}: ") if given else 1
        specs = [(self.model.inputs[link.name], shape) for link, shape in given]
        own = {spec.name: spec.shape_for_model(shape) for spec, shape in specs}
        size = 0
        for spec, shape in specs:
            elements = 1
            for length in shape:
                elements *= length
            size += elements * spec.datatype.array_dtype.itemsize
        found: tuple[int, Hashable, int] = (rows, self.model.bucket(own), size)
        if len(self._known) < MAX_SHAPES:
            self._known[shapes] = found
        return found

    def _turn(self, whole: InferRequest) -> Turn:
        """Return the queueing rules of the model's request, with the ensemble's priority and timeout."""
        if not whole.parameters:
            return self._default_turn
        priority, timeout_us = whole.parameters.get(PRIORITY, 0), whole.parameters.get(TIMEOUT, 0)
        return self.model.queue_policy.turn(_whole(priority), _whole(timeout_us) / 1e6 or None)


def _whole(parameter: Parameter) -> int:
    return parameter if isinstance(parameter, int) else 0


def _is_left_out(link: StepInput, given: Tensors, answers: Sequence[Tensors]) -> bool:
    if link.step == OUTSIDE:
        return link.from_optional and link.tensor not in given
    answer = answers[link.step]
    return type(answer) is not Answer and link.tensor not in answer  # an `Answer` has all outputs


def _late_shape(inputs: Tensors, name: str) -> tuple[int, ...] | None:
    """Return the shape of an input that is read when it is computed; None for an input that is an array already."""
    # isinstance is not used: outside the compiled build it takes a dict for one of these classes, because all are Mappings.
    if type(inputs) is LateInputs or type(inputs) is RawInputs:
        return inputs.late_shape(name)
    return None


def named(error: InferenceError, label: str, ensemble: str) -> InferenceError:
    """Return a step's error as the ensemble's: of the same class, with the step's name in its text."""
    found = reworded(error, f"{label}: {error}")
    found.ensemble = ensemble
    return found
