"""Turn the command that was called into a supervisor."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from serve.supervisor.handover import Plan
from serve.transports.listening import Address, close, listen

SERVE_ROOT = Path(__file__).parents[2]  # the folder that the package `serve` lies in
HELD_BACK = {signal.SIGTERM, signal.SIGINT}


def become_supervisor(addresses: Mapping[str, Address]) -> None:
    """Open the sockets and replace this program by the supervisor, which starts this same command again as its worker.

    A fresh interpreter without this one's imports needs a quarter of its memory. Does not return.

    Args:
        addresses: to listen on, by what they are for.

    Raises:
        BindError: an address is in use, not this machine's, or not allowed; then none is listened on.
    """
    opened: dict[str, list[socket.socket]] = {}
    try:
        for name, address in addresses.items():
            opened[name] = listen(address)
        paths = [str(address.path.absolute()) for address in addresses.values() if address.path is not None]
        plan = Plan(
            sockets={name: [one.fileno() for one in sockets] for name, sockets in opened.items()},
            socket_path=paths[0] if paths else None,
        )
        for one in (one for sockets in opened.values() for one in sockets):
            one.set_inheritable(True)
        sys.stdout.flush()
        sys.stderr.flush()
        # What comes from here on is taken once the supervisor can.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        os.execv(sys.executable, supervisor_command(plan))  # noqa: S606  (our own program, and no shell)
    finally:  # only where it did not come to that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
        for sockets in opened.values():
            close(sockets)


def supervisor_command(plan: Plan) -> list[str]:
    """What starts the supervisor of this process's own command."""
    # The current folder is no place for modules, unless our own lie there.
    safe = [] if Path.cwd() == SERVE_ROOT else ["-P"]
    return [sys.executable, *safe, "-m", "serve.supervisor", plan.to_text(), sys.executable, *sys.orig_argv[1:]]
