"""The supervisor with other waits: python -m tests.serve.fleet.launch.quick_supervisor FIRST_S PLAN COMMAND ..."""

from __future__ import annotations

import signal
import sys

from halfserve.serve.fleet.launch import supervisor

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a suite that was started under nohup has ignored
    supervisor.FIRST_S = supervisor.LONGEST_S = float(sys.argv[1])
    sys.exit(supervisor.main(*sys.argv[2:]))
