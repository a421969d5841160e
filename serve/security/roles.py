"""Authorization: what each method and route requires of its callers, and the models that a token may be used for.

METHODS lists the RPCs; one that is missing requires the highest role. A REST route cannot be made without an `Access`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from halfserve.serve.security.security_options import SecurityError

SERVICE = "inference.GRPCInferenceService"
MAX_PATTERN = 255  # the length of the longest model name


class Role(StrEnum):
    """The right to a group of calls, which a token carries.

    INFER: send inference requests, and read metadata. METRICS: read the metrics. SHARED_MEMORY: register memory of the server's
    machine, and infer from it. ADMIN: all of these, and change what is served, logged and traced.
    """

    INFER = "infer"
    METRICS = "metrics"
    SHARED_MEMORY = "shared-memory"
    ADMIN = "admin"


class Api(StrEnum):
    """Groups of methods and routes that a header can be required for, by Triton's names."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class Access:
    """Requirements of a method or a route on its callers.

    Attributes:
        role: role that the caller's token must carry; None admits callers without a token, and does not limit their rate.
        api: group whose restriction applies; None if no restriction can.
        is_admin: whether it changes the server, so that a server with an admin port serves it on that port alone.
    """

    role: Role | None
    api: Api | None
    is_admin: bool = False


HEALTH = Access(None, Api.HEALTH)
METADATA = Access(Role.INFER, Api.METADATA)
INFERENCE = Access(Role.INFER, Api.INFERENCE)
MODEL_READY = Access(Role.INFER, Api.HEALTH)
MODEL_CONFIG = Access(Role.INFER, Api.MODEL_CONFIG)
STATISTICS = Access(Role.INFER, Api.STATISTICS)
REPOSITORY_INDEX = Access(Role.INFER, Api.MODEL_REPOSITORY)
REPOSITORY_CHANGE = Access(Role.ADMIN, Api.MODEL_REPOSITORY, is_admin=True)
SHARED_MEMORY = Access(Role.SHARED_MEMORY, Api.SHARED_MEMORY)
TRACE = Access(Role.ADMIN, Api.TRACE, is_admin=True)
LOGGING = Access(Role.ADMIN, Api.LOGGING, is_admin=True)
METRICS = Access(Role.METRICS, None)
DESCRIPTION = Access(Role.INFER, None)  # what the server offers: the page, the OpenAPI document, reflection
UNKNOWN_ROUTE = DESCRIPTION  # a path without a route has no answer but 404, which says where the list is
UNKNOWN_METHOD = Access(Role.ADMIN, None)
METHODS: dict[str, Access] = {
    f"/{SERVICE}/ServerLive": HEALTH,
    f"/{SERVICE}/ServerReady": HEALTH,
    "/grpc.health.v1.Health/Check": HEALTH,
    "/grpc.health.v1.Health/Watch": HEALTH,
    f"/{SERVICE}/ModelReady": MODEL_READY,
    f"/{SERVICE}/ServerMetadata": METADATA,
    f"/{SERVICE}/ModelMetadata": METADATA,
    f"/{SERVICE}/ModelInfer": INFERENCE,
    f"/{SERVICE}/ModelStreamInfer": INFERENCE,
    f"/{SERVICE}/ModelConfig": MODEL_CONFIG,
    f"/{SERVICE}/ModelStatistics": STATISTICS,
    f"/{SERVICE}/RepositoryIndex": REPOSITORY_INDEX,
    f"/{SERVICE}/RepositoryModelLoad": REPOSITORY_CHANGE,
    f"/{SERVICE}/RepositoryModelUnload": REPOSITORY_CHANGE,
    **{
        f"/{SERVICE}/{kind}SharedMemory{what}": SHARED_MEMORY
        for kind in ("System", "Cuda")
        for what in ("Status", "Register", "Unregister")
    },
    f"/{SERVICE}/TraceSetting": TRACE,
    f"/{SERVICE}/LogSettings": LOGGING,
    "/halfserve.Cluster/Watch": DESCRIPTION,
    **{f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": DESCRIPTION for version in ("v1", "v1alpha")},
}


@dataclass(frozen=True)
class ModelRights:
    """A set of models, by patterns of their names."""

    patterns: tuple[str, ...]  # names, or case-sensitive shell patterns with *, ? and [...]; the empty tuple matches no model

    def allow(self, name: str) -> bool:
        return name in self.patterns or any(fnmatchcase(name, pattern) for pattern in self.patterns)


NO_MODELS = ModelRights(())


def model_rights(patterns: list[str]) -> ModelRights | None:
    """Return the rights that patterns grant; None, which stands for all models, without any pattern.

    Raises:
        SecurityError: a pattern cannot stand in the token file.
    """
    for text in patterns:
        if not (text.isprintable() and 0 < len(text) <= MAX_PATTERN and not any(map(str.isspace, text))):
            raise SecurityError(
                f"model {text[:40]!r} is neither a name nor a pattern; expected up to {MAX_PATTERN} characters without "
                "spaces, such as 'digits*' ('?' stands for any one character, a space too)"
            )
    return ModelRights(tuple(sorted(set(patterns)))) if patterns else None
