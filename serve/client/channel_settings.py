"""Connection of a client to a server: address, TLS, metadata and the channel's options."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
from grpc.experimental import ChannelOptions

from halfserve.serve.client.errors import InvalidRequest, check_text

Balancing = Literal["pick_first", "round_robin"]
BALANCINGS = ("pick_first", "round_robin")
UNIX = "unix:"
CLUSTER = "cluster://"
PEM = b"-----BEGIN "
GRPC_ROOTS = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"  # environment variable with the CA file that gRPC reads itself
HeaderValue = str | bytes
Headers = tuple[tuple[str, HeaderValue], ...]
Token = str | Callable[[], str]
_NAME = re.compile(r"[0-9a-z_.-]+")  # https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
_TEXT = re.compile(r"[\x20-\x7e]*")
_RESERVED = "grpc-"
_BINARY = "-bin"
SERVICE = "inference.GRPCInferenceService"
CONNECTING_S = 5.0  # time limit of a connection attempt; long enough for a supervised server to restart
MAX_MESSAGE_BYTES = 2**31 - 1  # protobuf's own limit; grpc's default of 4 MiB is less than a batch of 32 images
Compression = Literal["gzip", "deflate"]
_COMPRESSIONS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


@dataclass(frozen=True)
class ServerAddress:
    """Target of a gRPC channel."""

    uri: str  # address in gRPC's notation
    shown: str  # address as given, for error texts
    is_local: bool  # whether the server is on this machine, so that nothing crosses a network
    # HOST:PORT of some members of a cluster, from which the others are learned; empty for a single server.
    members: tuple[str, ...] = ()


def parse_address(address: str | Sequence[str]) -> ServerAddress:
    """Return the server's address from HOST:PORT, "unix:/path", "cluster://HOST:PORT,..." or a sequence of IP:PORT.

    A host name may stand for several replicas (a headless service), whose addresses DNS gives. A sequence lists the
    replicas; gRPC takes only IP addresses there.

    Raises:
        InvalidRequest: an address has a scheme, or no host, or no port between 1 and 65535, or is not UTF-8, or is IPv6 without
            brackets; or names stand in a sequence.
    """
    for one in [address] if isinstance(address, str) else address:
        check_text(one, "the address")
    if isinstance(address, str):
        if address.startswith(UNIX):
            return ServerAddress(address, address, is_local=True)
        if address.startswith(CLUSTER):
            members = tuple(address.removeprefix(CLUSTER).split(","))
            hosts = [_split(member)[0] for member in members]
            return ServerAddress(address, address, is_local=all(map(_is_loopback, hosts)), members=members)
        host, _ = _split(address)
        return ServerAddress(address, address, is_local=_is_loopback(host))
    if not address:
        raise InvalidRequest("the addresses must be HOST:PORT, at least one of them, not an empty sequence")
    if len(address) == 1:
        return parse_address(address[0])
    parts = [_split(one) for one in address]
    resolved = [_as_ip(host, port, one) for (host, port), one in zip(parts, address, strict=True)]
    versions = {ip.version for ip, _ in resolved}
    if len(versions) > 1:
        raise InvalidRequest(f"the addresses must be all IPv4 or all IPv6, not both: {', '.join(address)}")
    if versions == {4}:
        uri = "ipv4:" + ",".join(f"{ip}:{port}" for ip, port in resolved)
    else:
        uri = "ipv6:" + ",".join(f"[{ip}]:{port}" for ip, port in resolved)
    return ServerAddress(uri, ", ".join(address), is_local=all(ip.is_loopback for ip, _ in resolved))


def check_encrypted(server: ServerAddress, tls: Tls | None) -> None:
    """Refuse to send a token where others could read it.
    Raises InvalidRequest: the server is on another machine, and the connection is not encrypted.
    """
    if tls is None and not server.is_local:
        raise InvalidRequest(
            f"a token would go unencrypted to {server.shown}, for all on the way to read; encrypt with tls= (--tls)"
        )


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not (port.isdecimal() and port.isascii()) or not 0 < int(port) < 2**16:
        raise InvalidRequest(f"the address must be HOST:PORT, such as 127.0.0.1:8001, not {address!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise InvalidRequest(f"an IPv6 address needs brackets, such as [::1]:8001, not {address!r}")
    return host, port


def _as_ip(host: str, port: str, address: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    name = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        return ipaddress.ip_address(name), port
    except ValueError:
        raise InvalidRequest(
            f"{address!r} among several addresses must be IP:PORT; or give one name that DNS resolves to all of them"
        ) from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Certificates for an encrypted connection.

    Attributes:
        authorities: PEM file with the CA certificates to verify the server's with; None for the system's.
        certificate: PEM file with this client's certificate, if the server requests one (mTLS).
        key: PEM file with the certificate's private key.
        server_name: the name in the server's certificate, if it differs from the address.

    Raises:
        InvalidRequest: a file is missing or not a PEM file, or only one of certificate and key is given.
    """

    authorities: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            there, missing = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise InvalidRequest(f"TLS has a client {there} without its {missing}; give both files")
        for what in ("authorities", "certificate", "key"):
            _read(what, getattr(self, what))

    def credentials(self) -> Any:
        """grpc.ChannelCredentials; the files are read now."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read("authorities", self.authorities) or _trusted_by_system(),
            private_key=_read("key", self.key),
            certificate_chain=_read("certificate", self.certificate),
        )


def _trusted_by_system() -> bytes | None:
    """Return the system's CA certificates, which gRPC for Python does not read; None to use the list that gRPC ships."""
    if os.environ.get(GRPC_ROOTS):
        return None
    import ssl  # noqa: PLC0415  (few clients encrypt)

    file = ssl.get_default_verify_paths().cafile  # SSL_CERT_FILE, if that is set
    if file is not None:
        with contextlib.suppress(OSError):
            return Path(file).read_bytes() or None
    found = ssl.create_default_context().get_ca_certs(binary_form=True)
    return "".join(map(ssl.DER_cert_to_PEM_cert, found)).encode() or None


def _read(what: str, path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"TLS {what}: {path} cannot be read: {error.strerror}; expected a PEM file") from None
    if PEM not in content:
        raise InvalidRequest(f"TLS {what}: {path} is no PEM file; expected a line that begins with {PEM.decode()}")
    return content


def headers_of(metadata: Mapping[str, HeaderValue] | None) -> Headers:
    """Metadata as gRPC takes it, from a mapping; names are put into lower case.
    Raises InvalidRequest: gRPC cannot send a name or a value.
    """
    return tuple(_header(name.lower(), value) for name, value in (metadata or {}).items())


def bearer(token: Token) -> tuple[tuple[str, str], ...]:
    """Return the header that carries a token; a callable is called for each RPC, so that the token can be renewed.
    Raises InvalidRequest: the token is empty or has characters that are not allowed.
    """
    text = token if isinstance(token, str) else token()
    # The token stays out of the error's text, because errors end up in logs.
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


def method_path(method: str) -> str:
    return f"/{SERVICE}/{method}"


def compression_named(name: str | None) -> Any:
    """Return the grpc.Compression of a name; None for None. Raises InvalidRequest: gRPC has no such compression."""
    if name is None:
        return None
    if name not in _COMPRESSIONS:
        raise InvalidRequest(f"compression must be one of {', '.join(_COMPRESSIONS)} or None, not {name!r}")
    return _COMPRESSIONS[name]


def channel_options(
    *, balancing: Balancing = "pick_first", keepalive_s: float | None = None, connecting_s: float = CONNECTING_S
) -> list[tuple[str, int | str]]:
    """Options for grpc.insecure_channel and grpc.aio.insecure_channel; `keepalive_s` is as in `ClientConnection`."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # Without it, clients of one process share connections and their back-off after a failed attempt.
        ("grpc.use_local_subchannel_pool", 1),
        # Reconnect to a restarted server within a second instead of two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.min_reconnect_backoff_ms", round(connecting_s * 1000)),
        ("grpc.service_config", json.dumps({"loadBalancingConfig": [{balancing: {}}]})),
    ]
    if keepalive_s is not None:
        milliseconds = max(1, round(keepalive_s * 1000))
        options += [
            ("grpc.keepalive_time_ms", milliseconds),
            ("grpc.keepalive_timeout_ms", milliseconds),
            # gRPC's own limit of a ping is a minute, and it pings once a minute after two pings without data.
            ("grpc.http2.ping_timeout_ms", milliseconds),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    return options


@dataclass(frozen=True, kw_only=True)
class ChannelSettings:
    """The arguments of a channel.

    Attributes:
        target: the server or servers.
        tls: certificates; None for an unencrypted connection.
        balancing: how calls are spread over the target's addresses.
        compression: compression of messages, unless a call sets its own; None for none.
        keepalive_s, connecting_s: see `channel_options`.
    """

    target: ServerAddress
    tls: Tls | None
    balancing: Balancing
    compression: str | None
    keepalive_s: float | None
    connecting_s: float = CONNECTING_S

    def open(self, library: Any) -> Any:
        """Return a channel of `library`, which is grpc or grpc.aio; it connects at the first call."""
        options = channel_options(balancing=self.balancing, keepalive_s=self.keepalive_s, connecting_s=self.connecting_s)
        # With grpcio 1.82.3, 6 % of the clients whose server was gone waited forever in a failed stream, because the calls of a
        # channel share a completion queue by default. grpc.aio has no such queue.
        options.append((ChannelOptions.SingleThreadedUnaryStream, 1))
        compression = compression_named(self.compression)
        if self.tls is None:
            return library.insecure_channel(self.target.uri, options=options, compression=compression)
        if self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
            options.append(("grpc.default_authority", self.tls.server_name))
        return library.secure_channel(self.target.uri, self.tls.credentials(), options=options, compression=compression)
