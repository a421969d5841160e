"""Shapes of inputs that take any size where the user gives none: those of the model's own samples, or usual ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.benchmark.request_inputs import RequestPlan

SAMPLE_SHAPES = "halfserve.sample_shapes"  # parameter of the model's configuration: JSON, row shapes by input
TOKENS, PIXELS, ANY = 128, 224, 16
CHANNELS = (1, 3, 4)
IMAGE_DIMENSIONS = 3  # channels, height and width
Shapes = Mapping[str, Sequence[int]]  # shapes by input, without the batch dimension; -1 is any size


class FreeSizes:
    """The inputs of a plan that take any size, and have none by --shape or by a given array."""

    def __init__(self, plan: RequestPlan) -> None:
        rows = 1 if plan.max_batch_size else 0
        self._plan = plan
        self._declared = {tensor.name: list(tensor.shape[rows:]) for tensor in plan.metadata.inputs}
        self._chosen: Shapes = {**{name: array.shape[rows:] for name, array in plan.given.items()}, **plan.shapes}
        self.shapes: Shapes = {n: shape for n, shape in self._declared.items() if -1 in shape and n not in self._chosen}

    def choices(self, config: ModelConfig, before: Shapes) -> Iterator[tuple[Shapes, str]]:
        """Yield the shapes to try, the best first, and where they come from.

        `before` has the shapes that were used for another model that this one is compared with.
        """
        own = json.loads(config.parameters[SAMPLE_SHAPES].string_value) if SAMPLE_SHAPES in config.parameters else {}
        sizes = {
            size
            for name, shape in self._chosen.items()
            for size, limit in zip(shape, self._declared.get(name, ()), strict=False)
            if limit == -1
        }
        if self._fit(before):
            yield {name: before[name] for name in self.shapes}, "sizes of the compared model"
        if len(sizes) == 1:
            yield self._filled(sizes.pop()), "sizes of the other inputs"
        if self._fit(own):
            yield {name: own[name] for name in self.shapes}, "sizes of the samples that the model was proved on"
        integers = any(tensor.datatype.startswith("INT") for tensor in self._plan.metadata.inputs)
        images = all(len(shape) == IMAGE_DIMENSIONS and shape[0] in CHANNELS for shape in self.shapes.values())
        for size in dict.fromkeys((PIXELS if images else TOKENS if integers else ANY, ANY, 1)):
            yield self._filled(size), "the model takes any size, and bench took"

    def refused(self, reason: str) -> str:
        """Return the error for a model that answers no usual size, with the whole command that says the sizes."""
        shapes = {name: self._plan.shapes.get(name, shape) for name, shape in self._declared.items() if -1 in shape}
        model = self._plan.metadata.name
        return (
            f"model {model!r} takes inputs of any size, and refused those that were tried: {reason}; give the sizes, each N a"
            f" number: halfserve bench {shlex.quote(model)} {shape_options(shapes)}"
        )

    def _fit(self, shapes: Shapes) -> bool:
        return all(
            len(shapes.get(name, ())) == len(declared)
            and all(limit in (-1, size) for size, limit in zip(shapes[name], declared, strict=True))
            for name, declared in self.shapes.items()
        )

    def _filled(self, size: int) -> Shapes:
        return {name: [size if one == -1 else one for one in shape] for name, shape in self.shapes.items()}


def shape_options(shapes: Shapes) -> str:
    """Return shapes as options of the command; N is any size."""
    texts = {name: ",".join("N" if size == -1 else str(size) for size in shape) for name, shape in shapes.items()}
    return " ".join(f"--shape {shlex.quote(f'{name}:{text}')}" for name, text in texts.items())
