"""All that guards one server, put together from its options."""

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

from serve.engine.errors import InferenceError
from serve.security.client_limits import Shares
from serve.security.clock_watch import ClockWatch
from serve.security.file_watch import FileWatch
from serve.security.gate import Gate
from serve.security.option_checks import check_options, files_of
from serve.security.options import SecurityOptions
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
        self,
        options: SecurityOptions,
        count: Callable[[InferenceError], None],
        *,
        shared_memory: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the files.

        Args:
            options: what is asked for.
            count: is told of calls that were refused.
            shared_memory: whether the server takes tensors from there.
            clock: seconds since the epoch, by which tokens end.

        Raises:
            SecurityError: a file or a setting cannot be used.
        """
        check_options(options)
        # Before the files are read: what changes while they are is seen at the next look.
        paths = files_of(options)
        self._files = FileWatch(paths, options.watch_s, lambda again: self.reload(again=again))
        self._clock = ClockWatch(options.watch_s, self._look_at_clock)
        self._tls = None if options.tls is None else Tls(options.tls)
        self._tokens = None if options.token_file is None else Tokens(options.token_file, clock)
        self._has_files = bool(paths)
        shares = None if options.client_limits is None else Shares(options.client_limits)
        has_admin = options.admin_port is not None or options.admin_socket is not None
        make = partial(Gate, tokens=self._tokens, count=count, shared_memory=shared_memory)
        is_gated = self._tokens is not None or shares is not None or has_admin
        self.main = Guard(gate=make(shares=shares, admin_elsewhere=has_admin) if is_gated else None, tls=self._tls)
        self.admin_port = options.admin_port
        self.admin: Guard | None = None
        if options.admin_socket is not None:
            # Who can open the socket is the server's own user: it could read the files as well.
            self.admin = Guard(socket=options.admin_socket, option="--admin-socket")
        elif has_admin:
            gate = None if self._tokens is None else make(shares=None, admin_elsewhere=False)
            self.admin = Guard(gate=gate, tls=self._tls, option="--admin-port")
        self._gates = [guard.gate for guard in (self.main, self.admin) if guard is not None and guard.gate is not None]

    def start(self) -> None:
        """Begin to look after the files."""
        if self._has_files:
            self._files.start()
            self._clock.start()

    def reload_on_hang_up(self) -> None:
        """Read the files again on SIGHUP, which would end the process: to be called before models are loaded."""
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError, AttributeError):  # Windows, or no main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    def close(self) -> None:
        """End that."""
        self._files.close()
        self._clock.close()

    def reload(self, *, again: bool = False) -> bool:
        """Read all files again. What cannot be used stays as it was, and is logged.

        Args:
            again: nobody has asked for it: what was logged the last time is not repeated.

        Returns:
            Whether all of them could be used.
        """
        if self._tls is not None:
            self._tls.reload(again=again)
        if self._tokens is not None and self._tokens.reload(again=again):
            self._changed()
        return not any(one.is_stale for one in (self._tls, self._tokens) if one is not None)

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
