"""The supervisor's program: python -m halfserve.serve.fleet.launch PLAN COMMAND ... (started by `supervision`)."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

from halfserve.serve.fleet.launch.supervisor import Supervisor
from halfserve.serve.fleet.member.handover import SupervisorPlan
from halfserve.serve.log_handler import LineFormat, log_to_standard_error


def main(text: str, *command: str) -> int:
    """Supervise until the end; returns the exit code."""
    plan = SupervisorPlan.from_text(text)
    log_to_standard_error(LineFormat(plan.line_format))
    logging.raiseExceptions = False  # a closed standard error must not end the supervisor
    try:
        return Supervisor(plan, command).run()
    finally:
        if plan.socket_path is not None:
            Path(plan.socket_path).unlink(missing_ok=True)
        if plan.folder:
            shutil.rmtree(plan.folder, ignore_errors=True)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    logging.shutdown()
    os._exit(code)
