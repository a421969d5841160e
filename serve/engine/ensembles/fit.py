"""Checks whether an ensemble's graph fits the models of its steps: names, types, shapes and batch sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halfserve.serve.engine.ensembles.graph import EnsembleGraph, EnsembleStep, dependency_order
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec


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

    Args:
        graph: the ensemble's graph.
        models: models of the steps, in their order.
        batched: whether the ensemble has a batch dimension.
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


def misfit(graph: EnsembleGraph, models: Sequence[Model], max_batch_size: int) -> str | None:
    """Return why the models of the steps cannot compute the graph; None if they can.

    Two shapes fit if each size is equal or open (-1) on one side. Between a model with a batch dimension and one without, they
    also fit if only one of them begins with the batch dimension; such a batch has one row.

    Args:
        graph: the ensemble's graph.
        models: models that are served for the steps, in their order.
        max_batch_size: the ensemble's largest batch; 0 without a batch dimension.
    """
    for step, model in zip(graph.steps, models, strict=True):
        wrong = _wrong_names(step, model) or _wrong_batch(model, max_batch_size)
        if wrong is not None:
            return f"{step.label}: {wrong}"
    mixed = _mixed_responses(graph, models)
    if mixed is not None:
        return mixed
    sources = sources_of(graph, models, batched=max_batch_size > 0)
    for step, model in zip(graph.steps, models, strict=True):
        for name, tensor in sorted(step.inputs.items()):
            what = f"{step.label}: input {name!r}"
            wrong = _differing(sources[tensor], tensor, model.inputs[name], what, batched=model.max_batch_size > 0)
            if wrong is not None:
                return wrong
    for spec in graph.outputs:
        what = f"output {spec.name!r} of the ensemble"
        wrong = _differing(sources[spec.name], spec.name, spec, what, batched=max_batch_size > 0)
        if wrong is not None:
            return wrong
    return None


def _wrong_names(step: EnsembleStep, model: Model) -> str | None:
    for kind, asked, known in (("input", step.inputs, model.inputs), ("output", step.outputs, model.outputs)):
        strange = sorted(asked.keys() - known.keys())
        if strange:
            return f"{kind}_map names {strange[0]!r}, but the model's {kind}s are {', '.join(map(repr, known))}"
    missing = [name for name, spec in model.inputs.items() if name not in step.inputs and not spec.optional]
    return f"input_map has no entry for input {missing[0]!r} of the model; map a tensor to it" if missing else None


def _mixed_responses(graph: EnsembleGraph, models: Sequence[Model]) -> str | None:
    """Return why responses of decoupled steps cannot be matched; None if each step, and the outputs, follow at most one."""
    followed: dict[int, int | None] = {}  # step's index -> index of the decoupled step that its outputs follow

    def mixed(indices: Iterable[int], what: str) -> str | None:
        counts = {followed[index] for index in indices}
        if len(counts) < 2:
            return None
        ways = sorted(graph.steps[index].label if index is not None else "no decoupled step" for index in counts)
        different = f"{what} come with different numbers of responses: after {' and after '.join(ways)}"
        return f"{different}; expected one of these for all"

    order, _ = dependency_order(range(len(graph.steps)), graph.waits_for)
    for index in order:
        before = graph.waits_for(index)
        wrong = mixed(before, f"{graph.steps[index].label}: its inputs")
        if wrong is not None:
            return wrong
        followed[index] = index if models[index].is_decoupled else next((followed[one] for one in before), None)
    return mixed((graph.writers[spec.name] for spec in graph.outputs), "the outputs of the ensemble")


def _wrong_batch(model: Model, max_batch_size: int) -> str | None:
    if 0 < model.max_batch_size < max_batch_size:
        return (
            f"the model's max_batch_size is {model.max_batch_size}, the ensemble's is {max_batch_size}; "
            f"set the ensemble's to {model.max_batch_size} or less"
        )
    return None


def _differing(source: TensorSource, tensor: str, spec: TensorSpec, what: str, *, batched: bool) -> str | None:
    given = source.spec
    if given.datatype is not spec.datatype:
        return (
            f"{what} is {spec.datatype.wire}, but the tensor {tensor!r} is {given.datatype.wire}, as {source.what}; "
            "put a step that casts between them"
        )
    if _meet(given.shape, spec.shape):
        return None
    if source.batched is not batched:
        dropped, other = (given.shape[1:], spec.shape) if source.batched else (given.shape, spec.shape[1:])
        if _meet(dropped, other):
            return None
    return f"{what} has shape {list(spec.shape)}, but the tensor {tensor!r} has shape {list(given.shape)}, as {source.what}"


def _meet(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or ANY_SIZE in {a, b} for a, b in zip(one, other, strict=True))
