"""Groups of methods and paths that require a header with a value, as Triton's restricted protocols and APIs do."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from halfserve.serve.engine.errors import PermissionDeniedError
from halfserve.serve.security.roles import SERVICE
from halfserve.serve.security.security_options import RestrictedGroup

GRPC_PREFIX = "triton-grpc-protocol-"  # Triton's prefix of a gRPC header's name, before the key
MODEL = r"/v2/models/(?!stats\Z)[^/]+(/versions/[^/]+)?"
HEALTH = "grpc.health.v1.Health"
MEMORY_METHODS = [f"{kind}SharedMemory{what}" for kind in ("System", "Cuda") for what in ("Status", "Register", "Unregister")]
Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Api:
    """Methods and HTTP paths that are restricted together."""

    methods: frozenset[str]
    paths: re.Pattern[str]


def _api(methods: Iterable[str], *paths: str) -> Api:
    named = (method if "/" in method else f"{SERVICE}/{method}" for method in methods)
    return Api(frozenset(f"/{method}" for method in named), re.compile("|".join(paths), re.DOTALL))


# APIs by Triton's names. Text endpoints belong to inference, and the page shows statistics.
APIS: Mapping[str, Api] = {
    "health": _api(
        ("ServerLive", "ServerReady", "ModelReady", f"{HEALTH}/Check", f"{HEALTH}/Watch"),
        "/v2/health/(live|ready)",
        f"{MODEL}/ready",
    ),
    "metadata": _api(("ServerMetadata", "ModelMetadata"), "/v2/?", MODEL, "/v1/models(/[^/]+)?|/info"),
    "inference": _api(
        ("ModelInfer", "ModelStreamInfer"),
        f"{MODEL}/(infer|generate|generate_stream|classify)",
        "/v1/(embeddings|rerank)|/v2/rerank|/(embed|rerank|predict|tokenize)",
    ),
    "shared-memory": _api(MEMORY_METHODS, "/v2/(system|cuda)sharedmemory/.*"),
    "model-config": _api(("ModelConfig",), f"{MODEL}/config"),
    "model-repository": _api(("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"), "/v2/repository/.*"),
    "statistics": _api(("ModelStatistics",), f"{MODEL}/stats", "/v2/models/stats", "/ui/.*"),
    "trace": _api(("TraceSetting",), "/v2(/models/[^/]+)?/trace/setting"),
    "logging": _api(("LogSettings",), "/v2/logging"),
}


def restricted_group(text: str, prefix: str = "") -> RestrictedGroup:
    """Parse "API,API:KEY=VALUE"; `prefix` comes before the key in the header's name.

    Raises:
        ValueError: the text has another form, or names an unknown API; the message does not repeat the value.
    """
    names, colon, condition = text.partition(":")
    key, equals, value = condition.partition("=")
    if not (colon and equals and key and value and key.isascii() and value.isascii()):
        raise ValueError("has another form than APIS:KEY=VALUE, such as 'inference,metadata:infer-key=SECRET'")
    apis = tuple(name.strip() for name in names.split(","))
    for name in apis:
        if name not in APIS:
            raise ValueError(f"names {name!r:.40}, expected one of {', '.join(APIS)}")
    return RestrictedGroup(apis=apis, header=f"{prefix}{key}".lower(), value=value)


class RestrictedApis:
    """The restrictions of gRPC and of HTTP."""

    def __init__(self, grpc: Iterable[RestrictedGroup], http: Iterable[RestrictedGroup]) -> None:
        """Index the groups by method and by path. An API is in at most one group of each kind; see `SecurityOptions.check`."""
        self._methods = {method: group for group in grpc for name in group.apis for method in APIS[name].methods}
        self._paths = [(APIS[name].paths, group) for group in http for name in group.apis]

    def check_method(self, path: str, headers: Iterable[Header]) -> None:
        """Check a call of an RPC.

        Raises:
            PermissionDeniedError: the call lacks the header, or the header has another value.
        """
        group = self._methods.get(path)
        if group is not None:
            _check(group, headers)

    def check_path(self, path: str, headers: Iterable[Header]) -> None:
        """Check an HTTP request, as `check_method` does."""
        for paths, group in self._paths:
            if paths.fullmatch(path):
                _check(group, headers)


def _check(group: RestrictedGroup, headers: Iterable[Header]) -> None:
    name, expected = group.header.encode(), group.value.encode()
    # With several headers a proxy and this server might each check a different one.
    given = [value for key, value in headers if key == name]
    if len(given) != 1 or not hmac.compare_digest(given[0], expected):
        raise PermissionDeniedError(f"this API is restricted; send its value once in the header {group.header!r}")
