"""What a worker was given by its supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from serve.engine.errors import FailedPreconditionError
from serve.supervisor.handover import VARIABLE, Handover

logger = logging.getLogger(__name__)


class Inheritance:
    """Lives on the event loop.

    Attributes:
        sockets: that listen, by what they are for.
        restarts: how many workers there were before.
    """

    def __init__(self, sockets: Mapping[str, Sequence[socket.socket]], lifeline: int, ready: int, restarts: int) -> None:
        self.sockets = sockets
        self.restarts = restarts
        self._lifeline = lifeline
        self._ready: int | None = ready

    def attend(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the supervisor has ended, however it did."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._lifeline)
            logger.warning("the supervisor has ended; what was taken is answered, and this server ends too")
            gone()

        loop.add_reader(self._lifeline, ended)

    def tell_ready(self) -> None:
        """Let the supervisor know that requests are taken."""
        if self._ready is None:
            return
        try:
            os.write(self._ready, b"\n")
        except BrokenPipeError:
            pass  # it has ended, which `attend` tells
        finally:
            os.close(self._ready)
            self._ready = None


def take_over(environment: MutableMapping[str, str]) -> Inheritance | None:
    """What a supervisor has given this process; None if none has. Processes that this one starts get nothing of it.

    Raises:
        FailedPreconditionError: the variable is set, and not by a supervisor.
    """
    text = environment.pop(VARIABLE, None)
    if text is None:
        return None
    try:
        told = Handover.from_text(text)
        for descriptor in (told.lifeline, told.ready):
            os.set_inheritable(descriptor, False)
        sockets = {name: [socket.socket(fileno=one) for one in given] for name, given in told.sockets.items()}
        for one in (one for given in sockets.values() for one in given):
            one.set_inheritable(False)
    except (ValueError, TypeError, OSError) as error:
        raise FailedPreconditionError(
            f"the environment variable {VARIABLE} is not what a supervisor has set ({error}); unset it, "
            "and use --supervise to start one"
        ) from None
    return Inheritance(sockets, told.lifeline, told.ready, told.restarts)
