"""Repository index and status of the whole cluster, built from the members' reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.fleet.control.autoscaling import ModelLoad
from halfserve.serve.fleet.control.member_table import MemberRecord
from halfserve.serve.fleet.member.fleet_commands import LOADING, READY_STATE, RESTING, UNAVAILABLE, UNLOADING, worst

ModelIndex = pb.RepositoryIndexResponse.ModelIndex


def cluster_index(members: Sequence[MemberRecord], *, ready_only: bool) -> pb.RepositoryIndexResponse:
    """List every version of every model, each in the worst state among the members that shall serve the model."""
    found = [one for name in _names(members) for one in _versions(name, members)]
    return pb.RepositoryIndexResponse(models=[one for one in found if one.state == READY_STATE or not ready_only])


def _names(members: Iterable[MemberRecord]) -> list[str]:
    return sorted({name for record in members for name in record.report.models})


def _versions(name: str, members: Sequence[MemberRecord]) -> list[ModelIndex]:
    servers = [one for one in members if one.model(name).is_wanted or one.model(name).is_served]
    staying = [one for one in servers if not one.is_leaving]
    versions = sorted({one for record in staying for one in record.model(name).versions}, key=lambda one: (len(one), one))
    resting = [one for one in staying if one.model(name).is_served and not one.model(name).versions]  # requests load it there
    if resting and len(resting) == len(staying):
        return [ModelIndex(name=name, state=UNAVAILABLE, reason=RESTING)]
    staying = [one for one in staying if one not in resting]
    found = []
    for version in versions or [""]:
        state, reason = worst(_state(record, name, version) for record in staying)
        if not state:
            state, reason = UNAVAILABLE, "no member serves it now" if servers else "not loaded"
        found.append(ModelIndex(name=name, version=version, state=state, reason=reason))
    return found


def _state(record: MemberRecord, name: str, version: str) -> tuple[str, str]:
    model = record.model(name)
    if model.is_served and (version in model.versions or not version):
        return (READY_STATE, "") if model.is_wanted or not model.is_changing else (UNLOADING, "")
    if model.is_changing:
        return LOADING, f"{record.title}: it loads the model"
    return UNAVAILABLE, f"{record.title}: {model.error or 'it has no such version now'}"


def cluster_status(members: Sequence[MemberRecord], now: float) -> dict[str, Any]:
    """Members, machines and models with their loads, as plain JSON values."""
    machines: dict[str, list[str]] = {}
    for record in members:
        machines.setdefault(record.report.machine, []).append(record.id)
    return {
        "members": [_member(record, now) for record in members],
        "machines": [{"machine": machine, "members": ids} for machine, ids in machines.items()],
        "models": [_model(name, members) for name in _names(members)],
    }


def _member(record: MemberRecord, now: float) -> dict[str, Any]:
    load, report = record.meter.load, record.report
    return {
        "id": record.id,
        "group": report.group,
        "machine": report.machine,
        "grpc_address": report.grpc_address,
        "http_address": report.http_address,
        "state": "SERVING" if record.takes_requests else "DRAINING",
        "models": sorted(record.served),
        "busy": load.busy,
        "queue_s": load.queue_s,
        "refused": load.refused,
        "reported_s_ago": now - record.reported_at,
        "joined_s_ago": now - record.joined_at,
    }


def _model(name: str, members: Sequence[MemberRecord]) -> dict[str, Any]:
    load = sum((record.meter.model_load(name) for record in members), ModelLoad())
    return {
        "name": name,
        "is_loaded": any(record.model(name).is_wanted for record in members),
        "versions": [{"version": one.version, "state": one.state, "reason": one.reason} for one in _versions(name, members)],
        "members": [record.id for record in members if name in record.served],
        "requests_s": load.requests_s,
        "compute": load.compute,
    }
