"""The processes of one run: `torchrun` starts them, each trains on its share of every batch."""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from halfserve.amp_core.factory import one_line
from halfserve.amp_core.training.training_settings import PeerError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.distributed_c10d import Store

Value = TypeVar("Value")
_FIRST_TO_FAIL = "halfserve/first_to_fail"


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank of this process, and communication with the others. Alone, every method returns its argument."""

    rank: int = 0  # the number of this process, from 0; only rank 0 writes files and prints
    size: int = 1  # the number of processes
    local_rank: int = 0  # the process's number on its machine, which is the number of its GPU
    store: Store | None = None  # the key-value store that the processes share

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a floating tensor over all processes; the tensor is not changed."""
        return self.sum(value) / self.size if self.size > 1 else value

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes; the tensor is not changed."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, in the order of their ranks; pickled."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def from_first(self, value: Value) -> Value:
        """Return the value of rank 0; pickled."""
        if self.size == 1:
            return value
        shared: list[Any] = [value]
        dist.broadcast_object_list(shared, src=0)
        first: Value = shared[0]
        return first

    def share_buffers(self, module: torch.nn.Module) -> None:
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def fails_first(self) -> bool:
        """Announce that this process fails; returns whether it is the first, and should report why."""
        if self.store is None:
            return True
        try:
            first = self.store.compare_set(_FIRST_TO_FAIL, "", str(self.rank))
        except RuntimeError:  # the store is gone, and with it the process that failed first
            return False
        return bool(first == str(self.rank).encode())


@contextmanager
def joined_world() -> Iterator[World]:
    """Join the processes that `torchrun` started together with this one, if it did; else this process is alone.

    Communicates by gloo for CPU tensors and by nccl for CUDA tensors. Only the first process that fails reports its error: in
    the others it shows as broken connections.

    Raises:
        PeerError: In place of any exception, if another process failed first.
        TrainingError: If torchrun's environment variables are incomplete.
    """
    world = _from_environment()
    if world.size == 1:
        yield world
        return
    try:
        world = _connected(world)
    except RuntimeError as error:
        raise TrainingError(
            f"rank {world.rank} cannot connect to the other processes of this run: {one_line(error)}"
        ) from error
    try:
        yield world
    except Exception as error:
        if not world.fails_first():
            raise PeerError("another process of this run failed first") from error
        if is_broken_connection(error):
            raise TrainingError(
                f"rank {world.rank} lost its connection to another process of the run; was that killed? ({one_line(error)})"
            ) from error
        raise
    _leave_group()


def _from_environment() -> World:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return World()
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise TrainingError(
            f"RANK is set in the environment, but not {', '.join(missing)}; start several processes by "
            "`torchrun --nproc-per-node N -m halfserve train ...`, or unset RANK to train in one"
        )
    try:
        rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except ValueError as error:
        raise TrainingError(f"RANK, WORLD_SIZE and LOCAL_RANK in the environment must be whole numbers: {error}") from error
    return World(rank=rank, size=size, local_rank=local_rank)


def _connected(world: World) -> World:
    # DistributedDataParallel imports this module, whose functions have the current group as a default argument: imported after
    # the group was made, it keeps the group and gloo's threads alive. A gloo thread that frees a tensor while the interpreter
    # ends aborts the process (SIGABRT).
    import_module("torch.distributed.nn.functional")
    store, _, _ = next(rendezvous("env://", world.rank, world.size))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    return replace(world, store=store)


def _leave_group() -> None:
    # Reference cycles of DistributedDataParallel hold the group.
    gc.collect()
    dist.destroy_process_group()


def is_broken_connection(error: Exception) -> bool:
    """Return whether an exception says that another process of the run is gone."""
    # gloo's errors differ from others by their text only.
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
