"""One training from the same start, in the precision asked for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amp_core import GradScaler, autocast
from examples.checkerboard.image import checkerboard, coordinate_grid
from examples.checkerboard.network import network
from examples.checkerboard.settings import Settings

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training came to.

    Attributes:
        dtype: The name of the dtype trained in.
        loss: Mean squared error of the whole image after the last step.
        seconds: That all steps took together.
        milliseconds_per_step: The median.
        skipped_steps: Those whose gradients overflowed.
        scale: The loss scale at the end; 1.0 where nothing was scaled.
        peak_bytes: The most memory of the CUDA device in use at a time; None elsewhere.
        image: What the network draws, float32 of shape (size, size), on the CPU.
    """

    dtype: str
    loss: float
    seconds: float
    milliseconds_per_step: float
    skipped_steps: int
    scale: float
    peak_bytes: int | None
    image: Tensor


def train(settings: Settings, dtype: str, on_step: Callable[[], None] = lambda: None) -> Outcome:
    """Train the network.

    Args:
        settings: The same for each precision that is to be compared.
        dtype: `float32`, or `float16` or `bfloat16` for mixed precision; float16 scales the loss.
        on_step: Called after each step.
    """
    device = settings.device
    _reset_peak_memory(device)
    model, skipped, durations = _Trained(settings, dtype), 0, list[float]()
    # Without TF32, which rounds to 10 bits where float32 is asked for.
    with torch.backends.cudnn.flags(benchmark=True, allow_tf32=False):
        for _ in range(settings.steps):
            started = time.monotonic()
            skipped += not model.step()
            _wait_for(device)
            durations.append(time.monotonic() - started)
            on_step()
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        image = model.image()
    return Outcome(
        dtype=dtype,
        loss=nn.functional.mse_loss(image, model.target).item(),
        seconds=sum(durations),
        milliseconds_per_step=1e3 * statistics.median(durations),
        skipped_steps=skipped,
        scale=model.scaler.get_scale(),
        peak_bytes=peak_bytes,
        image=image[0, 0].cpu(),
    )


class _Trained:
    """The network with what trains it; the only difference between the precisions is in `scaler` and `region`."""

    def __init__(self, settings: Settings, dtype: str) -> None:
        device, low = settings.device, dtype != "float32"
        self.network = _fresh_network(settings)
        self.coordinates = coordinate_grid(settings.size).to(device, memory_format=torch.channels_last)
        self.target = checkerboard(settings.size, settings.squares).to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate)
        self.scaler = GradScaler(device.type, enabled=dtype == "float16")
        self.region = autocast(device.type, DTYPES[dtype] if low else None, enabled=low, policy=settings.policy)

    def step(self) -> bool:
        """Make one step; False if it was skipped because a gradient overflowed."""
        self.optimizer.zero_grad()
        with self.region:
            loss = nn.functional.mse_loss(self.network(self.coordinates), self.target)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        skipped = self.scaler.step_was_skipped
        self.scaler.update()
        return not skipped

    def image(self) -> Tensor:
        """What the network draws now, float32 of shape (1, 1, size, size)."""
        # In training mode still: the batch is the whole image, and so are its statistics.
        with torch.no_grad(), self.region:
            drawn: Tensor = self.network(self.coordinates)
        return drawn.float()


def _fresh_network(settings: Settings) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        made: nn.Module = network(settings.width)
    return made.to(settings.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
