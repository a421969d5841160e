"""The program of a model's process. `python child.py CALLS EVENTS LIFELINE`, three inherited descriptors.

CALLS carries what the server wants of the model, one at a time. EVENTS carries what the model wants of the server, and the
replies. LIFELINE is a pipe that ends with the server: the system then kills this process, whatever it does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

PACKAGE = "halfserve.serve.backends.python_child"
if __name__ != PACKAGE + ".child":
    # Python puts a program's folder first: the model's `import requests` would find ours.
    sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]
    # Only this folder, under its name: halfserve itself may not be there, or be another one. At the top of the file, since
    # processes that the model spawns with multiprocessing run it too.
    _package = ModuleType(PACKAGE)
    _package.__path__ = [str(Path(__file__).parent)]
    sys.modules[PACKAGE] = _package
    sys.modules["triton_python_backend_utils"] = importlib.import_module(PACKAGE + ".triton_python_backend_utils")

from halfserve.serve.backends.python_child import model_host, requests, server_access  # noqa: E402  (after the package is there)
from halfserve.serve.backends.python_child.tensors import Tensor  # noqa: E402  (after the package is there)
from halfserve.serve.backends.python_child.wire import Channel, ChannelClosedError  # noqa: E402  (after the package is there)

if TYPE_CHECKING:
    from halfserve.serve.backends.python_child.model_host import ModelHost
    from halfserve.serve.backends.python_child.server_access import Reply
    from halfserve.serve.backends.python_child.wire import WireTensor


class RemoteServer:
    """The server at the other end of EVENTS."""

    def __init__(self, events: Channel) -> None:
        self._events = events
        self._waiting: dict[int, queue.SimpleQueue[Reply]] = {}
        self._numbers = count()
        threading.Thread(target=self._receive, name="halfserve-events", daemon=True).start()

    def call(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> Reply:
        """See ServerAccess."""
        number, replies = self._ask(kind, arguments, tensors)
        try:
            return replies.get()
        finally:
            self._waiting.pop(number, None)

    def call_for_many(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> Iterator[Reply]:
        """See ServerAccess."""
        number, replies = self._ask(kind, arguments, tensors)
        is_over = False
        try:
            while not is_over:
                reply = replies.get()
                is_over = bool(reply[0].get("final"))
                yield reply
        finally:
            self._waiting.pop(number, None)
            if not is_over:
                self.tell("abandon", {"call": number}, [])

    def tell(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """See ServerAccess."""
        self._events.send({"k": kind, **arguments}, tensors)

    def _ask(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> tuple[int, queue.SimpleQueue[Reply]]:
        number, replies = next(self._numbers), queue.SimpleQueue[Any]()
        self._waiting[number] = replies
        self._events.send({"k": kind, "call": number, **arguments}, tensors)
        return number, replies

    def _receive(self) -> None:
        try:
            while True:
                header, tensors = self._events.receive()
                replies = self._waiting.get(header["call"])
                if replies is not None:
                    replies.put((header, tensors))
        finally:
            os._exit(0)  # the server has gone, or has ended this process


class ModelProcess:
    """Does what the server asks for, one thing at a time."""

    def __init__(self, calls: Channel, access: RemoteServer) -> None:
        self._calls = calls
        self._access = access
        self._host: ModelHost | None = None

    def serve(self) -> None:
        """Answer calls until the server ends the connection.

        Raises:
            ChannelClosedError: it has.
        """
        while True:
            header, tensors = self._calls.receive()
            outputs: list[WireTensor] = []
            try:
                reply, outputs = self._do(header, tensors)
            except model_host.ModelFailedError as error:
                reply = {"failed": str(error), "trace": error.traceback}
            del tensors  # the views of the inputs: their memory is free with this reply
            self._calls.send(reply, outputs)
            del outputs

    def _do(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> tuple[dict[str, Any], list[WireTensor]]:
        if header["k"] == "execute" and self._host is not None:
            return self._execute(self._host, header["requests"], tensors)
        if header["k"] == "finalize":
            if self._host is not None:
                self._host.finalize()
            return {}, []
        self._host = model_host.ModelHost(Path(header["path"]))
        if header["k"] == "complete":
            return {"config": self._host.completed(header["config"])}, []
        self._host.initialize(header["arguments"], is_decoupled=header["decoupled"])
        return {}, []

    def _execute(
        self, host: ModelHost, messages: list[Mapping[str, Any]], tensors: list[WireTensor]
    ) -> tuple[dict[str, Any], list[WireTensor]]:
        received, at = [], 0
        for message in messages:
            end = at + message["n"]
            inputs = [Tensor.from_wire(tensor) for tensor in tensors[at:end]]
            received.append(requests.InferenceRequest.received(self._access, message, inputs))
            at = end
        responses = host.execute(received)
        if responses is None:
            return {}, []
        outputs: list[WireTensor] = []
        try:
            for response in responses:
                if not response.has_error():
                    outputs += [tensor.to_wire() for tensor in response.output_tensors()]
        except (TypeError, UnicodeError, ValueError) as error:  # elements that are no bytes
            raise model_host.failed("execute", error) from error
        return {"responses": [response.to_message() for response in responses]}, outputs


def die_with(lifeline: int) -> None:
    """Have the system kill this process when the other end of a pipe is closed, even in code that never lets Python run."""
    fcntl = importlib.import_module("fcntl")
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def main() -> None:
    """Serve one model, over the descriptors of the command line."""
    numbers = [int(argument) for argument in sys.argv[1:4]]
    sys.argv[1:] = []
    calls, events = (Channel(socket.socket(fileno=number)) for number in numbers[:2])
    for number in numbers:
        os.set_inheritable(number, False)
    die_with(numbers[2])
    owner = os.getpid()

    def forked() -> None:
        # A fork must neither answer in this process's place nor keep its connections open.
        calls.close()
        events.close()
        os.close(numbers[2])

    os.register_at_fork(after_in_child=forked)
    access = RemoteServer(events)
    server_access.connect(access)
    with contextlib.suppress(ChannelClosedError):
        ModelProcess(calls, access).serve()
    sys.stdout.flush()
    os._exit(0 if os.getpid() == owner else 1)  # threads of the model may never end


if __name__ == "__main__":
    main()
