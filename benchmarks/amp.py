"""Cost of autocast, policies, compiled regions, the recorder and GradScaler relative to torch.amp, on whole training steps.

    python -m benchmarks.amp [--rounds 31] [--device cpu] [--only steps,compiled,record,scaler]

The models are small on purpose: a step computes little, so that overhead shows. The variants take turns, in a new order each
round; a result is the median over the rounds of (variant's time / torch.amp's time in the same round).
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from halfserve import GradScaler, autocast
from halfserve.amp_core.recorder import Recorder

Step = Callable[[], None]
Build = Callable[[], tuple[nn.Module, Tensor]]
Region = Callable[[], AbstractContextManager[Any]]
DTYPE = torch.float16
ROUND_SECONDS = 0.05
SCALER_PARAMETERS, RECORD_EVERY = 400, 200
PARTS = "steps,compiled,record,scaler"
TARGETS = {
    "ours": 1.02,
    "policy cuda": 1.12,
    "policy fp32:relu": 1.12,
    "compiled": 1.02,
    "compiled, policy cuda": 1.02,
    "record 1 in 200": 1.05,
    "scaler": 1.0,
}


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, channels, height, width) in and out."""
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(y)))


def mlp() -> tuple[nn.Module, Tensor]:
    """Three layers of 64."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(16, 64)


def transformer() -> tuple[nn.Module, Tensor]:
    """Two encoder layers of width 32."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(8 * 32, 10)), torch.randn(4, 8, 32)


def resnet() -> tuple[nn.Module, Tensor]:
    """Three residual blocks of 16 channels."""
    blocks = [Residual(16) for _ in range(3)]
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, pool), torch.randn(2, 3, 8, 8)


MODELS = {"MLP": mlp, "transformer": transformer, "ResNet-like": resnet}


def training_step(build: Build, region: Region, device: str, *, compiled: bool = False, every: int = 0) -> Step:
    """Forward and loss in a region, backward, and an SGD step; with `every`, one step in so many is recorded.

    Every variant starts from the same weights.
    """
    torch.manual_seed(0)
    model, inputs = build()
    model, inputs = model.to(device), inputs.to(device)
    labels = torch.zeros(len(inputs), dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    recorder, numbers = Recorder(model, every=every) if every else None, itertools.count(1)

    def step() -> None:
        optimizer.zero_grad()
        with recorder.step(next(numbers)) if recorder else nullcontext():
            with region():
                loss = functional.cross_entropy(forward(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def scaler_step(scaler: Any, optimizer_class: Callable[..., Any], device: str) -> Step:
    """Make a step of unscale_, step and update for an optimizer with many small parameters."""
    parameters = [nn.Parameter(torch.zeros(8, device=device)) for _ in range(SCALER_PARAMETERS)]
    optimizer = optimizer_class(parameters)
    scaler.scale(torch.zeros((), device=device))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def ratios(variants: dict[str, Step], rounds: int, *, steps: int | None = None) -> dict[str, tuple[float, float]]:
    """Median seconds of a step, and the median ratio to "torch", by variant; the variants take turns.

    A turn has `steps` steps; by default as many as take "torch" `ROUND_SECONDS`.
    """
    for step in variants.values():
        seconds(step, 3)
    repeat = steps or max(1, int(ROUND_SECONDS / seconds(variants["torch"], 3)))
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            times[name].append(seconds(variants[name], repeat))
    return {
        name: (statistics.median(own), statistics.median(a / b for a, b in zip(own, times["torch"], strict=True)))
        for name, own in times.items()
    }


def seconds(step: Step, repeat: int) -> float:
    """Mean seconds of a step over some in a row."""
    started = time.perf_counter()
    for _ in range(repeat):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeat


def measure(device: str, rounds: int, parts: set[str]) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    """Yield each part of the results, with its times by variant."""
    regions: dict[str, Region] = {
        "torch": lambda: torch.autocast(device, DTYPE),
        "ours": lambda: autocast(device, DTYPE),
        "torch again": lambda: torch.autocast(device, DTYPE),
        "policy cuda": lambda: autocast(device, DTYPE, policy="cuda"),
        "policy fp32:relu": lambda: autocast(device, DTYPE, policy="native+fp32:relu"),
    }
    for name, build in MODELS.items():
        if "steps" in parts:
            eager = {key: training_step(build, region, device) for key, region in regions.items()}
            yield f"{name}, eager", ratios(eager, rounds)
        if "compiled" in parts:
            names = {"torch": "torch", "compiled": "ours", "compiled, policy cuda": "policy cuda"}
            compiled = {new: training_step(build, regions[old], device, compiled=True) for new, old in names.items()}
            yield f"{name}, compiled", ratios(compiled, rounds)
        if "record" in parts:
            plain = training_step(build, regions["ours"], device)
            recorded = training_step(build, regions["ours"], device, every=RECORD_EVERY)
            both = {"torch": plain, "record 1 in 200": recorded}
            yield f"{name}, recorded", ratios(both, max(5, rounds // 3), steps=RECORD_EVERY)
    if "scaler" in parts:
        for label, make in (
            ("SGD", lambda p: torch.optim.SGD(p, lr=0.0)),
            ("fused AdamW", lambda p: torch.optim.AdamW(p, lr=0.0, fused=True)),
        ):
            scalers = {"torch": torch.amp.GradScaler(device), "scaler": GradScaler(device)}
            steps = {key: scaler_step(scaler, make, device) for key, scaler in scalers.items()}
            yield f"step and update, {SCALER_PARAMETERS} parameters, {label}", ratios(steps, rounds)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 31,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    only: Annotated[str, typer.Option(help="Some of the parts.")] = PARTS,
) -> None:
    """Measure, and print one table."""
    torch.set_num_threads(1)
    slow = []
    table = Table("a training step", "torch us", "variant", "us", "ratio", "target")
    for what, variants in measure(device, rounds, set(only.split(","))):
        for name, (own, ratio) in variants.items():
            if name != "torch":
                target = f"{TARGETS[name]:.2f}" if name in TARGETS else ""
                slow += [f"{what}: {name} {ratio:.2f}"] if ratio > TARGETS.get(name, ratio) else []
                print(f"{what}: {name} {ratio:.3f}", flush=True)
                table.add_row(what, f"{variants['torch'][0] * 1e6:,.1f}", name, f"{own * 1e6:,.1f}", f"{ratio:.3f}", target)
    Console().print(table)
    print(f"verdict: {'; '.join(slow) or 'all'}{' is' if slow else ''} {'above' if slow else 'within'} the target")


if __name__ == "__main__":
    typer.run(main)
