"""A server of two tenants, and what each of them sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.model import Model
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.protocol.service import INFER_PATH, SERVICE
from halfserve.serve.security.tokens import new_token
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import RunningServer
from tests.serve.security.guarded import bearer, call, write_tokens

HEALTH = "/grpc.health.v1.Health/Check"
OURS, THEIRS, NOBODYS = "digits", "secret", "absent"  # the last two have as many letters


def models() -> list[Model]:
    return [held_model(HeldBackend(), name) for name in (OURS, "digits_v2", THEIRS)]


def tenants_in(path: Path) -> dict[str, str]:
    """Tokens of a tenant, of an administrator of its models, of who is allowed everything, and of who reads metrics."""
    made = {
        "tenant": new_token("tenant", [Role.INFER], models=["digits*"]),
        "manager": new_token("manager", [Role.ADMIN], models=["digits*"]),
        "other": new_token("other", [Role.INFER], models=[THEIRS]),
        "root": new_token("root", [Role.ADMIN]),
        "scraper": new_token("scraper", [Role.METRICS], models=["digits*"]),
    }
    write_tokens(path, *made.values())
    return {name: token for name, (token, _) in made.items()}


@dataclass(frozen=True)
class Tenants:
    """The server, a channel to it, and the tokens by name."""

    server: RunningServer
    channel: grpc.Channel
    tokens: dict[str, str]
    path: Path

    def ask(self, who: str | None, method: str, message: bytes = b"") -> bytes:
        return call(self.channel, method, message, None if who is None else bearer(self.tokens[who]))

    def outcome(self, who: str | None, method: str, message: bytes) -> tuple[str, str, bytes]:
        """Status, text and answer, whichever there are."""
        try:
            return "OK", "", self.ask(who, method, message)
        except grpc.RpcError as error:
            return error.code().name, error.details(), b""

    def index(self, who: str) -> list[str]:
        return [entry.name for entry in pb.RepositoryIndexResponse.FromString(self.ask(who, "RepositoryIndex")).models]

    def statistics(self, who: str) -> list[str]:
        answer = pb.ModelStatisticsResponse.FromString(self.ask(who, "ModelStatistics"))
        return [entry.name for entry in answer.model_stats]


def about(model: str) -> list[tuple[str, bytes]]:
    """Every question that names a model, some of them wrong in another way as well."""
    infer = pb.ModelInferRequest(model_name=model, raw_input_contents=[b"\0\0\0\0"])
    infer.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    wrong = pb.ModelInferRequest(model_name=model, raw_input_contents=[b"\0"])
    wrong.inputs.add(name="no_such_input", datatype="FP16", shape=[3])
    asked: list[tuple[str, bytes]] = [(INFER_PATH, infer.SerializeToString()), (INFER_PATH, wrong.SerializeToString())]
    asked.append((INFER_PATH, pb.ModelInferRequest(model_name="digits").SerializeToString() + infer.SerializeToString()))
    for version in ("", "1", "7", "x"):
        infer.model_version = version
        asked.append((INFER_PATH, infer.SerializeToString()))
        for name in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"):
            request = getattr(pb, f"{name}Request")(name=model, version=version)
            asked.append((f"/{SERVICE}/{name}", request.SerializeToString()))
    return asked


def changes(model: str) -> list[tuple[str, bytes]]:
    """What only an administrator may ask."""
    traced = pb.TraceSettingRequest(model_name=model)
    change = pb.TraceSettingRequest(model_name=model)
    change.settings["trace_rate"].value.append("7")
    return [
        (f"/{SERVICE}/TraceSetting", traced.SerializeToString()),
        (f"/{SERVICE}/TraceSetting", change.SerializeToString()),
        (f"/{SERVICE}/RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=model).SerializeToString()),
        (f"/{SERVICE}/RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model).SerializeToString()),
    ]


def health(service: str) -> bytes:
    """A HealthCheckRequest; its one field is a text."""
    return b"\n" + bytes([len(service)]) + service.encode() if service else b""
