"""Makes a model version's sequences from its configuration and files, and lets those of the version before it end there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ONNX, PYTHON, ModelInterface
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.config.sequence_batching import ReadState, SequencePlan, sequence_plan, state_outputs
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model, Scheduler
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.sequences.sequence_lanes import SequenceLanes
from halfserve.serve.engine.sequences.sequence_scheduler import IterativeRequests, SequenceScheduler
from halfserve.serve.engine.sequences.slot_batches import SlotBatches
from halfserve.serve.engine.sequences.step_inputs import ControlTensors
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors
from halfserve.serve.engine.whole_requests import DecoupledRequests, WholeRequests


def client_view(declared: ModelConfig, interface: ModelInterface) -> ModelInterface:
    """Return the interface without controls and states. A state's output that the configuration lists stays visible."""
    batching = declared.sequence_batching
    hidden = {entry.name for entry in batching.control_input} | {state.input_name for state in batching.state}
    outputs = state_outputs(declared) - {entry.name for entry in declared.output}
    grows = any(size == ANY_SIZE for state in batching.state for size in state.dims)
    return replace(
        interface,
        open_ended=interface.open_ended or grows,  # a step takes longer the larger its states are
        inputs=tuple(spec for spec in interface.inputs if spec.name not in hidden),
        outputs=tuple(spec for spec in interface.outputs if spec.name not in outputs),
    )


def read_plan(
    declared: DeclaredConfig, config: ModelConfig, interface: ModelInterface, copies: int, read: ReadState
) -> SequencePlan:
    """Read how the sequences of a model run, from its completed configuration; see `sequence_plan`.

    Raises:
        ModelLoadError: the configuration contradicts the model, or asks for something unsupported.
    """
    plan = sequence_plan(config, interface, source=declared.source, copies=copies, read=read)
    key = "halfserve.latency_target_ms"
    if plan.aligned and own_parameter(config, key, declared.source) is not None:
        raise ModelLoadError(
            f"{declared.source}: {key} has no meaning for batches with a row for each sequence (direct, with "
            "CONTROL_SEQUENCE_READY); remove it"
        )
    return replace(plan, lanes=copies) if keeps_sequences(config, interface) else plan


def keeps_sequences(config: ModelConfig, interface: ModelInterface) -> bool:
    """Return whether a copy of the model may keep sequences in itself, so that each sequence has to stay with its copy."""
    batching = config.sequence_batching
    declares_all = bool(batching.state) or batching.iterative_sequence or interface.kind is ONNX
    return config.HasField("sequence_batching") and not declares_all


def sequence_scheduler(model: Model, plan: SequencePlan) -> Scheduler:
    """Make the scheduler of a model with sequences, which passes requests to its batcher."""
    batchers: list[Scheduler] = [*model.batchers]
    if model.interface.kind is PYTHON:
        batchers = [WholeRequests(model.name, one, model.statistics, one_by_one=False) for one in model.batchers]
    batcher = batchers[0] if len(batchers) == 1 else SequenceLanes(batchers)
    if plan.is_iterative:
        return IterativeRequests(batcher, model.batcher, plan)
    rows = max(1, model.max_batch_size)
    before = SlotBatches(plan, batcher, model.statistics, rows=rows) if plan.aligned else batcher
    return SequenceScheduler(model.name, plan, before, model.limits, model.statistics)


def first_step(plan: SequencePlan, inputs: Mapping[str, Array], rows: int) -> Tensors:
    """Return inputs of `rows` new sequences, with their controls and states, for trying out a model."""
    controls = ControlTensors(plan)
    added = controls.of("1" if controls.takes_text else 1, starts=True, ends=False)
    added |= {state.input.name: state.initial for state in plan.states}
    repeated = {name: np.repeat(row, rows, axis=0) if plan.batched else row for name, row in added.items()}
    return {**inputs, **repeated}


def with_sequences(models: Iterable[Model]) -> list[SequenceScheduler]:
    """Return the schedulers of those models that have sequences now."""
    return [found for found in map(sequences_of, models) if found is not None and found.has_sequences]


def continues_sequence(models: Iterable[Model], request: InferRequest) -> bool:
    """Return whether a request continues a sequence of one of these models.

    Raises:
        InvalidArgumentError: the request's parameters are wrong.
    """
    return any(found.takes_further(request) for found in map(sequences_of, models) if found is not None)


def sequences_of(model: Model) -> SequenceScheduler | None:
    """Return the scheduler of a model's sequences; None for a model without sequences."""
    scheduler = model.scheduler.behind if isinstance(model.scheduler, DecoupledRequests) else model.scheduler
    return scheduler if isinstance(scheduler, SequenceScheduler) else None


def hand_over(before: Mapping[int, Model], models: Sequence[Model]) -> None:
    """Link the sequences of the versions that are served from now on to those of the version that clients used before, if both
    have the same interface.
    """
    for model in models:
        scheduler = model.scheduler
        old = before.get(model.version) or (before[max(before)] if before else None)
        if old is None or old is model or not isinstance(scheduler, SequenceScheduler) or scheduler.predecessor is not None:
            continue
        if model in before.values() or not isinstance(old.scheduler, SequenceScheduler):
            continue
        if (old.interface.inputs, old.interface.outputs) != (model.interface.inputs, model.interface.outputs):
            continue
        scheduler.follow(old.scheduler)
