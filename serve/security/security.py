"""All that guards one server, put together from its options."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serve.engine.errors import InferenceError
from serve.security.client_limits import Shares
from serve.security.errors import SecurityError
from serve.security.file_watch import FileWatch
from serve.security.gate import Gate
from serve.security.options import ClientLimits, SecurityOptions
from serve.security.tls import Tls
from serve.security.tokens import Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What stands before one listening port.

    Attributes:
        gate: is asked for each call; None lets everything in.
        tls: encrypts; None leaves it plain.
        socket: the path of a Unix socket to listen on, in place of a host and a port.
        option: names the port in the text of a BindError.
    """

    gate: Gate | None = None
    tls: Tls | None = None
    socket: Path | None = None
    option: str = "--grpc-port"


class Security:
    """Lives on the event loop.

    Attributes:
        main: before gRPC and HTTP.
        admin: before the port or socket for what changes the server; None where there is none.
        admin_port: to listen on, where there is one and it is no socket.
    """

    def __init__(
        self, options: SecurityOptions, count: Callable[[InferenceError], None], *, shared_memory: bool = True
    ) -> None:
        """Read the files.

        Args:
            options: what is asked for.
            count: is told of calls that were refused.
            shared_memory: whether the server takes tensors from there.

        Raises:
            SecurityError: a file or a setting cannot be used.
        """
        _check(options)
        # Before the files are read: what changes while they are is seen at the next look.
        self._watch = FileWatch(_paths(options), options.watch_s, self.reload)
        self._tls = None if options.tls is None else Tls(options.tls)
        self._tokens = None if options.token_file is None else Tokens(options.token_file)
        self._has_files = bool(_paths(options))
        shares = None if options.client_limits is None else Shares(options.client_limits)
        has_admin = options.admin_port is not None or options.admin_socket is not None
        self._gates: list[Gate] = []
        gate = None
        if self._tokens is not None or shares is not None or has_admin:
            gate = self._gate(
                Gate(tokens=self._tokens, shares=shares, admin_elsewhere=has_admin, count=count, shared_memory=shared_memory)
            )
        self.main = Guard(gate=gate, tls=self._tls)
        self.admin_port = options.admin_port
        self.admin: Guard | None = None
        if options.admin_socket is not None:
            # Who can open the socket is the server's own user: it could read the files as well.
            self.admin = Guard(socket=options.admin_socket, option="--admin-socket")
        elif has_admin:
            gate = None
            if self._tokens is not None:
                gate = self._gate(
                    Gate(tokens=self._tokens, shares=None, admin_elsewhere=False, count=count, shared_memory=shared_memory)
                )
            self.admin = Guard(gate=gate, tls=self._tls, option="--admin-port")

    def start(self) -> None:
        """Begin to look after the files, and read them again on SIGHUP."""
        if not self._has_files:
            return
        self._watch.start()
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError, AttributeError):  # Windows, or no main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    def close(self) -> None:
        """End that."""
        self._watch.close()

    def reload(self) -> None:
        """Read all files again. What cannot be used stays as it was, and is logged."""
        if self._tls is not None:
            self._tls.reload()
        if self._tokens is not None and self._tokens.reload():
            for gate in self._gates:
                gate.changed()

    def warn_if_exposed(self, host: str) -> None:
        """Say what a server lacks that others than this machine can reach."""
        if _is_loopback(host):
            return
        is_known = self._tokens is not None or (self._tls is not None and self._tls.asks_clients)
        missing = [what for what, there in (("TLS (--tls-cert)", self._tls), ("tokens (--token-file)", is_known)) if not there]
        if missing:
            logger.warning(
                "listening on %s without %s: whoever reaches this address can read and send requests; "
                "use 127.0.0.1, or see docs/security.md",
                host,
                " and without ".join(missing),
            )

    def _gate(self, gate: Gate) -> Gate:
        self._gates.append(gate)
        return gate


def _paths(options: SecurityOptions) -> list[Path]:
    tls = options.tls
    of_tls = [] if tls is None else [tls.certificate, tls.key, tls.client_authorities]
    return [path for path in (*of_tls, options.token_file) if path is not None]


def _check(options: SecurityOptions) -> None:
    if options.admin_port is not None and options.admin_socket is not None:
        raise SecurityError("an admin port and an admin socket are both asked for; expected one of the two")
    if options.client_limits is not None:
        _check_limits(options.client_limits)


def _check_limits(limits: ClientLimits) -> None:
    for name in ("requests_per_s", "burst", "max_concurrent"):
        value = getattr(limits, name)
        if value is not None and not value > 0:
            raise SecurityError(f"the client limit {name} is {value:g}, expected more than 0; leave it out for no limit")
    if limits.burst is not None and limits.requests_per_s is None:
        raise SecurityError("the client limit burst means nothing without requests_per_s; give both")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
