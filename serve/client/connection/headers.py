"""What goes beside a call: the caller's metadata and its token."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from serve.client.errors import InvalidRequest

HeaderValue = str | bytes
Headers = tuple[tuple[str, HeaderValue], ...]
Token = str | Callable[[], str]

_NAME = re.compile(r"[0-9a-z_.-]+")  # https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
_TEXT = re.compile(r"[\x20-\x7e]*")
_RESERVED = "grpc-"
_BINARY = "-bin"


def headers_of(metadata: Mapping[str, HeaderValue] | None) -> Headers:
    """GRPC metadata from a mapping; names are put into lower case.

    Raises:
        InvalidRequest: a name or a value is none that gRPC can send.
    """
    return tuple(_header(name.lower(), value) for name, value in (metadata or {}).items())


def bearer(token: Token) -> tuple[tuple[str, str], ...]:
    """The header that carries a token; a callable is asked for it at every call, so that it can be renewed.

    Raises:
        InvalidRequest: the token is empty or has characters that no token has.
    """
    text = token if isinstance(token, str) else token()
    # The text itself stays out of the error: errors end up in logs.
    if not text or not re.fullmatch(r"[\x21-\x7e]+", text):
        raise InvalidRequest(
            "the token must be printable ASCII without spaces, and not empty; is there a line end in its file?"
        )
    return (("authorization", f"Bearer {text}"),)


def _header(name: str, value: HeaderValue) -> tuple[str, HeaderValue]:
    if not _NAME.fullmatch(name) or name.startswith(_RESERVED):
        raise InvalidRequest(f"metadata {name!r}: expected a name of a-z, 0-9, '_', '-' and '.' that does not begin with grpc-")
    if name.endswith(_BINARY) != isinstance(value, bytes):
        raise InvalidRequest(f"metadata {name!r}: bytes need a name that ends in -bin, and text one that does not")
    if isinstance(value, bytes):
        return name, value
    if not isinstance(value, str) or not _TEXT.fullmatch(value):
        raise InvalidRequest(f"metadata {name!r}: expected printable ASCII text, or bytes under a name that ends in -bin")
    return name, value
