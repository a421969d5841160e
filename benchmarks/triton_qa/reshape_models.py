"""ONNX models and ensembles with `reshape` in their configuration, in place of those that the QA's generators write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from onnx import helper

from benchmarks.triton_qa.onnx_models import config_type, save, value
from benchmarks.triton_qa.suite import Builder

Shapes = Sequence[Sequence[int]]
KINDS = ("simple", "sequence", "fan")


def reshaping(
    dtype: str,
    given: Shapes,
    inner: Shapes,
    *,
    outputs: Shapes | None = None,
    prefix: str = "onnx",
    batch: int = 8,
    name: str = "",
) -> Builder:
    """Builder of an identity whose inputs are reshaped on their way to it.

    Args:
        dtype: data type of all tensors.
        given: shapes of the inputs as clients send them, without the batch.
        inner: shapes of the file's inputs and outputs.
        outputs: shapes of the outputs as clients get them; those of the inputs without them.
        prefix: the start of the name that the QA gives the model.
        batch: the largest batch; 0 without batches.
        name: the model's name; the QA's own without one.
    """

    def build(_qa: Path, repository: Path) -> None:
        folder = repository / (name or _name(prefix, len(given), dtype, batch))
        nodes = [helper.make_node("Identity", [f"INPUT{index}"], [f"OUTPUT{index}"]) for index in range(len(inner))]
        inputs, results = (
            [value(f"{kind}{index}", dtype, shape, batch=batch) for index, shape in enumerate(inner)]
            for kind in ("INPUT", "OUTPUT")
        )
        save(helper.make_graph(nodes, "reshape", inputs, results), folder / "1")
        _write_config(folder, "onnxruntime_onnx", batch, dtype, given, outputs or given, inner)

    return build


def reshape_ensembles(given: Shapes, inner: Shapes, *, outputs: Shapes | None = None, batch: int = 8) -> Builder:
    """Builder of the QA's ensembles of float32 that reshape, with their steps.

    "simple" has a step of the inner shape; "sequence" flattens the tensor in one step and restores it in the next; "fan" has a
    step of any size in between.
    """
    dtype = "float32"

    def build(qa: Path, repository: Path) -> None:
        for kind in KINDS:
            folder = repository / _name(f"{kind}_reshape", len(given), dtype, batch)
            (folder / "1").mkdir(parents=True)
            steps = []
            for index, shape in enumerate(inner):
                chain = _steps(kind, shape, batch)
                names = [f"INPUT{index}", *(f"between{index}_{number}" for number in range(1, len(chain))), f"OUTPUT{index}"]
                for (step, *shapes), source, target in zip(chain, names, names[1:], strict=False):
                    if not (repository / step).exists():
                        taken, held, left = shapes
                        reshaping(dtype, [taken], [held], outputs=[left], batch=batch, name=step)(qa, repository)
                    steps.append(
                        f'{{ model_name: "{step}" model_version: -1 input_map {{ key: "INPUT0" value: "{source}" }} '
                        f'output_map {{ key: "OUTPUT0" value: "{target}" }} }}'
                    )
            _write_config(folder, "ensemble", batch, dtype, given, outputs or given, inner)
            with (folder / "config.pbtxt").open("a") as config:
                config.write(f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n")

    return build


def _steps(kind: str, shape: Sequence[int], batch: int) -> list[tuple[str, Sequence[int], Sequence[int], Sequence[int]]]:
    """The steps of one tensor: name, shape that is taken, shape within, and shape that is given on."""
    end = f"{batch}_{'_'.join(map(str, shape))}"
    if kind == "simple":
        return [(f"nop_{end}", shape, shape, shape)]
    flat = [math.prod(shape)]
    between = [(f"nop_{batch}_any", [-1], [-1], [-1])] if kind == "fan" else []
    return [(f"nop_tunnel_in_{end}", shape, flat, flat), *between, (f"nop_tunnel_out_{end}", flat, shape, shape)]


def _name(prefix: str, count: int, dtype: str, batch: int) -> str:
    return f"{prefix}{'' if batch else '_nobatch'}_zero_{count}_{dtype}"


def _write_config(folder: Path, platform: str, batch: int, dtype: str, inputs: Shapes, outputs: Shapes, inner: Shapes) -> None:
    text = f'name: "{folder.name}"\nplatform: "{platform}"\nmax_batch_size: {batch}\n'
    for kind, shapes in (("input", inputs), ("output", outputs)):
        entries = [
            f'{{ name: "{kind.upper()}{index}" data_type: {config_type(dtype)} dims: {list(shape)} '
            + (f"reshape {{ shape: {list(held)} }} }}" if list(held) != list(shape) else "}")
            for index, (shape, held) in enumerate(zip(shapes, inner, strict=True))
        ]
        text += f"{kind} [ {', '.join(entries)} ]\n"
    (folder / "config.pbtxt").write_text(text)
