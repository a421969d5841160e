"""Capture: selects requests whose tensors are kept for replay and proofs, and passes them to the thread that writes shards."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from halfserve.protos.captured_requests import CapturedMessage
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.observability.capture_folder import CaptureFolder
from halfserve.serve.observability.inference_record import InferenceRecord
from halfserve.serve.observability.outbox import Outbox

logger = logging.getLogger(__name__)

SHARD_EVERY_S: Final = 30.0  # longest time that a request waits for its shard
SHARD_BYTES: Final = 1 << 24  # a shard is written once its requests have this size
MAX_WAITING_BYTES: Final = 1 << 26  # memory for captured requests that are not yet on the disk
LEAST_BYTES: Final = 1 << 13  # what each request counts for at least; the outbox has room for as many as the bound allows
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
        self._dropped = 0
        self._unwritten = 0  # bytes that were put into the outbox since it was last emptied early
        self._folder = written = CaptureFolder(folder, max_bytes)
        self._outbox: Outbox[CapturedMessage] = Outbox(written.write, name="capture", every_s=SHARD_EVERY_S)
        figures = core.figures
        figures.counter("halfserve_captured_total", "Requests that were captured and are on the disk", lambda: written.captured)
        figures.counter(
            "halfserve_capture_dropped_total",
            "Requests that were chosen, but not captured: too many waited for the disk, it failed, or they cannot be captured",
            lambda: self._dropped + written.dropped + self._outbox.dropped,
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
        size = LEAST_BYTES + len(data) + sum([len(part) for part in copied or () if part is not None])
        if copied is None or self._taken_bytes - self._folder.freed_bytes + size > MAX_WAITING_BYTES:
            self._dropped += 1
            return
        self._taken_bytes += size
        model = record.model
        record.captured = CapturedMessage(data, copied, size, model.name, model.version, time.time())

    def ended(self, record: InferenceRecord) -> None:
        """Pass a request on to the thread."""
        message, record.captured = record.captured, None
        if message is None:
            return
        message.latency_ms, message.status = (record.ended_ns - record.arrived_ns) / 1e6, record.status
        self._outbox.put(message)
        self._unwritten += message.size
        if self._unwritten >= SHARD_BYTES:
            self._unwritten = 0
            self._outbox.hand_over()

    def close(self) -> None:
        """Write the last shards, for at most CLOSE_S seconds."""
        self._outbox.close(CLOSE_S)
