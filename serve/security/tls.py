"""TLS whose certificate may change while the server runs: open connections stay, new ones get the new certificate."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from halfserve.serve.security.file_reload import DAY_S, Reloadable, Reminder, ends_in
from halfserve.serve.security.security_options import SecurityError, TlsOptions

logger = logging.getLogger(__name__)

SOON_S = 14 * DAY_S
CERTIFICATE, KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"
END = "-----END CERTIFICATE-----"
REASONS = {9: "is not valid yet", 10: "has expired"}  # OpenSSL's X509_V_ERR numbers


class ServerTls:
    """The TLS contexts of one server, for all of its ports."""

    def __init__(self, options: TlsOptions) -> None:
        """Read the files, and try them in a handshake.

        Raises:
            SecurityError: the files cannot be used.
        """
        self._options = options
        self._contexts: dict[str, ssl.SSLContext] = {}  # contexts that ports listen with, by ALPN protocol
        self._latest: dict[str, ssl.SSLContext] = {}  # contexts that new handshakes use
        self._next: dict[str, ssl.SSLContext] = {}  # contexts made from the files of the last read
        kept = "new connections still get the previous certificate"
        self._files = Reloadable(self._read, kept, options.files)
        self._reminder = Reminder()
        self.look_at_clock()

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self._options.client_authorities is not None

    def context(self, protocol: str) -> ssl.SSLContext:
        """Return the context to listen with: TLS 1.2 or newer, and this one ALPN protocol, such as "h2"."""
        if protocol not in self._contexts:
            context = self._make(protocol, self._files.value)
            context.sni_callback = partial(self._use_latest, protocol)
            self._contexts[protocol] = self._latest[protocol] = context
        return self._contexts[protocol]

    def grpc_credentials(self) -> Any:
        """Return credentials for grpcio's server, which fetches the latest certificate at every handshake."""
        import grpc  # noqa: PLC0415  (the fast transport does without it)

        shown = self._files.value

        def certificates(files: ServerTlsFiles) -> Any:
            return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.client_authorities)

        def fetch() -> Any:
            nonlocal shown
            if shown is self._files.value:
                return None
            shown = self._files.value
            return certificates(shown)

        return grpc.dynamic_ssl_server_credentials(certificates(shown), fetch, self.asks_clients)

    @property
    def is_stale(self) -> bool:
        """Whether the files could not be used when they were read last."""
        return self._files.is_stale

    def reload(self, *, again: bool = False) -> bool:
        """Read the files again; see `Reloadable.reload`."""
        if not self._files.reload(again=again):
            return False
        for protocol, before in self._latest.items():
            self._latest[protocol] = self._next[protocol]
            _warn_of_removed_authorities(before, self._latest[protocol])
        logger.info("TLS certificate %s was read again", self._options.certificate)
        self.look_at_clock()
        return True

    def look_at_clock(self) -> None:
        """Warn of a certificate that expires soon."""
        now_s, ends_s = time.time(), self._files.value.ends_s
        is_soon = ends_s - now_s < SOON_S
        self._reminder.say(f"TLS certificate {self._options.certificate} {ends_in(ends_s, now_s)}" if is_soon else "")

    def _read(self) -> ServerTlsFiles:
        files = read_tls_files(self._options)
        # Contexts are made before the files are accepted: a failure leaves the old ones in use on all ports.
        self._next = {protocol: self._make(protocol, files) for protocol in self._latest}
        return files

    def _make(self, protocol: str, files: ServerTlsFiles) -> ssl.SSLContext:
        """Make a new context: OpenSSL keeps one certificate per kind of key, and a used context might present an old one."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([protocol])
        try:
            files.load_into(context)
        except OSError as error:
            raise _not_loaded(error, self._options) from None
        if files.client_authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=files.client_authorities.decode("utf-8", "replace"))
        return context

    def _use_latest(self, protocol: str, shown: Any, name: str | None, context: ssl.SSLContext) -> None:  # noqa: ARG002  (ssl's)
        """Switch a handshake to the latest context; ssl calls this at its beginning, also if the client names no host."""
        shown.context = self._latest[protocol]


def _warn_of_removed_authorities(before: ssl.SSLContext, after: ssl.SSLContext) -> None:
    """Warn if an authority was removed: a resumed session presents no certificate, so that its clients can still return."""
    if set(before.get_ca_certs(binary_form=True)) - set(after.get_ca_certs(binary_form=True)):
        logger.warning(
            "a client authority was removed from its file; its clients that connected before may resume sessions until the "
            "server is restarted"
        )


@dataclass(frozen=True, kw_only=True)
class ServerTlsFiles:
    """The content of the TLS files."""

    certificate: bytes  # PEM text, the server's own certificate first
    key: bytes  # PEM text of the private key
    client_authorities: bytes | None  # PEM text; None if clients need no certificate
    ends_s: float  # expiry of the server's certificate, in seconds since the epoch

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the certificate and key into a context. Both are in one file, so that they cannot change in between."""
        with _temporary_file(self.certificate + b"\n" + self.key) as path:
            context.load_cert_chain(path, password=_refuse_pass_phrase)


def read_tls_files(options: TlsOptions) -> ServerTlsFiles:
    """Read the files, and check that they fit together.

    Raises:
        SecurityError: a file is missing or no PEM file of its kind, the key belongs to another certificate, or the certificate
            is not valid now.
    """
    certificate = _read_pem("certificate", options.certificate, CERTIFICATE)
    key = _read_pem("key", options.key, KEY)
    files = ServerTlsFiles(
        certificate=certificate,
        key=key,
        client_authorities=_read_authorities("client authorities", options.client_authorities),
        ends_s=0.0,
    )
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        files.load_into(trial)
    except ssl.SSLError as error:
        raise SecurityError(_misfit(error, options)) from None
    except OSError as error:
        raise _not_loaded(error, options) from None
    return replace(files, ends_s=end_of(trial, certificate.decode("utf-8", "replace"), str(options.certificate)))


def end_of(server: ssl.SSLContext, certificate: str, name: str) -> float:
    """Try a server's certificate in a TLS handshake in memory; returns when it expires, in seconds since the epoch.

    The context, which requires no client certificate, has it loaded; `certificate` is PEM text, the server's own first; `name`
    is its file's path, for error texts.

    Raises:
        SecurityError: no client could accept the certificate.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # This client trusts the certificate itself, so that only its dates and its purpose are tried.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=certificate.partition(END)[0] + END + "\n")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there)
    try:
        _shake_hands(asking, server.wrap_bio(there, back, server_side=True))
    except ssl.SSLCertVerificationError as error:
        reason = REASONS.get(error.verify_code, f"cannot be a server's ({error.verify_message})")
        raise SecurityError(f"TLS certificate {name} {reason}; put a valid one there") from None
    except ssl.SSLError as error:
        raise SecurityError(f"TLS certificate {name} cannot be used: {error.reason}; put a valid one there") from None
    shown = asking.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _shake_hands(*ends: ssl.SSLObject) -> None:
    left = list(ends)
    while left:
        for end in list(left):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                left.remove(end)


def _read_pem(what: str, path: Path, expected: bytes) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SecurityError(f"TLS {what} {path} cannot be read: {error.strerror}; expected a PEM file") from None
    if expected not in content:
        raise SecurityError(f"TLS {what} {path} is not of this kind; expected a PEM file with {expected.decode()!r} in it")
    if b"ENCRYPTED" in content:
        raise SecurityError(f"TLS {what} {path} is encrypted; expected a key without a pass phrase")
    return content


def _read_authorities(what: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    pem = _read_pem(what, path, CERTIFICATE)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem.decode("utf-8", "replace"))
    except ssl.SSLError as error:
        raise SecurityError(f"TLS {what} {path} cannot be used: {error.reason}; expected certificates") from None
    return pem


def _misfit(error: ssl.SSLError, options: TlsOptions) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"TLS key {options.key} does not belong to certificate {options.certificate}; give a matching pair"
    reason = error.reason or "not readable as PEM"
    return f"TLS certificate {options.certificate} and key {options.key} cannot be used: {reason}; expected two PEM files"


def _not_loaded(error: OSError, options: TlsOptions) -> SecurityError:
    """Make the error for a temporary file that the system refused, for example because too many files are open."""
    return SecurityError(f"TLS certificate {options.certificate} cannot be loaded: {error.strerror or error}")


def _refuse_pass_phrase() -> NoReturn:
    """Raise in place of OpenSSL's prompt on the terminal."""
    raise ssl.SSLError(1, "the key asks for a pass phrase")


@contextlib.contextmanager
def _temporary_file(content: bytes) -> Iterator[str]:
    """Yield a path to the content: in memory if the system has such files, so that no copy of the key reaches a disk."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("tls"), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.TemporaryDirectory() as folder:  # only this user can enter it
        path = Path(folder) / "tls.pem"
        path.write_bytes(content)
        yield str(path)
