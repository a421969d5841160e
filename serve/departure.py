"""How a server's process ends although a model never answers."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import NoReturn

from serve.engine.disk_files import remove_temporary_folders

WAIT_S = 0.5  # for threads that have been told to end


def leave_threads_behind(code: int = 0) -> None:
    """End the process here, if a thread is still inside a runtime; otherwise return, for it to end as usual.

    Nobody can end such a thread. The interpreter, when it ends, takes it down by force as soon as it comes back from the
    runtime, which C++ answers with std::terminate: the process would end with SIGABRT after everything has gone well.

    Args:
        code: the process's exit code.
    """
    until = time.monotonic() + WAIT_S
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                leave_at_once(code)


def leave_at_once(code: int) -> NoReturn:
    """End the process here: what was written goes out, temporary folders go, and nothing else is cleaned up."""
    remove_temporary_folders()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
