"""Ragged batches in a configuration: `allow_ragged_batch`, `batch_input` and `batch_output`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from halfserve.protos.datatypes import BY_CONFIG
from halfserve.protos.model_config_pb2 import BatchInput as DeclaredInput
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.queueing.ragged import (
    BatchInput,
    Ragged,
    element_bounds,
    element_counts,
    element_ends,
    flat_item_shapes,
    item_shapes,
    most_elements,
)
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec

KINDS = {
    DeclaredInput.BATCH_ELEMENT_COUNT: element_counts,
    DeclaredInput.BATCH_ACCUMULATED_ELEMENT_COUNT: element_ends,
    DeclaredInput.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: element_bounds,
    DeclaredInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE: most_elements,
    DeclaredInput.BATCH_ITEM_SHAPE: item_shapes,
    DeclaredInput.BATCH_ITEM_SHAPE_FLATTEN: flat_item_shapes,
}
MADE_TYPES = ("INT32", "FP32")  # as in Triton
# Features that take the rows of a batch apart, or add some.
UNSUITED = ("halfserve.padding", "halfserve.pad_to_preferred", "halfserve.fp32_twin")


def read_ragged(config: ModelConfig, interface: ModelInterface, where: str) -> Ragged | None:
    """Read how a model's ragged batches are formed; None if its configuration asks for none.

    Args:
        config: the declared configuration.
        interface: the interface of the model file.
        where: the configuration's file, for error texts.

    Raises:
        ModelLoadError: a setting contradicts another one or the model, or is not supported.
    """
    ragged = [entry.name for entry in config.input if entry.allow_ragged_batch]
    if not (ragged or config.batch_input or config.batch_output):
        return None
    if config.max_batch_size < 1:
        raise ModelLoadError(f"{where}: a ragged batch needs a max_batch_size of 1 or more; set it, and dims without the batch")
    shapes = {spec.name: spec.shape for spec in interface.inputs}
    for name in ragged:
        if shapes.get(name, (ANY_SIZE,)) != (ANY_SIZE,):
            raise ModelLoadError(
                f"{where}: input {name!r} has allow_ragged_batch, but the model takes {list(shapes[name])}; expected [-1], one "
                "dimension in which requests are joined. To pad requests instead, set halfserve.padding"
            )
    unsuited = [key for key in UNSUITED if key in config.parameters]
    if unsuited:
        raise ModelLoadError(f"{where}: parameter {unsuited[0]!r} does not go with ragged batches; remove one of them")
    sources = {entry.name for entry in config.input}
    specs = {spec.name: spec for spec in interface.inputs}
    made = tuple(_made(declared, sources, specs, f"{where}: batch_input") for declared in config.batch_input)
    scattered = {}
    for declared in config.batch_output:
        (source,) = _one_source(declared.source_input, sources, f"{where}: batch_output")
        for name in declared.target_name:
            dims = next((tuple(entry.dims) for entry in config.output if entry.name == name), None)
            given = next(len(entry.dims) for entry in config.input if entry.name == source)
            if dims is None:
                raise ModelLoadError(f"{where}: batch_output names {name!r}, which is not among the outputs; add it there")
            if any(size == ANY_SIZE and place >= given for place, size in enumerate(dims)):
                raise ModelLoadError(
                    f"{where}: batch_output {name!r} has dims {list(dims)}, whose open sizes come from {source!r} with {given}"
                )
            scattered[name] = (dims, source)
    return Ragged(inputs=frozenset(ragged), made=made, scattered=scattered)


def ragged_interface(config: ModelConfig, interface: ModelInterface, ragged: Ragged | None) -> ModelInterface:
    """Return the interface that requests see: ragged inputs have their rows, and inputs that the server makes are left out."""
    if ragged is None:
        return interface
    made = {name for one in ragged.made for name in one.names}
    dims = {entry.name: tuple(entry.dims) for entry in config.input}
    dims.update({entry.name: tuple(entry.dims) for entry in config.output})

    def shown(spec: TensorSpec) -> TensorSpec:
        own = spec.name in ragged.inputs or spec.name in ragged.scattered
        return replace(spec, shape=(ANY_SIZE, *dims[spec.name])) if own else spec

    return replace(
        interface,
        inputs=tuple(shown(spec) for spec in interface.inputs if spec.name not in made),
        outputs=tuple(shown(spec) for spec in interface.outputs),
    )


def _made(declared: DeclaredInput, sources: set[str], specs: dict[str, TensorSpec], where: str) -> BatchInput:
    (source,) = _one_source(declared.source_input, sources, where)
    wire = BY_CONFIG[declared.data_type].wire if declared.data_type in BY_CONFIG else ""
    if wire not in MADE_TYPES:
        raise ModelLoadError(f"{where} of {source!r} has data_type {wire or 'none'}, expected TYPE_INT32 or TYPE_FP32")
    if declared.kind not in KINDS:
        raise ModelLoadError(f"{where} of {source!r} has an unknown kind {declared.kind}")
    if not declared.target_name:
        raise ModelLoadError(f"{where} of {source!r} has no target_name, expected the model's input that gets it")
    for name in declared.target_name:
        if name not in specs:
            raise ModelLoadError(f"{where} names the input {name!r}, the model's are {', '.join(map(repr, specs))}")
        if name in sources:
            raise ModelLoadError(f"{where} names {name!r}, which is also among the inputs that clients send; remove one")
        if specs[name].datatype.wire != wire:
            raise ModelLoadError(f"{where} {name!r} has {wire}, the model takes {specs[name].datatype.wire}")
    dtype = BY_CONFIG[declared.data_type].array_dtype
    return BatchInput(names=tuple(declared.target_name), source=source, make=KINDS[declared.kind], dtype=dtype)


def _one_source(names: Iterable[str], sources: set[str], where: str) -> tuple[str]:
    given = list(names)
    if len(given) != 1 or given[0] not in sources:
        known = ", ".join(map(repr, sorted(sources))) or "none"
        raise ModelLoadError(f"{where} has source_input {given}, expected one of the inputs in the configuration: {known}")
    return (given[0],)
