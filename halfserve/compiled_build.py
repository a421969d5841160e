"""The server's hot path, compiled by mypyc if a C compiler was available at installation.

The compiled modules are beside their sources and behave the same. `setup.py` builds them and writes STAMP, from which an
import determines whether they still match these sources and this interpreter.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import zlib
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import NamedTuple

# Below halfserve/serve/. All modules that a request passes are listed: a call from a compiled module to a plain one and back
# costs more than compiling a single module gains. Asynchronous generators cannot be compiled, so they are in other modules.
MODULES = (
    "engine.batcher",
    "engine.caching.caching_scheduler",
    "engine.caching.response_cache",
    "engine.dispatch.delivery",
    "engine.dispatch.dispatcher",
    "engine.dispatch.refusals",
    "engine.dispatch.short_batches",
    "engine.execution.assembly",
    "engine.execution.batch",
    "engine.execution.batch_invariance",
    "engine.execution.batch_runner",
    "engine.execution.instance",
    "engine.execution.memory_limit",
    "engine.execution.output_backlog",
    "engine.execution.recovery",
    "engine.execution.runners",
    "engine.execution.staging",
    "engine.execution.tensor_runner",
    "engine.inference_core",
    "engine.model",
    "engine.model_statistics",
    "engine.padding.mixed_lengths",
    "engine.padding.padding",
    "engine.precision_guard.guard",
    "engine.precision_guard.non_finite",
    "engine.queueing.admission_control",
    "engine.queueing.batch_queue",
    "engine.queueing.compute_slots",
    "engine.queueing.deadline_timer",
    "engine.queueing.pace",
    "engine.queueing.waiting_requests",
    "engine.requests",
    "engine.results",
    "engine.tensors",
    "observability.inference_record",
    "observability.observer",
    "protocol.codec",
    "protocol.inference",
    "protocol.large_bytes",
    "protocol.messages",
    "protocol.raw_tensors",
    "protocol.request_cache",
    "protocol.shared_memory",
    "security.memory_budget",
    "transports.grpc_framing",
    "transports.nghttp2.calls",
    "transports.nghttp2.connection",
    "transports.nghttp2.fairness",
    "transports.nghttp2.fast_path",
    "transports.nghttp2.flow_control",
    "transports.nghttp2.frame_reader",
    "transports.nghttp2.frames",
    "transports.nghttp2.pending_requests",
    "transports.nghttp2.server",
    "transports.nghttp2.session",
    "transports.nghttp2.wire",
    "transports.read_scheduler",
)
STAMP = "serve/compiled_build.stamp"
LIBRARY = "__mypyc"  # ending of the libraries' names
SWITCH = "HALFSERVE_COMPILED"  # any value but 1 runs the sources, and installs without compiling

logger = logging.getLogger(__name__)


class Build(NamedTuple):
    """Build of the hot path that is in use.

    Attributes:
        name: "compiled" or "plain".
        reason: reason why it is the plain one; empty for the compiled one.
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


class _Sources:
    """Finder of the modules' sources; Python itself prefers a compiled module to the source beside it."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG003  (the signature is Python's)
        if path is None or not name.startswith("halfserve.serve."):
            return None
        sources = (f"{folder}/{name.rpartition('.')[2]}.py" for folder in path)
        found = next(filter(os.path.isfile, sources), None)
        return spec_from_file_location(name, found) if found else None


def library_of(module: str) -> str:
    """Return the library in serve/ that contains a module's code; the file beside the source only refers to it.

    Each folder has one library: an edit recompiles only its folder, and several processor cores compile several folders.
    """
    return f"compiled_{module.rpartition('.')[0].replace('.', '_')}{LIBRARY}"


def checksum(path: str) -> int:
    """CRC-32 of a file."""
    with open(path, "rb") as file:  # noqa: PTH123  (every start of a server and of a client does this some fifty times)
        return zlib.crc32(file.read())


@cache
def build_in_use() -> Build:
    """Choose the build for this process: the compiled one if it fits, otherwise the sources.

    The first call chooses, so it must come before the import of any module of the hot path: halfserve.serve calls this. A
    compiled build that does not fit is logged in one line.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch != "1":
        reason = f"{SWITCH} is {switch}"
    else:
        home = os.path.dirname(__file__)  # noqa: PTH120  (see `checksum`)
        if os.path.isfile(f"{home}/{STAMP}"):  # noqa: PTH113  (see `checksum`)
            reason = _misfit(home)
            if not reason:
                return Build("compiled")
            advice = "to compile it again, run `make compile` in a checkout, or install halfserve again"
            logger.warning("the compiled hot path is not used: %s; %s", reason, advice)
        else:
            reason = "not compiled"
    sys.meta_path.insert(0, _Sources)  # a class, as Python's own finders are
    return Build("plain", reason)


def _misfit(home: str) -> str:
    """Reason why the compiled modules cannot be used; empty if they can, in which case their code is loaded.

    Libraries and sources are checked as a whole: a compiled module beside a module of another build would crash, because it
    accesses that module's objects by their memory layout.
    """
    try:
        with open(f"{home}/{STAMP}", "rb") as file:  # noqa: PTH123  (see `checksum`)
            stamp = json.load(file)
        if stamp["suffix"] != EXTENSION_SUFFIXES[0]:
            return f"it was made for another Python ({stamp['suffix']})"
        for path, size in stamp["libraries"].items():
            if os.path.getsize(f"{home}/{path}") != size:  # noqa: PTH202  (see `checksum`)
                return f"{path} is damaged"
        for path, expected in stamp["sources"].items():
            if checksum(f"{home}/{path}") != expected:
                return f"{path} has changed since"
        for path in stamp["libraries"]:
            if path.endswith(f"{LIBRARY}{stamp['suffix']}"):
                import_module(f"halfserve.{path.removesuffix(stamp['suffix']).replace('/', '.')}")
    except Exception as error:  # noqa: BLE001  (a stamp and a library that are not whole fail in every way)
        return f"it cannot be loaded ({type(error).__name__}: {error})"
    return ""
