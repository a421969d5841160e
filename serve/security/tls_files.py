"""The files of an encrypted server: read, and proved to fit each other before any client meets them."""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from serve.security.errors import SecurityError
from serve.security.options import TlsOptions
from serve.security.trial_handshake import end_of

CERTIFICATE, KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """What the files hold.

    Attributes:
        certificate: PEM, the server's own first.
        key: PEM.
        client_authorities: PEM; None where clients need no certificate.
        ends_s: when the server's certificate ends, in seconds since the epoch.
    """

    certificate: bytes
    key: bytes
    client_authorities: bytes | None
    ends_s: float

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have new handshakes show this certificate. It comes from one file, so that no change on disk falls in between."""
        with _file(self.certificate + b"\n" + self.key) as path:
            context.load_cert_chain(path, password=_refuse)


def read_tls_files(options: TlsOptions) -> TlsFiles:
    """Read the files.

    Raises:
        SecurityError: one is missing or is not what it should be, the key is another certificate's, or the certificate is not
            valid now.
    """
    certificate = _read("certificate", options.certificate, CERTIFICATE)
    key = _read("key", options.key, KEY)
    authorities = None
    if options.client_authorities is not None:
        authorities = _read("client authorities", options.client_authorities, CERTIFICATE)
        _check_authorities(authorities, options.client_authorities)
    files = TlsFiles(certificate=certificate, key=key, client_authorities=authorities, ends_s=0.0)
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        files.load_into(trial)
    except ssl.SSLError as error:
        raise SecurityError(_misfit(error, options)) from None
    except OSError as error:
        raise not_loaded(error, options) from None
    return replace(files, ends_s=end_of(trial, certificate.decode("utf-8", "replace"), str(options.certificate)))


def not_loaded(error: OSError, options: TlsOptions) -> SecurityError:
    """What to raise where the system refuses what loading takes: a file in memory, and to open it."""
    return SecurityError(f"TLS certificate {options.certificate} cannot be loaded: {error.strerror or error}")


def _read(what: str, path: Path, expected: bytes) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SecurityError(f"TLS {what} {path} cannot be read: {error.strerror}; expected a PEM file") from None
    if expected not in content:
        raise SecurityError(f"TLS {what} {path} is not what it should be; expected a PEM file with {expected.decode()!r} in it")
    if b"ENCRYPTED" in content:
        raise SecurityError(f"TLS {what} {path} asks for a pass phrase; expected a key without one")
    return content


def _check_authorities(pem: bytes, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem.decode("utf-8", "replace"))
    except ssl.SSLError as error:
        raise SecurityError(f"TLS client authorities {path} cannot be used: {error.reason}; expected certificates") from None


def _misfit(error: ssl.SSLError, options: TlsOptions) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"TLS key {options.key} is not that of certificate {options.certificate}; give the two that were made together"
    reason = error.reason or "not readable as PEM"
    return f"TLS certificate {options.certificate} and key {options.key} cannot be used: {reason}; expected two PEM files"


def _refuse() -> NoReturn:
    """Instead of OpenSSL's asking on the terminal."""
    raise ssl.SSLError(1, "the key asks for a pass phrase")


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[str]:
    """A path to the content: in memory where the system has such files, so that no copy of the key is left on a disk."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("tls"), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.TemporaryDirectory() as folder:  # which only this user can enter
        path = Path(folder) / "tls.pem"
        path.write_bytes(content)
        yield str(path)
