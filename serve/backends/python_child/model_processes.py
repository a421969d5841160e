"""The processes of one model, which end together: processes that model.py forks or spawns end with it, in any session.

The process that the server starts stays outside of the model as the parent of last resort (Linux: a subreaper), to which the
system gives every process of the model whose own parent has ended. It imports nothing large, and takes 6 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from pathlib import Path

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def end_together(lifeline: int, connections: tuple[int, ...]) -> None:
    """Fork; returns in the process of the model. To be called before there are threads, or much memory.

    The other process ends with the model, in the same way, once all of the model's processes have ended. It kills them all when
    the model ends, and when the server closes its end of the lifeline or ends itself.

    Args:
        lifeline: descriptor of a socket, of which the server has the other end.
        connections: descriptors that are the model's alone.
    """
    _prctl(SET_CHILD_SUBREAPER, 1)
    model = os.fork()
    if not model:
        os.close(lifeline)
        os.setpgid(0, 0)  # so that a model which signals its own group does not meet the other process
        _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        return
    for number in connections:
        os.close(number)
    threading.Thread(target=_kill_at_end, args=(lifeline, model), daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == model:
            break
    _kill(-model)  # its group: all that is known of it where there is no subreaper
    while _kill_children():
        os.wait()
    _end_as(status)


def _kill_at_end(lifeline: int, model: int) -> None:
    """Kill the model when nothing more can come over the lifeline."""
    os.read(lifeline, 1)
    _kill(model)


def _kill_children() -> bool:
    """Kill the children of this process. Returns whether there are some that will end."""
    own = str(os.getpid())
    killed = False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # The program's name stands before the last ")", and may have spaces.
            _, _, fields = path.read_text(errors="replace").rpartition(")")
            if fields.split()[1] == own:
                killed |= _kill(int(path.parent.name))
    return killed


def _kill(pid: int) -> bool:
    """Kill a process. Returns False where another user's may not be killed."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _end_as(status: int) -> None:
    """End this process with the exit code or the signal of another one; `status` as from wait(2)."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
