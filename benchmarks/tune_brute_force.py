"""`halfserve tune` beside trying every choice of the same grid, on four models; prints the ratio of the throughputs.

python -m benchmarks.tune_brute_force --seconds 300

The grid is coarser than the command's, so that all of it can be measured. The best of both are measured again in turn, with the
same loads and times, so that neither keeps the luck of one measurement. The goal is a ratio of 0.95 or more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import typer
from onnx import TensorProto, helper, numpy_helper

from benchmarks.serving_models import Net, mlp
from halfserve.serve.benchmark.load_target import RequestSettings
from halfserve.serve.benchmark.tables import ProgressBar
from halfserve.serve.client.array_conversion import Array
from halfserve.serve.engine.resource_limits import usable_cores
from halfserve.serve.tuning.recorded_points import RecordedPoints
from halfserve.serve.tuning.search import TuningGoal, TuningPoint, TuningSearch
from halfserve.serve.tuning.settings import SearchSpace, choice_text
from halfserve.serve.tuning.tuned_server import TunedServer, own_server

VALUES: Mapping[str, Sequence[int]] = {"max_batch_size": (1, 8, 32, 128), "delay_us": (0, 1000)}
STEP_VALUES: Mapping[str, Sequence[int]] = {"max_batch_size": (32, 128), "delay_us": (0,), "threads": (0,)}
BEST = 3  # choices of the brute force that are measured again
LENGTHS = (8, 24, 64, 16, 120)
WORDS, WIDTH = 2000, 64


@dataclass(frozen=True, kw_only=True)
class TunedModel:
    """One line of the table."""

    name: str
    limit_ms: float
    values: Mapping[str, Sequence[int]] = field(default_factory=lambda: VALUES)  # values of the grid, beside those in force
    requests: RequestSettings = field(default_factory=RequestSettings)


LENGTHS_IN_TURN = tuple({"tokens": (length,), "mask": (length,)} for length in LENGTHS)
MODELS = (
    TunedModel(name="mlp", limit_ms=10),
    TunedModel(name="cnn", limit_ms=50),
    TunedModel(name="text", limit_ms=20, requests=RequestSettings(shapes=LENGTHS_IN_TURN)),
    TunedModel(name="ensemble", limit_ms=20, values=STEP_VALUES),
)


NAMES = ",".join(model.name for model in MODELS)


def save_models(repository: Path) -> None:
    """Write the four models, and the two steps of the ensemble."""
    _save(repository / "mlp", mlp())
    _save(repository / "cnn", _cnn())
    _save(
        repository / "text", _text(), 'parameters { key: "halfserve.padding" value { string_value: "tokens[1]=0 mask[1]=0" } }'
    )
    for name in ("first", "second"):
        _save(repository / name, _square())
    step = 'step { model_name: "%s" model_version: -1 input_map { key: "x" value: "%s" } output_map { key: "y" value: "%s" } }'
    steps = f"ensemble_scheduling {{ {step % ('first', 'x', 't')} {step % ('second', 't', 'y')} }}"
    tensors = " ".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_FP16 dims: 64 }}' for kind, name in (("input", "x"), ("output", "y"))
    )
    (repository / "ensemble" / "1").mkdir(parents=True)
    (repository / "ensemble" / "config.pbtxt").write_text(f'platform: "ensemble" max_batch_size: 8 {tensors} {steps}')


def _save(folder: Path, model: onnx.ModelProto, config: str = "") -> None:
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(f"max_batch_size: 32\n{config}\n")


def _cnn() -> onnx.ModelProto:
    net = Net()
    net.convolution(16, 3)
    net.convolution(32, 16, stride=2)
    net.convolution(32, 32, stride=2)
    net.add("GlobalAveragePool", net.end)
    net.add("Flatten", net.end)
    net.linear(32, 10)
    return net.model(["batch", 3, 32, 32], ["batch", 10])


def _square() -> onnx.ModelProto:
    net = Net()
    for _ in range(2):
        net.linear(64, 64)
        net.add("Relu", net.end)
    return net.model(["batch", 64], ["batch", 64])


def _text() -> onnx.ModelProto:
    """tokens, mask INT64 [batch, length] -> y FP32 [batch, WIDTH]: the mean of transformed vectors where the mask is 1."""
    random = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "table": random.standard_normal((WORDS, WIDTH)).astype(np.float32),
        "inner": (random.standard_normal((WIDTH, 4 * WIDTH)) / 8).astype(np.float32),
        "outer": (random.standard_normal((4 * WIDTH, WIDTH)) / 16).astype(np.float32),
        "one": np.array([1], np.int64),
        "two": np.array([2], np.int64),
    }
    steps = [
        ("Gather", "table tokens", "found"), ("MatMul", "found inner", "wide"), ("Relu", "wide", "kept"),
        ("MatMul", "kept outer", "vectors"), ("Unsqueeze", "marks two", "column"), ("Mul", "vectors column", "marked"),
        ("ReduceSum", "marked one", "sum"), ("ReduceSum", "marks one", "count"), ("Div", "sum count", "y"),
    ]  # fmt: skip
    nodes = [helper.make_node("Cast", ["mask"], ["marks"], to=TensorProto.FLOAT)]
    for operator, inputs, output in steps:
        nodes.append(helper.make_node(operator, inputs.split(), [output]))
        if operator == "ReduceSum":
            nodes[-1].attribute.append(helper.make_attribute("keepdims", int(output == "count")))
    given = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in ("tokens", "mask")]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "text", given, [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def coarse(space: SearchSpace, values: Mapping[str, Sequence[int]]) -> SearchSpace:
    """Return a space with these values alone of some settings, beside those in force."""
    axes = []
    for axis in space.axes:
        now = getattr(space.start[axis.model], axis.name)
        wanted = {*values.get(axis.name, axis.values), now} & {*axis.values}
        axes.append(replace(axis, values=tuple(value for value in axis.values if value in wanted)))
    return replace(space, axes=tuple(axis for axis in axes if len(axis.values) > 1))


def compared(repository: Path, model: TunedModel, seconds: float, cores: int) -> str:
    """Tune a model, try every choice, and return the table's lines."""
    settings = replace(model.requests, timeout_s=30.0)
    with (
        own_server(repository, model.name, ["--cpu"]) as address,
        TunedServer(address, model.name, settings, percent=99.0, bar=ProgressBar()) as server,
    ):
        space = coarse(server.space(cores, model.limit_ms), model.values)
        goal = TuningGoal(max_ms=model.limit_ms, seconds=seconds)
        tuning = RecordedPoints(None, server.measure)
        outcome = TuningSearch(space, tuning, goal).run()
        brute = RecordedPoints(None, server.measure)
        everything = TuningSearch(space, brute, replace(goal, seconds=float("inf")))
        choices = list(space.all())
        for choice in choices:
            everything.try_choice(choice, max(0.5, seconds / 300))
        spent_s = brute.spent_s
        mine = outcome.best.choice if outcome.best else None
        # The settings in force count as found where nothing is.
        found = everything.in_turn([*dict.fromkeys([mine or space.start, *everything.ranked(choices)[:BEST]])])
    kept = {choice: point for choice, point in found.items() if point.kept(model.limit_ms)}
    best = max(kept.values(), key=lambda point: point.requests_per_second, default=None)
    own = kept.get(mine or space.start)
    ratio = own.requests_per_second / best.requests_per_second if own and best else 0.0
    tried = len({point.choice for point in outcome.points})
    line = (
        f"{model.name:9} {model.limit_ms:4g} ms  tuned {_rate(own)}/s in {tuning.spent_s:4.0f} s, {tried} choices   "
        f"best of {len(choices)} {_rate(best)}/s in {spent_s:4.0f} s   ratio {ratio:.3f}"
    )
    for name, point in (("tuned", own), ("best", best)):
        line += f"\n          {name}: {choice_text(point.choice) if point else 'none within the limit'}"
    return line


def _rate(point: TuningPoint | None) -> str:
    return f"{point.requests_per_second:7,.0f}" if point else "      -"


def main(
    seconds: Annotated[float, typer.Option(help="Time for each tuning.")] = 300.0,
    models: Annotated[str, typer.Option(help="Models to tune, with commas between.")] = NAMES,
    cores: Annotated[int, typer.Option(help="Cores that a model may use; 0 for this machine's.")] = 0,
    slack: Annotated[float, typer.Option(help="Factor of the latency limits, for a machine that is busy.")] = 1.0,
) -> None:
    """Print a line for each model."""
    wanted = models.split(",")
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        save_models(repository)
        for model in MODELS:
            if model.name in wanted:
                eased = replace(model, limit_ms=model.limit_ms * slack)
                print(compared(repository, eased, seconds, cores or usable_cores()), flush=True)


if __name__ == "__main__":
    typer.run(main)
