"""Which role each method and each path takes.

What is not listed takes the highest: a new method is closed until it is listed.
"""

from __future__ import annotations

import re
from enum import StrEnum

SERVICE = "inference.GRPCInferenceService"


class Role(StrEnum):
    """What the holder of a token may do.

    INFER: ask models, and look at what they are. METRICS: read the metrics. SHARED_MEMORY: register memory of the server's
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
ROLES: dict[str, Role] = {
    **dict.fromkeys(ADMIN_METHODS, Role.ADMIN),
    **{
        f"/{SERVICE}/{name}": Role.INFER
        for name in (
            "ModelInfer",
            "ModelStreamInfer",
            "ModelReady",
            "ServerMetadata",
            "ModelMetadata",
            "ModelConfig",
            "ModelStatistics",
            "RepositoryIndex",
        )
    },
    **{
        f"/{SERVICE}/{kind}SharedMemory{what}": Role.SHARED_MEMORY
        for kind in ("System", "Cuda")
        for what in ("Status", "Register", "Unregister")
    },
    **{f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": Role.INFER for version in ("v1", "v1alpha")},
}
OPEN_PATHS = re.compile("/v2/health/(live|ready)")
ADMIN_PATHS = re.compile("/v2/repository/models/.*|/v2/logging|/v2(/models/.*)?/trace/setting")
# In this order: the first that fits holds.
PATHS: tuple[tuple[re.Pattern[str], Role], ...] = (
    (ADMIN_PATHS, Role.ADMIN),
    (re.compile("/metrics"), Role.METRICS),
    (re.compile("/v2/(system|cuda)sharedmemory/.*"), Role.SHARED_MEMORY),
    (re.compile("/v2/?|/v2/models/.*|/v2/repository/index"), Role.INFER),
    (re.compile(r"/|/ui/.*|/openapi\.json"), Role.INFER),
)


def method_role(path: str) -> Role | None:
    """The role that an RPC takes, by its path; None where it is open to all."""
    return None if path in OPEN_METHODS else ROLES.get(path, Role.ADMIN)


def path_role(path: str) -> Role | None:
    """The role that an HTTP path takes; None where it is open to all."""
    if OPEN_PATHS.fullmatch(path):
        return None
    return next((role for pattern, role in PATHS if pattern.fullmatch(path)), Role.ADMIN)
