"""Commands and queries that concern all members: the targets that each command changes, and how answers are merged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.inference_core import ON_DEMAND

T = TypeVar("T")
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
MODEL = "model"  # kind of the target of loads and unloads
MODELS_TURN, SETTINGS_TURN = "models", "settings"
Target = tuple[str, str, Message]  # kind and name of what a command changes, such as a model, and the command for it alone


@dataclass(frozen=True, kw_only=True)
class Command:
    """A method that changes something at all members.

    Attributes:
        answer: class of its answers.
        targets: splits a request into the targets that it changes, to be kept for members that join later; empty for a mere
            query.
        undoes: path of the command whose targets (that of the request's `name`, or all) this one takes back; "" for none.
        timeout_s: time limit of another member's answer in seconds; None for no limit.
        turn: name of the lock under which members issue it; loads take long, so that they have one of their own.
    """

    answer: type[Message]
    targets: Callable[[Any], Iterable[Target]] = lambda _: ()
    undoes: str = ""
    timeout_s: float | None = 5.0
    turn: str = SETTINGS_TURN


def _model(request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest) -> list[Target]:
    return [(MODEL, request.model_name, request)]


def _settings(kind: str, request: Any) -> list[Target]:
    """Split a TraceSettingRequest or a LogSettingsRequest."""
    found: list[Target] = []
    for name, setting in request.settings.items():
        one = type(request)()
        one.CopyFrom(request)
        one.ClearField("settings")
        one.settings[name].CopyFrom(setting)
        found.append((kind, f"{name} {getattr(request, 'model_name', '')}", one))
    return found


LOAD, UNLOAD = f"/{SERVICE}/RepositoryModelLoad", f"/{SERVICE}/RepositoryModelUnload"
TRACE_SETTING, LOG_SETTINGS = f"/{SERVICE}/TraceSetting", f"/{SERVICE}/LogSettings"
SYSTEM_REGISTER, CUDA_REGISTER = f"/{SERVICE}/SystemSharedMemoryRegister", f"/{SERVICE}/CudaSharedMemoryRegister"
COMMANDS = {
    LOAD: Command(answer=pb.RepositoryModelLoadResponse, targets=_model, timeout_s=None, turn=MODELS_TURN),
    UNLOAD: Command(answer=pb.RepositoryModelUnloadResponse, targets=_model, timeout_s=None, turn=MODELS_TURN),
    TRACE_SETTING: Command(answer=pb.TraceSettingResponse, targets=partial(_settings, "trace")),
    LOG_SETTINGS: Command(answer=pb.LogSettingsResponse, targets=partial(_settings, "log")),
    SYSTEM_REGISTER: Command(
        answer=pb.SystemSharedMemoryRegisterResponse, targets=lambda request: [("system", request.name, request)]
    ),
    f"/{SERVICE}/SystemSharedMemoryUnregister": Command(answer=pb.SystemSharedMemoryUnregisterResponse, undoes=SYSTEM_REGISTER),
    CUDA_REGISTER: Command(
        answer=pb.CudaSharedMemoryRegisterResponse, targets=lambda request: [("cuda", request.name, request)]
    ),
    f"/{SERVICE}/CudaSharedMemoryUnregister": Command(answer=pb.CudaSharedMemoryUnregisterResponse, undoes=CUDA_REGISTER),
}
# Of `VersionState`, from best to worst: a version has the worst state among its members.
STATES = READY_STATE, LOADING, UNLOADING, UNAVAILABLE = "READY", "LOADING", "UNLOADING", "UNAVAILABLE"
RESTING = ON_DEMAND  # reason of a model that a member's requests load
Index = pb.RepositoryIndexResponse.ModelIndex
Versions = dict[tuple[str, str], Index]
METRICS = "/halfserve.Cluster/Metrics"  # asks the controller for the counters of all members
READ_COUNTERS = "/halfserve.Member/Figures"
STATISTICS, INDEX, READY = (f"/{SERVICE}/{name}" for name in ("ModelStatistics", "RepositoryIndex", "ModelReady"))


def worst(states: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Return the state of a version among its states at all members, each with a reason: the first one of the worst."""
    return max(states, key=lambda one: STATES.index(one[0]), default=("", ""))


def merge_index(
    own: pb.RepositoryIndexResponse, others: Mapping[str, pb.RepositoryIndexResponse], *, ready: bool
) -> pb.RepositoryIndexResponse:
    """List every version that the member knows, each in the worst state among all members. A member in which requests load the
    model does not count.

    Args:
        own: index of the member itself, with versions in all states.
        others: indexes of other members, by the name for messages.
        ready: return only ready versions.
    """
    merged: Versions = {(one.name, one.version): one for one in own.models}
    for title, other in others.items():
        found: Versions = {(one.name, one.version): one for one in other.models}
        resting = {one.name for one in other.models if one.reason == RESTING}
        for key in [key for key, mine in merged.items() if mine.reason == RESTING and key[0] not in resting]:
            del merged[key]
            merged |= {version: one for version, one in found.items() if version[0] == key[0]}
        for key, mine in merged.items():
            if key[0] in resting:
                continue
            theirs = found.get(key) or Index(state=UNAVAILABLE, reason="it has no such version now")
            there = f"{title}: {theirs.reason}" if theirs.reason else title
            mine.state, mine.reason = worst([(mine.state, mine.reason), (theirs.state, there)])
    listed = [merged[key] for key in sorted(merged, key=lambda key: (key[0], len(key[1]), key[1]))]
    return pb.RepositoryIndexResponse(models=[one for one in listed if one.state == READY_STATE or not ready])


async def finished(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> T:
    """Wait for work that is completed even if its caller is cancelled, because the client has disconnected.

    `tasks` holds the task meanwhile.
    """

    def end(task: asyncio.Task[T]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved: the caller may be gone

    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(end)
    return await asyncio.shield(task)
