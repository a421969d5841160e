"""Training steps on the CPU in float32, bfloat16 and float16, through our autocast and torch's: speed and final loss.

    python -m benchmarks.training_precisions [--steps 40] [--only transformer,ResNet-like,checkerboard]

Three networks learn from the same weights and batches in each precision: a transformer that sorts digits, residual blocks that
tell the classes of noisy images apart, and the checkerboard of `halfserve.examples.checkerboard`. A step is forward and loss in
the region, backward, and Adam; float16 scales the loss. The variants take turns, one step each, so that what else the machine
does meets all of them. A figure is the median of the steps' processor times, on one thread; the last loss is the mean of the
last ten steps. A step whose gradients overflow is skipped, and counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from halfserve import GradScaler, autocast
from halfserve.examples.checkerboard.training import checkerboard, coordinate_grid, network
from halfserve.serve.backends.openvino.processor import computed_halves, processor_name

DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAST = 10  # steps whose mean loss is shown
WARM_UP = 3  # steps that are not timed
Batch = Callable[[int], tuple[Tensor, Tensor]]  # inputs and targets of a step, by its number


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task.

    Attributes:
        network: Makes the network; its weights depend on torch's random state.
        batch: Makes inputs and targets.
        loss: Computes the loss from outputs and targets.
        learning_rate: Learning rate of Adam.
    """

    network: Callable[[], nn.Module]
    batch: Batch
    loss: Callable[[Tensor, Tensor], Tensor]
    learning_rate: float = 1e-3


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.branch = nn.Sequential(first, nn.BatchNorm2d(channels), nn.ReLU(), second, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, channels, height, width) in and out."""
        return functional.relu(x + self.branch(x))


class SortedDigits(nn.Module):
    """Digits, int64 (batch, length), to the logits of the same digits in ascending order, (batch, 10, length)."""

    def __init__(self, width: int = 256, length: int = 64) -> None:
        super().__init__()
        self.of_digit, self.of_place = nn.Embedding(10, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.to_logits = nn.Linear(width, 10)

    def forward(self, digits: Tensor) -> Tensor:
        """See the class."""
        logits: Tensor = self.to_logits(self.encoder(self.of_digit(digits) + self.of_place))
        return logits.transpose(1, 2)


def _resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(stem, *(Residual(64) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _digits(step: int) -> tuple[Tensor, Tensor]:
    digits = torch.randint(10, (8, 64), generator=torch.Generator().manual_seed(step))
    return digits, digits.sort(1).values


def _pictures(step: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(step)
    patterns = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (8,), generator=seeded)
    return patterns[labels] + 2 * torch.randn(8, 3, 16, 16, generator=seeded), labels


def _board(_: int) -> tuple[Tensor, Tensor]:
    return coordinate_grid(32), checkerboard(32, 4)


TASKS = {
    "transformer": Task(network=SortedDigits, batch=_digits, loss=functional.cross_entropy),
    "ResNet-like": Task(network=_resnet, batch=_pictures, loss=functional.cross_entropy),
    "checkerboard": Task(network=network, batch=_board, loss=functional.mse_loss, learning_rate=1e-2),
}


@dataclass(kw_only=True)
class Trained:
    """A network in one precision, through one autocast; `times` are seconds of the processor."""

    task: Task
    region: Callable[[], AbstractContextManager[Any]]
    scaler: Any
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self._network = self.task.network()
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=self.task.learning_rate)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Learn from one batch."""
        started = time.process_time()
        self._optimizer.zero_grad()
        with self.region():
            loss = self.task.loss(self._network(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self._optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.times.append(time.process_time() - started)
        self.losses.append(float(loss.detach()))
        self.skipped += self.scaler.get_scale() < scale

    @property
    def milliseconds(self) -> float:
        """The median of the steps after the first ones."""
        return 1e3 * statistics.median(self.times[WARM_UP:])


def trained(task: Task, steps: int) -> dict[str, Trained]:
    """Train the task's variants for that many steps each; by "dtype, whose autocast", float32 first."""
    variants: dict[str, Trained] = {}
    for name, dtype in DTYPES.items():
        if dtype is None:
            variants[name] = Trained(task=task, region=nullcontext, scaler=GradScaler("cpu", enabled=False))
            continue
        scaled = dtype is torch.float16
        ours, theirs = GradScaler("cpu", enabled=scaled), torch.amp.GradScaler("cpu", enabled=scaled)
        variants[f"{name}, halfserve"] = Trained(task=task, region=_region(autocast, dtype), scaler=ours)
        variants[f"{name}, torch.autocast"] = Trained(task=task, region=_region(torch.autocast, dtype), scaler=theirs)
    for number in range(WARM_UP + steps):
        inputs, targets = task.batch(number)
        order = list(variants.values())
        for variant in order[number % len(order) :] + order[: number % len(order)]:
            variant.step(inputs, targets)
    return variants


def _region(kind: Callable[..., AbstractContextManager[Any]], dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: kind("cpu", dtype=dtype)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 40,
    only: Annotated[str, typer.Option(help="Some of the tasks.")] = ",".join(TASKS),
) -> None:
    """Train, and print one Markdown table."""
    if unknown := set(only.split(",")) - TASKS.keys():
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}; expected some of {','.join(TASKS)}")
    torch.set_num_threads(1)
    halves = ", ".join(sorted(computed_halves())) or "no half precision"
    print(f"{processor_name()}, which computes {halves}; 1 thread, torch {torch.__version__}\n")
    headings = f"a training step | precision, autocast | ms | float32's time / its | loss of the last {LAST} steps | skipped"
    print(f"| {headings} |\n|{'---|' * len(headings.split('|'))}")
    for name in only.split(","):
        variants = trained(TASKS[name], steps)
        base = variants["float32"].milliseconds
        for variant, run in variants.items():
            loss = statistics.mean(run.losses[-LAST:])
            cells = (
                name,
                variant,
                f"{run.milliseconds:.1f}",
                f"{base / run.milliseconds:.2f}",
                f"{loss:.4f}",
                str(run.skipped),
            )
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
