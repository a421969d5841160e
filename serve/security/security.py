"""Everything that guards one server, built from its options."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.security.client_limits import ClientAllowances
from halfserve.serve.security.file_reload import ClockWatch, FileWatch
from halfserve.serve.security.gate import Gate
from halfserve.serve.security.restricted_apis import RestrictedApis
from halfserve.serve.security.security_options import SecurityOptions
from halfserve.serve.security.tls import ServerTls
from halfserve.serve.security.tokens import Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PortSecurity:
    """The gate, TLS and address of one listening port."""

    gate: Gate | None = None  # admits calls; None admits every call
    tls: ServerTls | None = None  # encrypts connections; None leaves the port unencrypted
    socket: Path | None = None  # the path of a Unix socket to listen on, in place of a host and a port
    option: str = "--grpc-port"  # names the port in the text of a BindError


class Security:
    """The gates and TLS of one server, which follow changes of their files. Lives on the event loop.

    Attributes:
        main: guards gRPC and HTTP.
        admin: guards the port or socket for the RPCs that change the server; None without one.
        admin_port: TCP port of the admin RPCs; None without one.
    """

    def __init__(
        self,
        options: SecurityOptions,
        count: Callable[[InferenceError], None],
        *,
        shared_memory: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the files.

        `count` is called with each refusal; `clock` returns the seconds since the epoch, by which tokens expire.

        Raises:
            SecurityError: a file or a setting cannot be used.
        """
        options.check()
        # Made before the files are read, so that a change during the read is noticed.
        paths = options.files
        self._files = FileWatch(paths, options.watch_s, lambda again: self.reload(again=again))
        self._clock = ClockWatch(options.watch_s, self._look_at_clock)
        self._tls = None if options.tls is None else ServerTls(options.tls)
        self._tokens = None if options.token_file is None else Tokens(options.token_file, clock)
        self._has_files = bool(paths)
        shares = None if options.client_limits is None else ClientAllowances(options.client_limits)
        has_admin = options.admin_port is not None or options.admin_socket is not None
        restricted = RestrictedApis(options.grpc_restricted, options.http_restricted)
        is_restricted = bool(options.grpc_restricted or options.http_restricted)
        make = partial(Gate, tokens=self._tokens, count=count, shared_memory=shared_memory, restricted=restricted)
        is_gated = self._tokens is not None or shares is not None or has_admin or is_restricted
        self.main = PortSecurity(gate=make(shares=shares, admin_elsewhere=has_admin) if is_gated else None, tls=self._tls)
        self.admin_port = options.admin_port
        self.admin: PortSecurity | None = None
        if options.admin_socket is not None:
            # No gate: only the server's own user can open the socket, and could read the token file as well.
            self.admin = PortSecurity(socket=options.admin_socket, option="--admin-socket")
        elif has_admin:
            gate = make(shares=None, admin_elsewhere=False) if self._tokens is not None or is_restricted else None
            self.admin = PortSecurity(gate=gate, tls=self._tls, option="--admin-port")
        self._gates = [guard.gate for guard in (self.main, self.admin) if guard is not None and guard.gate is not None]

    def start(self) -> None:
        """Start to watch the files and the clock."""
        if self._has_files:
            self._files.start()
            self._clock.start()

    def close(self) -> None:
        self._files.close()
        self._clock.close()

    def reload_on_hang_up(self) -> None:
        """Read the files again on SIGHUP, whose default action ends the process; call it before models are loaded."""
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError, AttributeError):  # Windows, or no main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    def reload(self, *, again: bool = False) -> bool:
        """Read all files again; returns whether all could be used. Files that could not be used are logged, and change nothing.

        `again` marks an automatic retry, which does not log the same error twice.
        """
        if self._tls is not None:
            self._tls.reload(again=again)
        if self._tokens is not None and self._tokens.reload(again=again):
            self._changed()
        return not any(one.is_stale for one in (self._tls, self._tokens) if one is not None)

    def warn_if_exposed(self, host: str) -> None:
        """Warn if other machines can reach the server and it lacks TLS or authentication."""
        if _is_loopback(host):
            return
        authenticates = self._tokens is not None or (self._tls is not None and self._tls.asks_clients)
        missing = [
            what for what, there in (("TLS (--tls-cert)", self._tls), ("tokens (--token-file)", authenticates)) if not there
        ]
        if missing:
            logger.warning(
                "listening on %s without %s: any client that reaches this address can read and send requests; "
                "use 127.0.0.1, or see docs/guides/security.md",
                host,
                " and without ".join(missing),
            )

    def _look_at_clock(self) -> None:
        if self._tls is not None:
            self._tls.look_at_clock()
        if self._tokens is not None and self._tokens.look_at_clock():
            self._changed()

    def _changed(self) -> None:
        for gate in self._gates:
            gate.changed()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
