"""Repository index and status of the whole cluster, built from the members' reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.model import VersionState
from halfserve.serve.fleet.control.autoscaling import ModelLoad
from halfserve.serve.fleet.control.member_table import MemberRecord
from halfserve.serve.fleet.control.reports import ModelOrder
from halfserve.serve.fleet.member.shared_rpcs import worst

ModelIndex = pb.RepositoryIndexResponse.ModelIndex
ShallServe = Callable[[MemberRecord, str], bool]


def cluster_index(
    members: Sequence[MemberRecord], models: Mapping[str, ModelOrder], shall_serve: ShallServe, *, ready_only: bool
) -> pb.RepositoryIndexResponse:
    """List every version of every model, each in the worst state among the members that are assigned the model."""
    known = {*models, *(name for record in members for name in record.report.models)}
    found = [
        one
        for name in sorted(known)
        for one in _versions(name, models.get(name), [record for record in members if shall_serve(record, name)])
    ]
    return pb.RepositoryIndexResponse(models=[one for one in found if one.state == VersionState.READY or not ready_only])


def _versions(name: str, order: ModelOrder | None, members: Sequence[MemberRecord]) -> list[ModelIndex]:
    staying = [record for record in members if not record.is_leaving and (order or record.serves(name))]
    versions = sorted({one for record in staying for one in record.model(name).versions}, key=lambda one: (len(one), one))
    found = []
    for version in versions or [""]:
        state, reason = worst(_state(record, name, version, order) for record in staying)
        if not state:
            state, reason = VersionState.UNAVAILABLE, "no member serves it now" if order else "not loaded"
        found.append(ModelIndex(name=name, version=version, state=state, reason=reason))
    return found


def _state(record: MemberRecord, name: str, version: str, order: ModelOrder | None) -> tuple[str, str]:
    model = record.model(name)
    if order is None:  # a model that only an ensemble needs is served without an order
        return (VersionState.UNLOADING if model.generation else VersionState.READY), ""
    if model.is_served and (version in model.versions or not version):
        return VersionState.READY, ""
    if model.generation < order.generation:
        return VersionState.LOADING, f"{record.title}: it loads the model"
    return VersionState.UNAVAILABLE, f"{record.title}: {model.error or 'it has no such version now'}"


def cluster_status(
    members: Sequence[MemberRecord], models: Mapping[str, ModelOrder], shall_serve: ShallServe, now: float
) -> dict[str, Any]:
    """Members, machines and models with their loads, as plain JSON values."""
    machines: dict[str, list[str]] = {}
    for record in members:
        machines.setdefault(record.report.machine, []).append(record.id)
    known = sorted({*models, *(name for record in members for name in record.report.models)})
    return {
        "members": [_member(record, now) for record in members],
        "machines": [{"machine": machine, "members": ids} for machine, ids in machines.items()],
        "models": [_model(name, models.get(name), members, shall_serve) for name in known],
    }


def _member(record: MemberRecord, now: float) -> dict[str, Any]:
    load, report = record.meter.load, record.report
    return {
        "id": record.id,
        "machine": report.machine,
        "grpc_address": report.grpc_address,
        "http_address": report.http_address,
        "state": "SERVING" if record.takes_requests else "DRAINING",
        "models": sorted(record.served),
        "busy": load.busy,
        "queue_s": load.queue_s,
        "refused": load.refused,
        "memory_used": sum(model.size for model in report.models.values() if model.is_served),
        "memory_size": report.memory_size,
        "reported_s_ago": now - record.reported_at,
        "joined_s_ago": now - record.joined_at,
    }


def _model(name: str, order: ModelOrder | None, members: Sequence[MemberRecord], shall_serve: ShallServe) -> dict[str, Any]:
    load = sum((record.meter.model_load(name) for record in members), ModelLoad())
    versions = _versions(name, order, [record for record in members if shall_serve(record, name)])
    return {
        "name": name,
        "is_loaded": order is not None,
        "generation": order.generation if order else 0,
        "versions": [{"version": one.version, "state": one.state, "reason": one.reason} for one in versions],
        "members": [record.id for record in members if record.serves(name)],
        "size": max((record.model(name).size for record in members), default=0),
        "requests_s": load.requests_s,
        "compute": load.compute,
    }
