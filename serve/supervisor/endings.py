"""How a process ended, in words and as an exit code."""

from __future__ import annotations

import signal

LOST_DEVICE_CODE = 75  # EX_TEMPFAIL: what this process cannot do any more, the next one can
HINTS = {
    signal.SIGKILL: "; out of memory, or by hand",
    signal.SIGSEGV: "; a runtime or a driver crashed",
    signal.SIGABRT: "; a runtime or a driver gave up",
}


def in_words(code: int) -> str:
    """Such as "exit code 3" or "SIGABRT"; negative codes are signals."""
    if code == LOST_DEVICE_CODE:
        return f"exit code {code}: its device was lost"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return f"{name.name}{HINTS.get(name, '')}"


def exit_code(code: int) -> int:
    """What a shell would report."""
    return code if code >= 0 else 128 - code
