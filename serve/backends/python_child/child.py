"""The program of a model's process. `python child.py CALLS EVENTS LIFELINE`, three inherited descriptors.

CALLS carries what the server wants of the model, one at a time. EVENTS carries what the model wants of the server, and the
replies. LIFELINE ends with the server, or when the server wants the model to end: see `model_processes`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType

PACKAGE = "halfserve.serve.backends.python_child"
if __name__ != PACKAGE + ".child":
    # Python puts a program's folder first: the model's `import requests` would find ours.
    sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]
    # Only this folder, under its name: halfserve itself may not be there, or be another one. At the top of the file, since
    # processes that the model spawns with multiprocessing run it too.
    _package = ModuleType(PACKAGE)
    _package.__path__ = [str(Path(__file__).parent)]
    sys.modules[PACKAGE] = _package
    if __name__ == "__main__":  # before numpy is imported, which only the model's process needs
        _calls, _events, _lifeline = map(int, sys.argv[1:4])
        importlib.import_module(PACKAGE + ".model_processes").end_together(_lifeline, (_calls, _events))
    for _name in ("triton_python_backend_utils", "c_python_backend_utils"):
        sys.modules[_name] = importlib.import_module(PACKAGE + ".triton_python_backend_utils")

from halfserve.serve.backends.python_child.forked_processes import ForkedProcesses  # noqa: E402  (after the package is there)
from halfserve.serve.backends.python_child.model_host import ModelFailedError  # noqa: E402  (see above)
from halfserve.serve.backends.python_child.model_server import ModelServer  # noqa: E402  (see above)
from halfserve.serve.backends.python_child.server_access import EventAccess, connect  # noqa: E402  (see above)
from halfserve.serve.backends.python_child.wire import Channel, ChannelClosedError, WireTensor  # noqa: E402  (see above)


def serve(calls: Channel, model: ModelServer) -> None:
    """Answer calls until the server ends the connection.

    Raises:
        ChannelClosedError: it has.
    """
    while True:
        header, tensors = calls.receive()
        outputs: list[WireTensor] = []
        try:
            reply, outputs = model.do(header, tensors)
        except ModelFailedError as error:
            reply = {"failed": str(error), "trace": error.traceback, "sent": error.sent}
        del tensors  # the views of the inputs: their memory is free with this reply
        calls.send(reply, outputs)
        del outputs


def main() -> None:
    """Serve one model, over the descriptors of the command line."""
    numbers = [int(argument) for argument in sys.argv[1:3]]
    sys.argv[1:] = []
    for number in numbers:
        os.set_inheritable(number, False)
    # What a model says goes into responses and logs, which are UTF-8: "?" stands for half of a surrogate pair.
    calls, events = (Channel(socket.socket(fileno=number), on_lone_surrogate="replace") for number in numbers)
    owner = os.getpid()
    access = EventAccess(events.send)
    connect(access)
    ForkedProcesses(access, calls, events)
    threading.Thread(target=access.take_replies, args=(events,), name="halfserve-replies", daemon=True).start()
    with contextlib.suppress(ChannelClosedError):
        serve(calls, ModelServer(access))
    sys.stdout.flush()
    os._exit(0 if os.getpid() == owner else 1)  # threads of the model may never end


if __name__ == "__main__":
    main()
