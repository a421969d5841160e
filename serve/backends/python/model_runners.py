"""Runs a copy of a Python model in a process of its own, or on the thread of its instance."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from halfserve.serve.backends import python_child
from halfserve.serve.backends.python.environment import Interpreter
from halfserve.serve.backends.python_child.model_host import ModelFailedError
from halfserve.serve.backends.python_child.model_server import ModelServer
from halfserve.serve.backends.python_child.server_access import EventAccess, connect, using
from halfserve.serve.backends.python_child.wire import Channel, ChannelClosedError, WireTensor
from halfserve.serve.engine.errors import InstanceLostError, ModelLoadError

logger = logging.getLogger(__name__)

PROGRAM = Path(python_child.__path__[0]) / "child.py"
STDERR = 2
Reply = tuple[dict[str, Any], list[WireTensor]]
# Called with each message of the child that is no reply, on the thread that receives them.
OnEvent = Callable[[Mapping[str, Any], list[WireTensor]], None]
# Called on the event loop with the tensors of a reply that `Runner.reply` returns at once; with None where it may take longer.
Came = Callable[[Sequence[WireTensor] | None], None]


class ChildFailedError(Exception):
    """The model.py failed; the text is for the client.

    Attributes:
        trace: its traceback, for the log.
        sent: the places in the batch of requests that the model had answered before, by their response senders.
    """

    def __init__(self, text: str, trace: str, sent: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.trace = trace
        self.sent = sent


class Runner(Protocol):
    """Runs a model.py, in a process or on a thread."""

    def call(self, header: dict[str, Any], tensors: Sequence[WireTensor] = ()) -> Reply:
        """See `ChildProcess.call`."""
        ...

    def begin(self, header: dict[str, Any], tensors: Sequence[WireTensor], came: Came) -> bool:
        """See `ChildProcess.begin`."""
        ...

    def let_go(self) -> None:
        """See `ChildProcess.let_go`."""

    def reply(self) -> Reply:
        """See `ChildProcess.reply`."""
        ...

    def answer(self, header: dict[str, Any], tensors: Sequence[WireTensor] = ()) -> None:
        """See `ChildProcess.answer`."""

    def kill(self) -> None:
        """See `ChildProcess.kill`."""


class ChildProcess:
    """A running model.py."""

    def __init__(self, label: str, interpreter: Interpreter, on_event: OnEvent, on_end: Callable[[], None]) -> None:
        """Start the process; nothing of the model is loaded yet.

        Args:
            label: "name/version instance number", for the log.
            interpreter: runs it.
            on_event: gets what the model wants, on a thread of this process.
            on_end: called once on that thread when the process has ended.

        Raises:
            ModelLoadError: it cannot be started.
        """
        self._label = label
        self._on_event = on_event
        self._on_end = on_end
        ours, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
        try:
            numbers = [one.fileno() for one in theirs]
            self._process = subprocess.Popen(
                [*interpreter.command, "-u", str(PROGRAM), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=_standard_error(),  # prints of a model go to the log, as standard output holds the server's answers
                pass_fds=numbers,
                env=interpreter.environment(),
                start_new_session=True,  # Ctrl-C is for the server, which ends it in order
            )
        except OSError as error:
            for one in ours:
                one.close()
            raise ModelLoadError(
                f"{label}: its process cannot be started: {interpreter.command[0]}: {error.strerror}"
            ) from None
        finally:
            for one in theirs:
                one.close()
        self._calls, self._events, self._lifeline = Channel(ours[0]), Channel(ours[1]), ours[2]
        self._calling = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # reads replies; None while a thread does
        self._came: Came | None = None
        self._received: Reply | ValueError | None = None  # read by the loop
        threading.Thread(target=self._watch, name=f"events of {label}", daemon=True).start()

    def call(self, header: dict[str, Any], tensors: Sequence[WireTensor] = ()) -> Reply:
        """Have the process do something, and wait for its reply. One call at a time, on any thread while no loop reads.

        Raises:
            ChildFailedError: the model.py failed.
            InstanceLostError: the process has ended.
        """
        with self._calling, contextlib.suppress(ChannelClosedError):  # `reply` raises the error
            self._calls.send(header, tensors)
        return self.reply()

    def begin(self, header: dict[str, Any], tensors: Sequence[WireTensor], came: Came) -> bool:
        """Send a call without waiting, and let the running loop read its reply, which `reply` returns afterwards.

        Returns:
            Whether `came` is called once, on the loop, when the reply has come. Otherwise `reply` waits for it.
        """
        with self._calling:
            try:
                if self._calls.send(header, tensors, waits=False):
                    if self._loop is None:
                        self._loop = asyncio.get_running_loop()
                        self._loop.add_reader(self._calls.fileno(), self._read)
                    self._came = came
                    return True
            except ChannelClosedError:
                pass
        self.let_go()
        return False

    def let_go(self) -> None:
        """Leave replies to the threads that call `reply`. Called on the loop."""
        self._came = None
        if self._loop is not None:
            self._loop.remove_reader(self._calls.fileno())
            os.set_blocking(self._calls.fileno(), True)
            self._loop = None

    def reply(self) -> Reply:
        """Return the reply to a call that was sent; waits for it, unless the loop has read it.

        Raises:
            ChildFailedError: the model.py failed.
            InstanceLostError: the process has ended.
        """
        received, self._received = self._received, None
        try:
            if received is None:
                with self._calling:
                    self._calls.send_rest()
                    received = self._calls.receive()
            elif isinstance(received, ValueError):
                raise received
        except (ChannelClosedError, ValueError) as error:
            self.kill()
            what = "ended" if isinstance(error, ChannelClosedError) else f"sent what cannot be read ({error})"
            raise InstanceLostError(f"the process of {self._label} {what}{self._exit()}") from None
        reply, outputs = received
        if "failed" in reply:
            raise ChildFailedError(reply["failed"], reply.get("trace", ""), reply.get("sent", ()))
        return reply, outputs

    def _read(self) -> None:
        """Receive a reply, or a part of it, on the loop."""
        is_whole, came = self._calls.take_in(), self._came
        if is_whole is None:
            return
        self._came = None
        if came is None:  # the process has ended between two calls
            self.let_go()
            return
        if is_whole:
            try:
                self._received = self._calls.receive()
            except ValueError as error:
                self._received = error
        came(self._received[1] if isinstance(self._received, tuple) else None)

    def answer(self, header: dict[str, Any], tensors: Sequence[WireTensor] = ()) -> None:
        """Send the reply to an event. May block while the process does not read."""
        with contextlib.suppress(ChannelClosedError):
            self._events.send(header, tensors)

    def kill(self) -> None:
        """End the process, and all that it has started, at once. Any thread may do it; does not wait."""
        with contextlib.suppress(OSError):  # the process has ended
            self._lifeline.shutdown(socket.SHUT_RDWR)
        self._calls.shut_down()

    def _exit(self) -> str:
        """Return how it ended, as the rest of a sentence."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        return f" with signal {-code}" if code < 0 else f" with code {code}"

    def _watch(self) -> None:
        """Take the model's events until the process ends; then clean up."""
        try:
            with _ended(self._process.pid) as ended:
                while self._has_event(ended):
                    self._on_event(*self._events.receive())
        except ChannelClosedError:
            pass
        except ValueError as error:
            text, about = "%s: its process is ended, as its message cannot be read: %s", {"model": self._label}
            logger.error(text, self._label, error, extra=about)  # noqa: TRY400  (the text says all)
        except Exception:
            logger.exception("%s: an event of its process cannot be handled", self._label, extra={"model": self._label})
        self.kill()
        self._events.shut_down()
        self._process.wait()
        self._lifeline.close()
        self._events.close()
        with self._calling:  # a thread in a call has been woken
            loop = self._loop
            if loop is None:
                self._calls.close()
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._close_calls)
            except RuntimeError:  # the loop is closed
                self._calls.close()
        self._on_end()

    def _close_calls(self) -> None:
        """Close the connection whose replies the loop reads."""
        self.let_go()
        with self._calling:
            self._calls.close()

    def _has_event(self, ended: int | None) -> bool:
        """Wait for a message of the process, or for its end: its children may hold the connection open."""
        if self._events.has_rest or ended is None:
            return True
        poll = select.poll()
        poll.register(self._events.fileno(), select.POLLIN)
        poll.register(ended, select.POLLIN)
        return any(number == self._events.fileno() for number, _ in poll.poll())


@contextlib.contextmanager
def _ended(pid: int) -> Any:
    """Provide a descriptor that is readable once a process has ended; None where the system has none."""
    try:
        number = os.pidfd_open(pid)
    except (AttributeError, OSError):
        yield None
        return
    try:
        yield number
    finally:
        os.close(number)


def _standard_error() -> int:
    sys.stderr.flush()
    return STDERR


class ModelThread:
    """A model.py that runs in the server's own process, on the thread of its instance. It cannot be killed, and shares modules
    and Python's lock with the server.
    """

    def __init__(self, on_event: OnEvent, on_end: Callable[[], None]) -> None:
        """See ChildProcess."""
        self._on_end: Callable[[], None] | None = on_end
        self._access = EventAccess(on_event)
        self._model = ModelServer(self._access)
        self._call: tuple[dict[str, Any], Sequence[WireTensor]] = {}, ()
        connect(self._access)  # for threads that the model starts

    def call(self, header: dict[str, Any], tensors: Sequence[WireTensor] = ()) -> Reply:
        """See ChildProcess.

        Raises:
            ChildFailedError: the model.py failed.
        """
        self.begin(header, tensors, _nothing)
        return self.reply()

    def begin(self, header: dict[str, Any], tensors: Sequence[WireTensor], came: Came) -> bool:  # noqa: ARG002  (of ChildProcess)
        """Leave the call to `reply`, which a thread calls."""
        self._call = header, tensors
        return False

    def let_go(self) -> None:
        """Do nothing: no loop reads replies."""

    def reply(self) -> Reply:
        """See ChildProcess.

        Raises:
            ChildFailedError: the model.py failed.
        """
        (header, tensors), self._call = self._call, ({}, ())
        aligned = [one if one.data.flags.aligned else one._replace(data=one.data.copy()) for one in tensors]
        try:
            with using(self._access):
                return self._model.do(header, aligned)
        except ModelFailedError as error:
            raise ChildFailedError(str(error), error.traceback, error.sent) from None

    def answer(self, header: Mapping[str, Any], tensors: Sequence[WireTensor] = ()) -> None:
        """See ChildProcess."""
        self._access.deliver(header, list(tensors))

    def kill(self) -> None:
        """End its requests, and nothing else: a thread cannot be killed."""
        self._access.end()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


def _nothing(_: Sequence[WireTensor] | None) -> None:
    """Do nothing."""
