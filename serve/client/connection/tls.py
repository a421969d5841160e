"""Certificates: whom this client trusts, and who it is."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from serve.client.errors import InvalidRequest

PEM = b"-----BEGIN "
GRPC_ROOTS = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"  # the file that gRPC reads itself


@dataclass(frozen=True, kw_only=True)
class Tls:
    """An encrypted connection.

    Attributes:
        authorities: PEM file with the certificates that may have signed the server's; None for those that the system trusts.
        certificate: PEM file with this client's certificate, where the server asks for one (mTLS).
        key: PEM file with the certificate's private key.
        server_name: the name in the server's certificate, where it differs from the address.

    Raises:
        InvalidRequest: a file is missing or no PEM file, or one of certificate and key stands without the other.
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
    """The system's authorities, which gRPC for Python knows nothing of; None where it is to use the list that it brings."""
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
