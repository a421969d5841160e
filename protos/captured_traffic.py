"""Captured requests of one model within a limit of memory: a spread over the time that they were captured in.

A capture may be larger than memory. Its shards are read one at a time; where the requests exceed the limit, every second one is
left out, until they fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from halfserve.protos.captured_requests import SUFFIX, CapturedRequest, CapturedRequestsError, read_capture

# Statuses of requests that may be valid: the server answered them, or had no time, room or caller for them.
USABLE: Final = frozenset({"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedTraffic:
    """Requests of one model, in the order of their arrival.

    Attributes:
        folder: the folder that was read.
        model: name of the model that they were captured of.
        requests: requests within the limit, spread over all usable ones; at least one.
        times_s: float64 [usable], rising: arrival of each usable request, in seconds since 1970.
        refused: requests that the server had refused as wrong, which are not usable.
        shards: number of shards.
        shards_sha256: SHA-256 of the shards' SHA-256 in hexadecimal, one a line, in the order of their paths.
    """

    folder: Path
    model: str
    requests: Sequence[CapturedRequest]
    times_s: np.ndarray[Any, np.dtype[np.float64]]
    refused: int
    shards: int
    shards_sha256: str

    @property
    def captured(self) -> int:
        return len(self.times_s) + self.refused

    @property
    def seconds(self) -> float:
        """Time from the first arrival to the last."""
        return float(self.times_s[-1] - self.times_s[0])

    @property
    def period(self) -> tuple[str, str]:
        """First and last arrival, in ISO 8601, UTC."""
        first, last = (datetime.fromtimestamp(float(self.times_s[at]), UTC).isoformat(timespec="seconds") for at in (0, -1))
        return first, last


def is_capture(path: Path) -> bool:
    """Return whether a path is a folder with shards, or with folders of shards."""
    return path.is_dir() and next(_shards(path), None) is not None


def read_traffic(folder: Path, share: Callable[[CapturedRequest], float], *, prefer: str | None = None) -> CapturedTraffic:
    """Read the requests of a capture with one model, or those of the model `prefer` of a capture with several.

    `share` returns how much of the limit a request takes: the shares of the requests returned are 1 at most together, unless a
    single one takes more.

    Raises:
        CapturedRequestsError: there are no usable requests, they are of several models, or a shard cannot be used.
    """
    model = _model_of(folder, prefer)
    kept: list[CapturedRequest] = []
    times: list[float] = []
    digest, shards, refused, stride = hashlib.sha256(), 0, 0, 1
    for requests, sha256 in _contents(folder, model):
        digest.update(sha256.encode() + b"\n")
        shards += 1
        usable = [request for request in requests if request.status in USABLE]
        refused += len(requests) - len(usable)
        kept += usable[-len(times) % stride :: stride]
        times += [request.time_s for request in usable]
        while len(kept) > 1 and sum(map(share, kept)) > 1:
            kept, stride = kept[::2], stride * 2
    if not kept:
        raise CapturedRequestsError(
            f"{folder}: has no requests that the server took, and {refused} that it refused; capture others"
        )
    return CapturedTraffic(
        folder=folder,
        model=kept[0].model,
        requests=sorted(kept, key=lambda request: request.time_s),
        times_s=np.sort(np.asarray(times, np.float64)),
        refused=refused,
        shards=shards,
        shards_sha256=digest.hexdigest(),
    )


def _model_of(folder: Path, prefer: str | None) -> str | None:
    """Return the model to read of a capture with several, None for the only one. Raises CapturedRequestsError, see above."""
    try:
        read_capture(folder, limit=0)
    except CapturedRequestsError:
        if prefer is None:
            raise
        read_capture(folder, model=prefer, limit=0)
        return prefer
    return None


def _contents(folder: Path, model: str | None) -> Iterator[tuple[list[CapturedRequest], str]]:
    """Yield the requests of each shard with this model, and the shard's SHA-256 in hexadecimal."""
    for path in sorted(_shards(folder)):
        try:
            first = read_capture(path, limit=1)
            if model is not None and (not first or first[0].model != model):
                continue
            requests = read_capture(path)
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except (CapturedRequestsError, FileNotFoundError):
            if path.exists():
                raise
            continue  # a server that captures has removed it as the oldest
        yield requests, sha256


def request_bytes(request: CapturedRequest) -> int:
    """Return the size of a request's tensors on the wire."""
    return sum(sum(map(len, array.flat)) if array.dtype == object else array.nbytes for array in request.inputs.values())


def _shards(folder: Path) -> Iterator[Path]:
    return (path for pattern in (f"*{SUFFIX}", f"*/*{SUFFIX}") for path in folder.glob(pattern) if path.is_file())
