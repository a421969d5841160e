"""TLS whose certificate may change while the server runs: connections stay, new ones meet the new certificate."""

from __future__ import annotations

import logging
import ssl
import time
from functools import partial
from typing import Any

from serve.security.expiry import DAY_S, ends_in
from serve.security.option_checks import files_of_tls
from serve.security.options import TlsOptions
from serve.security.reloadable import Reloadable
from serve.security.reminder import Reminder
from serve.security.tls_files import TlsFiles, not_loaded, read_tls_files

logger = logging.getLogger(__name__)

SOON_S = 14 * DAY_S


class Tls:
    """The TLS of one server, on all of its ports."""

    def __init__(self, options: TlsOptions) -> None:
        """Read and try out the files.

        Raises:
            SecurityError: they cannot be used.
        """
        self._options = options
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._latest: dict[str, ssl.SSLContext] = {}
        self._next: dict[str, ssl.SSLContext] = {}  # made of what was read last
        kept = "new connections still meet the certificate from before"
        self._files = Reloadable(self._read, kept, files_of_tls(options))
        self._reminder = Reminder()
        self.look_at_clock()

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self._options.client_authorities is not None

    def context(self, protocol: str) -> ssl.SSLContext:
        """What listens with: TLS 1.2 or newer, and this one protocol within it (ALPN), such as "h2"."""
        if protocol not in self._contexts:
            context = self._make(protocol, self._files.value)
            context.sni_callback = partial(self._show_latest, protocol)
            self._contexts[protocol] = self._latest[protocol] = context
        return self._contexts[protocol]

    def grpc_credentials(self) -> Any:
        """The same for grpcio's server, which asks at every handshake whether there is something new."""
        import grpc  # noqa: PLC0415  (the fast transport does without it)

        shown = self._files.value

        def certificates(files: TlsFiles) -> Any:
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
        """Read the files again, and tell whether that changed anything.

        Files that cannot be used change nothing, and are logged; `again`, only where there is something new to say.
        """
        if not self._files.reload(again=again):
            return False
        for protocol, before in self._latest.items():
            self._latest[protocol] = self._next[protocol]
            _warn_of_lost(before, self._latest[protocol])
        logger.info("TLS certificate %s was read again", self._options.certificate)
        self.look_at_clock()
        return True

    def look_at_clock(self) -> None:
        """Warn of a certificate that ends soon."""
        now_s, ends_s = time.time(), self._files.value.ends_s
        is_soon = ends_s - now_s < SOON_S
        self._reminder.say(f"TLS certificate {self._options.certificate} {ends_in(ends_s, now_s)}" if is_soon else "")

    def _read(self) -> TlsFiles:
        files = read_tls_files(self._options)
        # Before they are taken: where the system refuses what this needs, the old ones are shown on all ports.
        self._next = {protocol: self._make(protocol, files) for protocol in self._latest}
        return files

    def _make(self, protocol: str, files: TlsFiles) -> ssl.SSLContext:
        """A context that has met no other files: OpenSSL keeps a certificate for each kind of key, and chooses one itself."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([protocol])
        try:
            files.load_into(context)
        except OSError as error:
            raise not_loaded(error, self._options) from None
        if files.client_authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=files.client_authorities.decode("utf-8", "replace"))
        return context

    def _show_latest(self, protocol: str, shown: Any, name: str | None, context: ssl.SSLContext) -> None:  # noqa: ARG002  (ssl's)
        """Go on with the latest files; called at the beginning of every handshake, also where a client names no host."""
        shown.context = self._latest[protocol]


def _warn_of_lost(before: ssl.SSLContext, after: ssl.SSLContext) -> None:
    """Who was let in may take up the session of that time, in which no certificate is shown anew."""
    if set(before.get_ca_certs(binary_form=True)) - set(after.get_ca_certs(binary_form=True)):
        logger.warning(
            "an authority of clients is gone from its file; its clients that were let in before may come back until the server "
            "is restarted"
        )
