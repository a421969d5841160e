"""Supervision from the server's command: become the supervisor, or take over sockets as its worker."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from halfserve.serve.engine.errors import FailedPreconditionError
from halfserve.serve.log_handler import LineFormat
from halfserve.serve.supervisor.connection_counts import ConnectionCounts
from halfserve.serve.supervisor.handover import VARIABLE, Handover, SupervisorPlan
from halfserve.serve.transports.listening import Address, close, listen

logger = logging.getLogger(__name__)

SERVE_ROOT = Path(__file__).parents[2]  # folder that contains the package `serve`
HELD_BACK = {signal.SIGTERM, signal.SIGINT}
PR_SET_PDEATHSIG = 1  # constant of <sys/prctl.h>


def become_supervisor(addresses: Mapping[str, Address], processes: int = 1, line_format: LineFormat = LineFormat.TEXT) -> None:
    """Open the sockets and replace this program by the supervisor, which starts the same command again as its worker.

    A fresh interpreter without this one's imports needs a quarter of the memory. Does not return.

    Args:
        addresses: addresses to listen on, by purpose.
        processes: number of workers that accept from these sockets.
        line_format: format of the supervisor's log lines.

    Raises:
        BindError: an address is in use, not this machine's, or not permitted; no socket stays open then.
        FailedPreconditionError: the folder that the workers share cannot be created.
    """
    opened: dict[str, list[socket.socket]] = {}
    folder: Path | None = None
    try:
        for name, address in addresses.items():
            opened[name] = listen(address)
        paths = [str(address.path.absolute()) for address in addresses.values() if address.path is not None]
        folder = _shared_folder(processes) if processes > 1 else None
        plan = SupervisorPlan(
            sockets={name: [one.fileno() for one in sockets] for name, sockets in opened.items()},
            socket_path=paths[0] if paths else None,
            line_format=line_format,
            processes=processes,
            folder="" if folder is None else str(folder),
        )
        for one in (one for sockets in opened.values() for one in sockets):
            one.set_inheritable(True)
        sys.stdout.flush()
        sys.stderr.flush()
        # Signals that arrive from here on are delivered once the supervisor has installed its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        os.execv(sys.executable, supervisor_command(plan))  # noqa: S606  (our own program, and no shell)
    finally:  # reached only on failure
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
        for sockets in opened.values():
            close(sockets)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _shared_folder(processes: int) -> Path:
    """Create the folder that workers share; only this user can access it."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="halfserve-members-"))
        ConnectionCounts.create(folder, processes)
    except OSError as error:
        raise FailedPreconditionError(
            f"server processes need a temporary folder to share: {error.filename or tempfile.gettempdir()}: {error.strerror}; "
            "set TMPDIR to one that this user can write to"
        ) from None
    return folder


def supervisor_command(plan: SupervisorPlan) -> list[str]:
    return [*program("halfserve.serve.supervisor"), plan.to_text(), sys.executable, *sys.orig_argv[1:]]


def program(module: str) -> list[str]:
    """The command that runs a module of this installation."""
    # -P: modules in the current folder must not hide ours, unless it is the folder that contains ours.
    safe = [] if Path.cwd() == SERVE_ROOT else ["-P"]
    return [sys.executable, *safe, "-m", module]


class SupervisorLink:
    """A worker's connection to its supervisor; lives on the event loop.

    Attributes:
        sockets: listening sockets, by purpose.
        given: data from the supervisor about this worker and the others.
        has_ended: whether the supervisor has ended.
    """

    def __init__(self, sockets: Mapping[str, Sequence[socket.socket]], given: Handover) -> None:
        self.sockets = sockets
        self.given = given
        self.has_ended = False
        self._lifeline = given.lifeline
        self._ready: int | None = given.ready

    @property
    def restarts(self) -> int:
        """Number of earlier workers in this place."""
        return self.given.restarts

    def on_supervisor_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the supervisor ends, even by a crash."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._lifeline)
            self.has_ended = True
            logger.warning("the supervisor has ended; what was taken is answered, and this server ends too")
            callback()

        loop.add_reader(self._lifeline, ended)

    def report_ready(self) -> None:
        """Report to the supervisor that requests are accepted; further calls do nothing."""
        if self._ready is None:
            return
        try:
            os.write(self._ready, b"\n")
        except BrokenPipeError:
            pass  # the supervisor has ended, which `on_supervisor_end` handles
        finally:
            os.close(self._ready)
            self._ready = None


def end_with(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends; exit now if it has ended already (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def take_over(environment: MutableMapping[str, str]) -> SupervisorLink | None:
    """The link to the supervisor that started this process, if any; the environment variable is removed for child processes.

    Raises:
        FailedPreconditionError: the variable is set, but not by a supervisor.
    """
    text = environment.pop(VARIABLE, None)
    if text is None:
        return None
    try:
        given = Handover.from_text(text)
        if given.parent:
            end_with(given.parent)
        for descriptor in (given.lifeline, given.ready):
            os.set_inheritable(descriptor, False)
        sockets = {name: [socket.socket(fileno=number) for number in numbers] for name, numbers in given.sockets.items()}
        for one in (one for opened in sockets.values() for one in opened):
            one.set_inheritable(False)
    except (ValueError, TypeError, OSError) as error:
        raise FailedPreconditionError(
            f"the environment variable {VARIABLE} is not what a supervisor has set ({error}); unset it, "
            "and use --supervise to start one"
        ) from None
    return SupervisorLink(sockets, given)
