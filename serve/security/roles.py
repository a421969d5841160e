"""Authorization: the role that each method and path requires, and the models that a token may be used for.

A method or path that is not listed requires the highest role.
"""

from __future__ import annotations

import re
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


OPEN_METHODS = frozenset(
    {
        f"/{SERVICE}/ServerLive",
        f"/{SERVICE}/ServerReady",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    }
)
ADMIN_METHODS = frozenset(
    f"/{SERVICE}/{name}" for name in ("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings")
)
INFER_METHODS = (
    "ModelInfer",
    "ModelStreamInfer",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
)
ROLES: dict[str, Role] = {
    **dict.fromkeys(ADMIN_METHODS, Role.ADMIN),
    **{f"/{SERVICE}/{name}": Role.INFER for name in INFER_METHODS},
    **{
        f"/{SERVICE}/{kind}SharedMemory{what}": Role.SHARED_MEMORY
        for kind in ("System", "Cuda")
        for what in ("Status", "Register", "Unregister")
    },
    "/halfserve.Cluster/Watch": Role.INFER,
    **{f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": Role.INFER for version in ("v1", "v1alpha")},
}
OPEN_PATHS = re.compile("/v2/health/(live|ready)")
ADMIN_PATHS = re.compile("/v2/repository/models/.*|/v2/logging|/v2(/models/.*)?/trace/setting")
# The first match decides.
PATHS: tuple[tuple[re.Pattern[str], Role], ...] = (
    (ADMIN_PATHS, Role.ADMIN),
    (re.compile("/metrics"), Role.METRICS),
    (re.compile("/v2/(system|cuda)sharedmemory/.*"), Role.SHARED_MEMORY),
    (re.compile("/v2/?|/v2/models/.*|/v2/repository/index"), Role.INFER),
    # Text endpoints.
    (re.compile("/v1/(models(/.*)?|embeddings|rerank)|/v2/rerank|/(embed|rerank|predict|info|tokenize)"), Role.INFER),
    (re.compile(r"/|/ui/.*|/openapi\.json"), Role.INFER),
)


def method_role(path: str) -> Role | None:
    """Return the role that an RPC requires, by its path; None if it is open to all."""
    return None if path in OPEN_METHODS else ROLES.get(path, Role.ADMIN)


def path_role(path: str) -> Role | None:
    """Return the role that an HTTP path requires; None if it is open to all."""
    if OPEN_PATHS.fullmatch(path):
        return None
    return next((role for pattern, role in PATHS if pattern.fullmatch(path)), Role.ADMIN)


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
