"""Options of a server's end and restart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from halfserve.serve.model_control.control_options import ControlOptions
from halfserve.serve.server import ServerOptions

_ending = partial(typer.Option, rich_help_panel="Ending")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Options of the time after SIGTERM, and of a supervisor."""

    lame_duck_seconds: Annotated[
        float, _ending(min=0, help="After SIGTERM, say for so long that the server is not ready, and serve on.")
    ] = ControlOptions.lame_duck_s
    drain_seconds: Annotated[float, _ending(min=0.1, help="Time for requests in flight after SIGTERM.")] = ServerOptions.drain_s
    supervise: Annotated[
        bool,
        _ending("--supervise", help="Serve in a worker process, and restart it when it ends; clients keep the address."),
    ] = False
