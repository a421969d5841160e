"""Capture: selects requests whose tensors are kept for replay and proofs, and passes them to the thread that writes shards."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.observability.capture_folder import CaptureFolder, EndedRequest
from halfserve.serve.observability.inference_record import CapturedMessage, InferenceRecord
from halfserve.serve.observability.outbox import Outbox

logger = logging.getLogger(__name__)

SHARD_EVERY_S: Final = 30.0  # longest time that a request waits for its shard
SHARD_BYTES: Final = 1 << 24  # a shard is written once its requests have this size
MAX_WAITING_BYTES: Final = 1 << 26  # memory for captured requests that are not yet on the disk
MAX_WAITING: Final = 8192
CLOSE_S: Final = 10.0  # seconds that writing the last shards may take
NEVER: Final = 2**61


class Capture:
    """Captures a share of each model's requests. Lives on the event loop, where it only keeps references.

    A request is counted as captured once its shard is on the disk. One for which there is no room is answered as ever, and
    counted as dropped.
    """

    def __init__(self, folder: Path, share: float, max_bytes: int, core: InferenceCore, process: int | None) -> None:
        """Capture into `folder`, which gets at most `max_bytes`, with `share` for models without a share of their own.

        Raises:
            FailedPreconditionError: the folder cannot be used.
        """
        self._share = self._most = share
        self._shares: dict[tuple[str, int], float] = {}
        self._core = core
        self._taken_bytes = 0
        self._overflows = self._skipped = 0
        self._unwritten = 0  # bytes that were put into the outbox since it was last emptied early
        self._folder = written = CaptureFolder(folder, max_bytes)
        self._outbox: Outbox[EndedRequest] = Outbox(written.write, name="capture", bound=MAX_WAITING, every_s=SHARD_EVERY_S)
        figures = core.figures
        figures.counter("halfserve_captured_total", "Requests that were captured and are on the disk", lambda: written.captured)
        figures.counter(
            "halfserve_capture_overflow_total",
            "Requests that were not captured because too many waited for the disk",
            lambda: self._overflows + self._outbox.dropped,
        )
        figures.counter(
            "halfserve_capture_failed_total",
            "Requests that were not captured because the disk could not be written",
            lambda: written.failed,
        )
        figures.counter(
            "halfserve_capture_skipped_total",
            "Requests that could not be captured: on a CUDA device, large ones in shared memory, or malformed",
            lambda: self._skipped + written.malformed,
        )
        figures.gauge(
            "halfserve_capture_bytes",
            "Bytes of the captured requests on the disk, of all processes",
            lambda: 0 if process else written.size,
        )
        logger.info("requests are captured in %s", folder)
        self.refresh()

    def refresh(self) -> None:
        """Read the shares of the models that are served now."""
        shares = {model: own_parameter(model.config, "halfserve.capture") for model in self._core.models()}
        self._shares = {(model.name, model.version): share for model, share in shares.items() if share is not None}
        self._most = max([self._share, *self._shares.values()])

    def next_after(self) -> int:
        """Return after how many requests the next one may be captured: a random number, so that no pattern is missed.

        Together with `wants`, each request is captured with the probability of its model's share.
        """
        if not 0 < self._most < 1:
            return 1 if self._most else NEVER
        return int(math.log1p(-random.random()) / math.log1p(-self._most)) + 1  # noqa: S311  (a sample, no secret)

    def wants(self, model: Model) -> bool:
        """Return whether a selected request is captured, given its model."""
        share = self._shares.get((model.name, model.version), self._share)
        return share >= self._most or random.random() * self._most < share  # noqa: S311  (a sample, no secret)

    def begin(self, record: InferenceRecord, data: bytes | memoryview, copied: Sequence[bytes | None] | None) -> None:
        """Keep the message of a request until it has ended.

        `copied` are the inputs that lie in shared memory; None if they cannot be copied.
        """
        if copied is None:
            self._skipped += 1
            return
        size = len(data) + sum([len(part) for part in copied if part is not None])
        if self._taken_bytes - self._folder.freed_bytes + size > MAX_WAITING_BYTES:
            self._overflows += 1
            return
        self._taken_bytes += size
        record.captured = CapturedMessage(data, copied, size)

    def ended(self, record: InferenceRecord) -> None:
        """Pass a request on to the thread."""
        message, record.captured = record.captured, None
        if message is None:
            return
        latency_ms = (record.ended_ns - record.arrived_ns) / 1e6
        arrived_s, model = time.time() - latency_ms / 1e3, record.model
        ended = EndedRequest(message, model.name, model.version, arrived_s, latency_ms, record.status)
        if not self._outbox.put(ended):
            self._taken_bytes -= message.size
            return
        self._unwritten += message.size
        if self._unwritten >= SHARD_BYTES:
            self._unwritten = 0
            self._outbox.hand_over()

    def close(self) -> None:
        """Write the last shards, for at most CLOSE_S seconds."""
        self._outbox.close(CLOSE_S)
