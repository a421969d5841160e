"""Supervision from the server's command: count the processes, open the sockets, and become the supervisor."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.errors import FailedPreconditionError
from halfserve.serve.engine.resource_limits import FEWEST_FILES, available_bytes, most_files, usable_cores
from halfserve.serve.fleet.agent.worker_process import program
from halfserve.serve.fleet.member.handover import ConnectionCounts, SupervisorPlan
from halfserve.serve.log_handler import LineFormat
from halfserve.serve.transports.listening import Address, close, listen

AUTO = "auto"
PROCESS_BYTES = 100 * 2**20  # memory of a server without models
FILES_EACH = 4  # open files in each process per other process
HELD_BACK = {signal.SIGTERM, signal.SIGINT}


def process_count(text: str, *, use_gpu: bool) -> int:
    """Parse the option's text; "auto" means one process if models run on a GPU, else one for each usable core.

    Raises:
        ValueError: the text is neither "auto" nor a whole number of 1 or more.
    """
    if text == AUTO:
        return 1 if use_gpu and device_count() else usable_cores()
    if not (text.isascii() and text.isdigit() and int(text[:9]) and len(text) < 7):
        raise ValueError(f"is {text[:20]!r}, expected {AUTO!r} or a whole number from 1 to 999999")
    return int(text)


def check_room(count: int) -> None:
    """Check that `count` processes can start at all.

    Raises:
        FailedPreconditionError: there is too little memory, or the limit on open files is too low.
    """
    room = available_bytes()
    if room is not None and count * PROCESS_BYTES > room:
        raise FailedPreconditionError(
            f"--processes {count} needs {count * PROCESS_BYTES >> 20} MiB before any model is loaded, and {room >> 20} MiB are "
            f"available; ask for {max(1, room // PROCESS_BYTES)} or fewer"
        )
    needed = FEWEST_FILES + FILES_EACH * count
    if needed > most_files():
        raise FailedPreconditionError(
            f"--processes {count} needs {needed} open files in each process, and the limit is {most_files()}; "
            "raise it (ulimit -n), or ask for fewer processes"
        )


def become_supervisor(
    addresses: Mapping[str, Address],
    processes: int = 1,
    line_format: LineFormat = LineFormat.TEXT,
    replaced: Mapping[str, str] | None = None,
) -> None:
    """Open the sockets and replace this program by the supervisor, which starts the same command again as its worker.

    A fresh interpreter without this one's imports needs a quarter of the memory. Does not return. `addresses` are those to
    listen on, by purpose; `processes` workers accept from them. `replaced` are words of the command that workers get in another
    form.

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
        os.execv(sys.executable, supervisor_command(plan, replaced or {}))  # noqa: S606  (our own program, and no shell)
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


def supervisor_command(plan: SupervisorPlan, replaced: Mapping[str, str]) -> list[str]:
    words = (replaced.get(word, word) for word in sys.orig_argv[1:])
    return [*program("halfserve.serve.fleet.launch.supervisor"), plan.to_text(), sys.executable, *words]
