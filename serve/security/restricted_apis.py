"""Groups of APIs that require a header with a value, as Triton's restricted protocols and APIs do."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import PermissionDeniedError
from halfserve.serve.protocol.rpc import Api
from halfserve.serve.security.security_options import RestrictedGroup

GRPC_PREFIX = "triton-grpc-protocol-"  # Triton's prefix of a gRPC header's name, before the key
Header = tuple[bytes, bytes]


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
        if name not in tuple(Api):
            raise ValueError(f"names {name!r:.40}, expected one of {', '.join(Api)}")
    return RestrictedGroup(apis=apis, header=f"{prefix}{key}".lower(), value=value)


class RestrictedApis:
    """The restrictions of gRPC and of HTTP.

    Attributes:
        grpc: header that each restricted API requires over gRPC.
        http: header that each restricted API requires over HTTP.
    """

    def __init__(self, grpc: Iterable[RestrictedGroup], http: Iterable[RestrictedGroup]) -> None:
        """Index the groups by API. An API is in at most one group of each kind; see `SecurityOptions.check`."""
        self.grpc, self.http = _by_api(grpc), _by_api(http)


def _by_api(groups: Iterable[RestrictedGroup]) -> dict[Api | None, RestrictedGroup]:
    return {Api(name): group for group in groups for name in group.apis}


def check_header(group: RestrictedGroup, headers: Iterable[Header]) -> None:
    """Check a call of a restricted API.

    Raises:
        PermissionDeniedError: the call lacks the header, or the header has another value.
    """
    name, expected = group.header.encode(), group.value.encode()
    # With several headers a proxy and this server might each check a different one.
    given = [value for key, value in headers if key == name]
    if len(given) != 1 or not hmac.compare_digest(given[0], expected):
        text = f"this API is restricted; send its value once in the header {group.header!r}"
        is_grpc = group.header.startswith(GRPC_PREFIX)
        raise PermissionDeniedError(text).like(
            TritonPhrase.RESTRICTED_PROTOCOL if is_grpc else TritonPhrase.RESTRICTED_API, header=group.header
        )
