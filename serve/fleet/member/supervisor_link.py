"""The link of a server to the supervisor or agent that started it, and its membership in a fleet."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from halfserve.serve.engine.errors import FailedPreconditionError
from halfserve.serve.fleet.member.handover import VARIABLE, Handover, end_with
from halfserve.serve.protocol.service import Service
from halfserve.serve.transports.listener import ConnectionLimit

logger = logging.getLogger(__name__)


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


class Membership:
    """A server's membership in a group of servers that answer as one; that of a server on its own. Lives on the event loop."""

    def connections(self, most: float, reason: str) -> ConnectionLimit:
        """Create the limit of the server's connections; `reason` explains it in the log."""
        return ConnectionLimit(most, reason)

    async def join(self, service: Service) -> None:
        """Have the service answer for all members; must be called before the server listens.

        Raises:
            FailedPreconditionError: there is not enough memory for this number of servers.
            BindError: the members' folder is not writable.
        """

    async def all_here(self) -> None:
        """Start accepting connections, and wait until the start may be reported; one of several servers reports for all."""

    def retire(self) -> None:
        """Stop accepting connections."""

    async def leave(self) -> None:
        """Leave the group; must be called after all requests are answered."""


def take_over(environment: MutableMapping[str, str]) -> SupervisorLink | None:
    """Return the link to the supervisor that started this process, if any; the environment variable is removed for child
    processes.

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
        sockets = {name: [socket.socket(fileno=number) for number in numbers] for name, numbers in given.sockets.items()}
        for one in (one for opened in sockets.values() for one in opened):
            one.set_inheritable(False)
        for descriptor in (given.lifeline, given.ready):
            os.set_inheritable(descriptor, False)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise FailedPreconditionError(
            f"the environment variable {VARIABLE} is not what a supervisor has set ({error}); unset it, "
            "and use --supervise to start one"
        ) from None
    return SupervisorLink(sockets, given)
