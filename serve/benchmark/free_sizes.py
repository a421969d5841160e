"""Shapes of inputs that take any size where the user gives none: those of the model's own samples, or usual ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfserve.protos.inference_pb2 import ModelMetadataResponse
from halfserve.protos.model_config_pb2 import ModelConfig

SAMPLE_SHAPES = "halfserve.sample_shapes"  # parameter of the model's configuration: JSON, row shapes by input
TOKENS, PIXELS, ANY = 128, 224, 16
CHANNELS = (1, 3, 4)
IMAGE_DIMENSIONS = 3  # channels, height and width
Shapes = Mapping[str, Sequence[int]]  # by input, without the batch dimension; -1 is any size


@dataclass(frozen=True)
class Choice:
    """Shapes for the inputs that have none."""

    shapes: Shapes
    reason: str  # where the sizes come from

    @property
    def note(self) -> str:
        return f"{self.reason}: {_options(self.shapes)} (the option sets others)"


def declared_shapes(metadata: ModelMetadataResponse, max_batch_size: int) -> dict[str, list[int]]:
    """Return the shape of one row of each input; of the whole input for a model without a batch dimension."""
    return {tensor.name: list(tensor.shape[1 if max_batch_size else 0 :]) for tensor in metadata.inputs}


def choices(metadata: ModelMetadataResponse, config: ModelConfig, chosen: Shapes, before: Shapes) -> Iterator[Choice]:
    """Yield the shapes to try, the best first, for the inputs with free sizes that are not in `chosen`.

    `chosen` has the shapes that are decided, by --shape or by a given array; `before` those that were used for another model
    that this one is compared with.
    """
    declared = declared_shapes(metadata, config.max_batch_size)
    free = {name: shape for name, shape in declared.items() if -1 in shape and name not in chosen}
    own = json.loads(config.parameters[SAMPLE_SHAPES].string_value) if SAMPLE_SHAPES in config.parameters else {}
    given = {
        size
        for name, shape in chosen.items()
        if len(declared.get(name, ())) == len(shape)
        for size, limit in zip(shape, declared[name], strict=True)
        if limit == -1
    }
    if all(_fits(before.get(name, ()), shape) for name, shape in free.items()):
        yield Choice({name: before[name] for name in free}, "sizes of the compared model")
    if len(given) == 1:
        yield Choice(_filled(free, given.pop()), "sizes of the other inputs")
    if all(_fits(own.get(name, ()), shape) for name, shape in free.items()):
        yield Choice({name: own[name] for name in free}, "sizes of the samples that the model was proved on")
    integers = any(tensor.datatype.startswith("INT") for tensor in metadata.inputs)
    images = all(len(shape) == IMAGE_DIMENSIONS and shape[0] in CHANNELS for shape in free.values())
    for size in dict.fromkeys((PIXELS if images else TOKENS if integers else ANY, ANY, 1)):
        yield Choice(_filled(free, size), "the model takes any size, and bench took")


def refused_text(model: str, metadata: ModelMetadataResponse, max_batch_size: int, chosen: Shapes, reason: str) -> str:
    """Return the error for a model that answers no usual size, with the whole command that says the sizes."""
    declared = declared_shapes(metadata, max_batch_size)
    shapes = {name: chosen.get(name, shape) for name, shape in declared.items() if -1 in shape}
    return (
        f"model {model!r} takes inputs of any size, and refused those that were tried: {reason}; give the sizes, each N a"
        f" number: halfserve bench {shlex.quote(model)} {_options(shapes)}"
    )


def _options(shapes: Shapes) -> str:
    texts = {name: ",".join("N" if size == -1 else str(size) for size in shape) for name, shape in shapes.items()}
    return " ".join(f"--shape {shlex.quote(f'{name}:{text}')}" for name, text in texts.items())


def _fits(shape: Sequence[int], declared: Sequence[int]) -> bool:
    return len(shape) == len(declared) and all(limit in (-1, size) for size, limit in zip(shape, declared, strict=True))


def _filled(shapes: Shapes, size: int) -> Shapes:
    return {name: [size if one == -1 else one for one in shape] for name, shape in shapes.items()}
