"""Completes a model's instance groups as Triton does, and places the copies that they ask for.

The rules are those of NormalizeInstanceGroup and ValidateInstanceGroup in Triton's src/model_config_utils.cc
(https://github.com/triton-inference-server/core), except that a group on the CPU has one copy unless it says more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextvars import Context, copy_context
from dataclasses import dataclass, replace

from halfserve.protos.model_config_pb2 import ModelConfig, ModelInstanceGroup
from halfserve.serve.engine.backend import CPU_PROVIDERS, Backend, DevicePlacement
from halfserve.serve.engine.background_threads import Worker, sched_batch
from halfserve.serve.engine.errors import ModelLoadError

MAX_COPIES = 1000  # most copies of one model; each has a thread
GPU, CPU, AUTO = ModelInstanceGroup.KIND_GPU, ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_AUTO


@dataclass
class InstanceGroup:
    """One completed group.

    Attributes:
        message: the group in the model's configuration.
        takes_all: whether the group named no devices.
        needs_gpu: whether none of its copies may compute on the CPU.
    """

    message: ModelInstanceGroup
    takes_all: bool
    needs_gpu: bool

    @property
    def copies(self) -> int:
        return max(1, len(self.message.gpus)) * self.message.count

    def places(self, placement: DevicePlacement) -> list[DevicePlacement]:
        """Return one placement for each copy, for a server with this placement."""
        use_gpu = placement.use_gpu and self.message.kind != CPU
        needs_gpu = use_gpu and (placement.require_gpu or self.needs_gpu)
        devices = list(self.message.gpus) or [0]
        own = [replace(placement, use_gpu=use_gpu, require_gpu=needs_gpu, device_id=device) for device in devices]
        return [place for place in own for _ in range(self.message.count)]

    def move_to_cpu(self) -> None:
        """Make this a group on the CPU: with as many copies as on the named devices, or as on one of all devices."""
        if not self.takes_all:
            self.message.count = self.copies
        self.message.kind = CPU
        del self.message.gpus[:]


def complete_groups(config: ModelConfig, placement: DevicePlacement, devices: int) -> list[InstanceGroup]:
    """Complete the instance groups of a configuration: their names, kinds, counts and devices.

    Args:
        config: the model's configuration, which is changed.
        placement: whether the server may use a device.
        devices: number of visible CUDA devices.

    Raises:
        ModelLoadError: a group has an invalid number of copies, or a device that is not there.
    """
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    groups = []
    for number, message in enumerate(config.instance_group):
        message.name = message.name or f"{config.name}_{number}"
        _require_valid(config, message)
        group = InstanceGroup(message, takes_all=not message.gpus, needs_gpu=message.kind == GPU)
        message.count = max(1, message.count)
        if not placement.use_gpu or (message.kind == AUTO and not devices):
            group.move_to_cpu()
        elif message.kind in {AUTO, GPU}:
            _require_devices(config, message, devices)
            message.kind = GPU
            message.gpus.extend(range(devices) if group.takes_all else ())
        groups.append(group)
        total = sum(one.copies for one in groups)
        if total > MAX_COPIES:
            raise ModelLoadError(
                f"model {config.name!r}: its instance_groups ask for {total} or more copies, expected {MAX_COPIES} at most"
            )
    return groups


def load_copies(
    groups: Sequence[InstanceGroup],
    placement: DevicePlacement,
    load: Callable[[DevicePlacement], Backend],
    *,
    at_once: int = 1,
) -> tuple[list[Backend], list[DevicePlacement]]:
    """Load every copy, `at_once` of a group at the same time, and return the copies and their places.

    The first copy of a group of KIND_AUTO decides where the group computes: on the CPU, where its runtime cannot use the
    device, or on devices alone, also when a copy is loaded again. It is loaded before the others.

    Raises:
        ModelLoadError: a copy cannot be loaded.
    """
    backends: list[Backend] = []
    places: list[DevicePlacement] = []
    try:
        for group in groups:
            if group.message.kind == GPU and not group.needs_gpu:
                backends.append(load(group.places(placement)[0]))
                if backends[-1].provider in CPU_PROVIDERS:
                    group.move_to_cpu()
                else:
                    group.needs_gpu = True
            own = group.places(placement)
            places += own
            _load_at_once(places[len(backends) :], load, backends, at_once)
    except BaseException:
        while backends:  # the error's frames hold this list
            backends.pop().give_up()
        raise
    return backends, places


def _load_at_once(
    places: Sequence[DevicePlacement], load: Callable[[DevicePlacement], Backend], backends: list[Backend], most: int
) -> None:
    """Load a copy for each place, at most `most` at the same time, and append them to `backends` in order.

    If one cannot be loaded, its error is raised after the others that had begun are appended.
    """
    if most == 1 or len(places) < 2:
        for place in places:
            backends.append(load(place))  # noqa: PERF401  (a copy must be known when a later one cannot be loaded)
        return

    loads: list[Future[Backend]] = [Future() for _ in places]
    workers = [Worker("copy loader") for _ in range(min(most, len(places)))]
    for number, (place, made) in enumerate(zip(places, loads, strict=True)):
        workers[number % len(workers)].submit(_load_copy, load, place, copy_context(), made)
    for worker in workers:
        worker.stop()
    failures = []
    for made in loads:
        try:
            backends.append(made.result())
        except CancelledError:
            continue
        except BaseException as error:  # noqa: BLE001  (raised below)
            failures.append(error)
            for later in loads:
                later.cancel()
    if failures:
        raise failures[0]


def _load_copy(
    load: Callable[[DevicePlacement], Backend], place: DevicePlacement, context: Context, made: Future[Backend]
) -> None:
    if not made.set_running_or_notify_cancel():
        return
    try:
        with sched_batch():
            made.set_result(context.run(load, place))
    except BaseException as error:  # noqa: BLE001  (the caller gets every error)
        made.set_exception(error)


def _require_valid(config: ModelConfig, group: ModelInstanceGroup) -> None:
    if not 0 <= group.count <= MAX_COPIES:
        raise ModelLoadError(
            f"model {config.name!r}: instance_group has count {group.count}, expected 1 to {MAX_COPIES}, or 0 for 1"
        )
    if min(group.gpus, default=0) < 0:
        raise ModelLoadError(f"model {config.name!r}: instance_group has gpus {list(group.gpus)}, expected 0 or more")
    if group.gpus and group.kind not in {AUTO, GPU}:
        kind = ModelInstanceGroup.Kind.Name(group.kind)
        raise ModelLoadError(
            f"model {config.name!r}: instance_group has kind {kind} and gpus {list(group.gpus)}, expected one of them; "
            "for several copies on the CPU set count"
        )


def _require_devices(config: ModelConfig, group: ModelInstanceGroup, devices: int) -> None:
    if devices and max(group.gpus, default=0) >= devices:
        raise ModelLoadError(
            f"model {config.name!r}: instance_group {group.name!r} has gpus {list(group.gpus)}, but there are {devices} CUDA "
            f"devices here, numbered from 0; expected numbers up to {devices - 1}, or no gpus for one copy on each device"
        )
