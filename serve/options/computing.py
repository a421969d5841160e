"""Options of how requests become batches, of what computes them, and of a server's end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from halfserve.option_groups import reading
from halfserve.serve.engine.backend import CpuPrecision, DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.resource_limits import usable_cores
from halfserve.serve.fleet.launch.supervision import process_count
from halfserve.serve.model_control.control_options import ControlOptions
from halfserve.serve.server import ServerOptions

MAX_ROWS = 2**31 - 1  # the largest value of max_batch_size in a model's config
HOUR_US = 3_600_000_000
MAX_THREADS = 4096  # the runtime starts as many threads as this option says

_batching = partial(typer.Option, rich_help_panel="Batching")
_computing = partial(typer.Option, rich_help_panel="Computing")
_ending = partial(typer.Option, rich_help_panel="Ending")


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Options of queues and batches; the fields are those of `Defaults`."""

    max_batch_size: Annotated[
        int, _batching(min=1, max=MAX_ROWS, help="Rows in one batch, where the model's config does not say.")
    ] = Defaults.max_batch_size
    max_queue_delay_us: Annotated[
        int,
        _batching(
            min=0,
            max=HOUR_US,
            help="Microseconds that a request may wait for others to share its batch, where the model's config does not say.",
        ),
    ] = Defaults.max_queue_delay_us
    max_queue_size: Annotated[
        int, _batching(min=1, help="Requests that may wait for one model, where the model's config does not say.")
    ] = Defaults.max_queue_size
    max_queue_mib: Annotated[int, _batching(min=1, help="MiB that the waiting requests of one model may hold.")] = (
        Defaults.max_queue_mib
    )

    def defaults(self) -> Defaults:
        """Return the settings of models whose config.pbtxt leaves them open."""
        return Defaults(**vars(self))


@dataclass(frozen=True, kw_only=True)
class Computing:
    """Options of devices, threads, processes and the response cache."""

    compute_slots: Annotated[
        int,
        _computing(
            min=0, help="Batches computed at once on the CPU over all models, handed out fairly; 0 leaves it to the system."
        ),
    ] = ServerOptions.compute_slots
    response_cache_mib: Annotated[
        float,
        _computing(
            min=0,
            help="MiB of answers to keep for the models whose config says `response_cache { enable: true }`; 0 keeps none.",
        ),
    ] = ServerOptions.response_cache_mib
    threads: Annotated[
        int,
        _computing(
            min=0,
            max=MAX_THREADS,
            help="CPU threads of one operator; 0 lets the runtime choose, and divides the cores among --processes.",
        ),
    ] = DevicePlacement.threads
    cpu_precision: Annotated[
        CpuPrecision,
        _computing(
            help="In which precision the CPU computes ONNX models whose config does not say; auto: the fastest for which a "
            "certificate has a passed verdict."
        ),
    ] = DevicePlacement.cpu_precision
    processes: Annotated[
        str,
        _computing(
            help="Number of server processes behind the same ports; 'auto' is one per core, or a single one with a GPU."
        ),
    ] = "1"
    cpu: Annotated[bool, _computing("--cpu", help="Compute on the CPU even if there is a GPU.")] = False
    require_gpu: Annotated[bool, _computing("--require-gpu", help="Refuse to start without a GPU.")] = (
        DevicePlacement.require_gpu
    )

    def __post_init__(self) -> None:
        if self.cpu and self.require_gpu:
            raise typer.BadParameter("--cpu and --require-gpu exclude each other; use one of them")

    def process_count(self) -> int:
        """Return the number of server processes."""
        with reading("--processes"):
            return process_count(self.processes, use_gpu=not self.cpu)

    def placement(self, count: int) -> DevicePlacement:
        """Devices and threads of each of `count` processes."""
        share = max(1, usable_cores() // count) if count > 1 else 0
        return DevicePlacement(
            use_gpu=not self.cpu,
            require_gpu=self.require_gpu,
            threads=self.threads or share,
            cpu_precision=self.cpu_precision,
        )


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Options of the time after SIGTERM, and of a supervisor."""

    lame_duck_seconds: Annotated[
        float,
        _ending(min=0, help="Seconds after SIGTERM during which the server reports that it is not ready, and still serves."),
    ] = ControlOptions.lame_duck_s
    drain_seconds: Annotated[float, _ending(min=0.1, help="Seconds that running requests may take after SIGTERM.")] = (
        ServerOptions.drain_s
    )
    supervise: Annotated[
        bool,
        _ending("--supervise", help="Serve in a worker process, and restart it when it ends; clients keep the address."),
    ] = False
