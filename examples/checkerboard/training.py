"""A network of 1x1 convolutions learns a checkerboard from its pixels' coordinates, in one precision."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from halfserve import GradScaler, Policy, autocast
from halfserve.amp_core.policy import PolicyError

SIZE_ON_CPU, SIZE_ON_ACCELERATOR = 32, 512


class CheckerboardError(Exception):
    """A setting that cannot be used, for a reason that its user can fix."""


@dataclass(frozen=True, kw_only=True)
class CheckerboardSettings:
    """The settings of one training, the same for each precision; CheckerboardError if a value is out of its range."""

    device: torch.device
    steps: int = 120  # of the optimizer, skipped ones included
    size: int = SIZE_ON_CPU  # height and width of the image, in pixels
    squares: int = 4  # along each side of the image
    width: int = 256  # channels of the hidden layers
    learning_rate: float = 1e-2  # of Adam
    policy: str = "native"  # of autocast, in its string form
    seed: int = 0  # of the weights

    def __post_init__(self) -> None:
        for name in ("steps", "squares", "width"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(self.size >= 2, f"size must be at least 2 pixels, got {self.size}")
        _require(self.squares <= self.size, f"an image of {self.size} pixels has no room for {self.squares} squares a side")
        _require(0 < self.learning_rate < 1, f"learning_rate must be between 0 and 1, got {self.learning_rate}")
        _require(0 <= self.seed < 2**63, f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        try:
            Policy.parse(self.policy)
        except PolicyError as error:
            raise CheckerboardError(str(error)) from error


def device_named(name: str) -> torch.device:
    """Return the device of that name; `auto` is the accelerator if there is one, else the CPU. CheckerboardError
    if it fails.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # `meta` makes tensors, but has no numbers for them
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckerboardError(f"device {name!r} cannot be used here ({reason}); try 'cpu' or 'auto'") from error
    return device


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CheckerboardError(otherwise)


def coordinate_grid(size: int) -> Tensor:
    """Return the coordinates (x, y) of each pixel, from -1 at the left and the top to 1; float32 of shape (1, 2,
    size, size).
    """
    along = torch.linspace(-1.0, 1.0, size)
    return torch.stack(torch.meshgrid(along, along, indexing="xy"))[None]


def checkerboard(size: int, squares: int) -> Tensor:
    """Return a board of `squares` x `squares` fields, 0.0 (top left) and 1.0 in turn; float32 of shape (1, 1, size, size)."""
    field = torch.arange(size) * squares // size
    return ((field[:, None] + field) % 2).float()[None, None]


HIDDEN_LAYERS = 3


def network(width: int = 256) -> nn.Sequential:
    """2 -> width -> width -> width -> 1 channels, with BatchNorm and ReLU between; its weights depend on torch's random state.

    In mixed precision the convolutions run in float16 or bfloat16; BatchNorm computes its statistics in float32 either way.
    """
    layers = list[nn.Module]()
    for taken, given in pairwise((2, *[width] * HIDDEN_LAYERS)):  # without a bias, which BatchNorm has
        layers += [nn.Conv2d(taken, given, kernel_size=1, bias=False), nn.BatchNorm2d(given), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 1, kernel_size=1))


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class CheckerboardResult:
    """The result of a training."""

    dtype: str  # the name of the dtype trained in
    loss: float  # mean squared error of the whole image after the last step
    seconds: float  # the duration of all steps
    milliseconds_per_step: float  # the median
    skipped_steps: int  # steps whose gradients overflowed
    scale: float  # the loss scale at the end; 1.0 without scaling
    peak_bytes: int | None  # the peak memory of the CUDA device; None elsewhere
    image: Tensor  # the network's output, float32 of shape (size, size), on the CPU


def train(settings: CheckerboardSettings, dtype: str, on_step: Callable[[], None] = lambda: None) -> CheckerboardResult:
    """Train the network in `float32`, or with `float16` (which scales the loss) or `bfloat16` in mixed precision."""
    device = settings.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model, skipped, durations = _Trained(settings, dtype), 0, list[float]()
    # Without TF32, which rounds float32 products to 10 bits.
    with torch.backends.cudnn.flags(benchmark=True, allow_tf32=False):
        for _ in range(settings.steps):
            started = time.monotonic()
            skipped += not model.step()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            durations.append(time.monotonic() - started)
            on_step()
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        image = model.image()
    return CheckerboardResult(
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
    """The network and its training; the precisions differ only in `scaler` and `region`."""

    def __init__(self, settings: CheckerboardSettings, dtype: str) -> None:
        device, low = settings.device, dtype != "float32"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.network = network(settings.width).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.coordinates = coordinate_grid(settings.size).to(device, memory_format=torch.channels_last)
        self.target = checkerboard(settings.size, settings.squares).to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate)
        self.scaler = GradScaler(device.type, enabled=dtype == "float16")
        self.region = autocast(device.type, DTYPES[dtype] if low else None, enabled=low, policy=settings.policy)

    def step(self) -> bool:
        self.optimizer.zero_grad()
        with self.region:
            loss = nn.functional.mse_loss(self.network(self.coordinates), self.target)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        skipped = self.scaler.step_was_skipped
        self.scaler.update()
        return not skipped

    def image(self) -> Tensor:
        """Return the network's current output, float32 of shape (1, 1, size, size)."""
        # In training mode: the batch is the whole image, with the statistics of the training.
        with torch.no_grad(), self.region:
            drawn: Tensor = self.network(self.coordinates)
        return drawn.float()
