"""A supervised server whose process loses its device: python -m tests.serve.faults.supervised_program PATH

The model "fragile" loses its device on a negative number, as CUDA does: from then on no model can be loaded in this
process. Everything else is as in `halfserve serve --supervise`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import uvloop

from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.fleet.launch.supervision import become_supervisor
from halfserve.serve.fleet.member.handover import LOST_DEVICE_CODE
from halfserve.serve.fleet.member.supervisor_link import SupervisorLink, take_over
from halfserve.serve.process import leave_at_once
from halfserve.serve.server import LostDeviceError, ServerOptions, addresses, serve
from halfserve.serve.startup_report import StartupReport
from tests.serve.faults.server_program import FragileRuntime, ready


def work(options: ServerOptions, inherited: SupervisorLink) -> None:
    def on_ready(told: StartupReport) -> None:
        if not inherited.restarts:
            ready(told)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options, FragileRuntime(has_only_one=True), on_ready, inherited))
    except LostDeviceError:
        leave_at_once(LOST_DEVICE_CODE)


def main(path: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    options = ServerOptions(path=Path(path), grpc_port=0, placement=DevicePlacement(use_gpu=False, threads=1))
    inherited = take_over(os.environ)
    if inherited is None:
        become_supervisor(addresses(options))
    else:
        work(options, inherited)


if __name__ == "__main__":
    main(*sys.argv[1:])
