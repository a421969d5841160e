"""Runs of torch programs on a CUDA device, with pinned buffers, a stream, and a CUDA graph for each combination of shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from halfserve.serve.backends.onnx_runtime.cuda import MAX_SHAPES, RECORDING_LOCK, Wait

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
Compute = Callable[[Tensors], Sequence[torch.Tensor]]  # takes inputs by name, and gives the outputs, on the device
Shapes = tuple[tuple[str, torch.Size], ...]


class CudaStream:
    """A stream of a CUDA device, with the memory and the recordings of the work on it."""

    def __init__(self, index: int) -> None:
        """`index`: number of the device."""
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # (torch does not annotate it)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Run this thread's work on the stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory on the host for the values of a tensor."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def record(self, work: Callable[[], Sequence[torch.Tensor]]) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """Record work without doing it; returns its outputs, and what does it."""
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads do not break the recording, as far as CUDA allows them at all: see RECORDING_LOCK.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = work()
        return outputs, graph.replay

    def wait(self) -> None:
        """Wait for the end of the work, without Python's lock."""
        self._stream.synchronize()


class DeviceRuns:
    """The runs of one copy of a program on a device; for one thread at a time."""

    def __init__(self, compute: Compute, stream: CudaStream, *, records: bool) -> None:
        """Prepare runs on a device. `records`: whether combinations of shapes are recorded; otherwise they are computed one
        kernel after the other.
        """
        self._compute = compute
        self._stream = stream
        self._records = records
        self._buckets: dict[Shapes, _Bucket] = {}

    def run(self, inputs: Tensors) -> list[torch.Tensor]:
        """Compute the outputs, on the host and owned by the caller, from inputs on the host.

        Raises any exception of torch.
        """
        shapes = tuple((name, tensor.shape) for name, tensor in inputs.items())
        with self._stream.current():
            bucket = self._buckets.get(shapes)
            if bucket is None:
                bucket = _Bucket(self._compute, self._stream, inputs)
                if len(self._buckets) < MAX_SHAPES:
                    self._buckets[shapes] = bucket
            return bucket.run(inputs, records=self._records)


class _Bucket:
    """The buffers and the recording of one combination of shapes."""

    def __init__(self, compute: Compute, stream: CudaStream, inputs: Tensors) -> None:
        self._compute = compute
        self._stream = stream
        self._pinned = {name: stream.pinned(tensor) for name, tensor in inputs.items()}
        self._given = {name: torch.empty_like(tensor, device=stream.device) for name, tensor in inputs.items()}
        self._answers: list[torch.Tensor] | None = None  # pinned buffers for the outputs; None before the first run
        self._recorded: tuple[Sequence[torch.Tensor], Callable[[], None]] | None = None
        self._wait = Wait()

    def run(self, inputs: Tensors, *, records: bool) -> list[torch.Tensor]:
        for name, tensor in inputs.items():
            self._pinned[name].copy_(tensor)
            self._given[name].copy_(self._pinned[name], non_blocking=True)
        # The first run chooses algorithms, which no recording allows.
        if records and self._answers is not None and self._recorded is None and not self._wait.goes_on():
            self._record()
        if self._recorded is None:
            outputs = self._compute(self._given)
        else:
            outputs, replay = self._recorded
            replay()
        if self._answers is None or [one.shape for one in self._answers] != [one.shape for one in outputs]:
            self._answers = [self._stream.pinned(output) for output in outputs]
        for answer, output in zip(self._answers, outputs, strict=True):
            answer.copy_(output, non_blocking=True)
        self._stream.wait()
        return [answer.clone() for answer in self._answers]  # the next run has the same buffers

    def _record(self) -> None:
        with RECORDING_LOCK.recording() as may:
            if not may:
                return
            self._stream.wait()
            try:
                self._recorded = self._stream.record(lambda: self._compute(self._given))
            except Exception as error:  # noqa: BLE001  (torch has no common exception; a lasting error recurs in the run)
                self._wait.begin()
                text = "a CUDA graph could not be recorded (%s); it is tried again after %d batches of its size"
                logger.warning(text, (str(error).strip() or type(error).__name__).splitlines()[0], self._wait.left)
