"""Services of the server for a running model: inference requests of its own, responses, logs, metrics, loading models."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, Protocol

import numpy as np

from halfserve.serve.backends.python_child.triton_errors import TritonModelException
from halfserve.serve.backends.python_child.wire import Channel, ChannelClosedError, WireTensor

FILE_PREFIX = "file:"
WINDOW_BYTES = 1 << 20  # unread responses to one request, from which on the model waits before the next one
RESPONSE_BYTES = 1024  # memory for a response beside its tensors
Reply = tuple[Mapping[str, Any], list[WireTensor]]


class UnreadResponses:
    """The responses to one request that its client has not read. They hold up a model that is faster than the client."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bytes = 0
        self._has_ended = False

    def add(self, size: int, *, waits: bool = True) -> bool:
        """Count a response, after waiting until the client has read enough of the earlier ones.

        Returns:
            False, without counting, if the client has gone or has its last response.
        """
        with self._changed:
            while waits and self._bytes >= WINDOW_BYTES and not self._has_ended:
                self._changed.wait()
            self._bytes += size
            return not self._has_ended

    def remove(self, size: int) -> None:
        """Count bytes no longer that the client has read."""
        with self._changed:
            self._bytes -= size
            self._changed.notify_all()

    def end(self) -> None:
        """Let all threads go on that wait, and none wait from now on."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


def response_bytes(tensors: Sequence[WireTensor]) -> int:
    """Size of a response, as `WINDOW_BYTES` counts it."""
    return RESPONSE_BYTES + sum([tensor.data.nbytes for tensor in tensors])


class ServerAccess(Protocol):
    """The server, as a model reaches it. Every method may be called on any thread.

    Attributes:
        on_check: returns whether the model is ready, and an error; called on a thread when the server asks.
    """

    on_check: Callable[[], tuple[bool, str]]

    def call(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> Reply:
        """Have the server do something, and wait for its reply. An error comes as the reply's "error"."""
        ...

    def call_for_many(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> Iterator[Reply]:
        """Send a message and yield the replies up to one that has "final"."""
        ...

    def tell(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """Have the server do something, without a reply."""

    def tell_later(self, kind: str, arguments: Mapping[str, Any]) -> None:
        """Have the server do something, like `tell`, from a finalizer (`__del__`), which may run while its thread sends."""

    def await_finalizers(self) -> None:
        """Make `tell_later` work from now on."""

    def unread_responses(self, number: int) -> UnreadResponses:
        """Return what counts the responses to a request, by the request's number, until `forget`."""
        ...

    def forget(self, number: int) -> None:
        """Count the responses to a request no longer. May be called from a finalizer."""


class Replies(Protocol):
    """Takes the replies to one call."""

    def put(self, reply: Reply, /) -> None:
        """Take the next reply, on any thread."""


class EventAccess:
    """Reaches a server by messages: each call has a number, by which its replies come back.

    Attributes:
        on_check: see `ServerAccess`.
    """

    def __init__(self, send: Callable[[dict[str, Any], list[WireTensor]], object]) -> None:
        """`send` takes each message, on any thread."""
        self._send = send
        self._waiting: dict[int, Replies] = {}
        self._unread: dict[int, UnreadResponses] = {}  # one per request, by its number
        self._numbers = count()
        self._later: queue.SimpleQueue[tuple[str, Mapping[str, Any]]] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._awaits_finalizers = False
        self.on_check: Callable[[], tuple[bool, str]] = lambda: (True, "")

    def deliver(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """Take a reply, the question whether the model is ready, or the news that the client of a request has read responses or
        has gone.
        """
        if "call" in header:
            replies = self._waiting.get(header["call"])
            if replies is not None:
                replies.put((header, tensors))
            return
        if "check" in header:  # on a thread of its own, as it may take long
            threading.Thread(target=self._check, name="halfserve-readiness", daemon=True).start()
            return
        unread = self._unread.get(header["request"])
        if unread is None:
            return
        if "read" in header:
            unread.remove(header["read"])
        else:
            unread.end()

    def take_replies(self, events: Channel) -> None:
        """Hand on the replies that come over a channel; its end is this process's end."""
        try:
            while True:
                self.deliver(*events.receive())
        finally:
            os._exit(0)

    def begin_call(self, replies: Replies) -> int:
        """Return the number of a call that the caller sends by `tell`, as its argument "call"."""
        number = next(self._numbers)
        self._waiting[number] = replies
        return number

    def end_call(self, number: int) -> None:
        """Take no further replies to a call."""
        self._waiting.pop(number, None)

    def call(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> Reply:
        """See ServerAccess."""
        number, replies = self._ask(kind, arguments, tensors)
        try:
            return replies.get()
        finally:
            self.end_call(number)

    def call_for_many(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> Iterator[Reply]:
        """See ServerAccess."""
        number, replies = self._ask(kind, arguments, tensors)
        is_over = False
        try:
            while not is_over:
                reply = replies.get()
                is_over = bool(reply[0].get("final"))
                if not is_over:
                    self.tell("read", {"call": number}, [])
                yield reply
        finally:
            self.end_call(number)
            if not is_over:
                self.tell("abandon", {"call": number}, [])

    def tell(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """See ServerAccess."""
        self._send({"k": kind, **arguments}, tensors)

    def tell_later(self, kind: str, arguments: Mapping[str, Any]) -> None:
        """See ServerAccess."""
        self._later.put((kind, arguments))

    def unread_responses(self, number: int) -> UnreadResponses:
        """See ServerAccess."""
        unread = self._unread[number] = UnreadResponses()
        return unread

    def forget(self, number: int) -> None:
        """See ServerAccess."""
        self._unread.pop(number, None)

    def end(self) -> None:
        """Let no thread wait for a client any more, because the server wants nothing further."""
        for unread in list(self._unread.values()):
            unread.end()

    def await_finalizers(self) -> None:
        """See ServerAccess."""
        with self._starting:
            if not self._awaits_finalizers:
                self._awaits_finalizers = True
                threading.Thread(target=self._tell_later, name="halfserve-finalizers", daemon=True).start()

    def _check(self) -> None:
        with using(self), contextlib.suppress(ChannelClosedError):
            ready, error = self.on_check()
            self.tell("readiness", {"ready": ready, "error": error}, [])

    def _tell_later(self) -> None:
        while True:
            kind, arguments = self._later.get()
            with contextlib.suppress(ChannelClosedError):
                self.tell(kind, arguments, [])

    def _ask(self, kind: str, arguments: Mapping[str, Any], tensors: list[WireTensor]) -> tuple[int, queue.SimpleQueue[Reply]]:
        replies = queue.SimpleQueue[Any]()
        number = self.begin_call(replies)
        self._send({"k": kind, "call": number, **arguments}, tensors)
        return number, replies


class _Holder:
    access: ServerAccess | None = None


# Of this thread or coroutine, where several models share a process.
_own: ContextVar[ServerAccess | None] = ContextVar("server access", default=None)


def connect(access: ServerAccess) -> None:
    """Use this server from now on, on every thread without one of its own."""
    _Holder.access = access


@contextmanager
def using(access: ServerAccess) -> Iterator[None]:
    """Within, this thread uses `access`."""
    token = _own.set(access)
    try:
        yield
    finally:
        _own.reset(token)


def server() -> ServerAccess:
    """Return the server that runs this model.

    Raises:
        TritonModelException: there is none.
    """
    access = _own.get() or _Holder.access
    if access is None:
        raise TritonModelException("no server runs this model")
    return access


def done(reply: Reply) -> Reply:
    """Return a reply without an error.

    Raises:
        TritonModelException: the server's error.
    """
    error = reply[0].get("error")
    if error is not None:
        raise TritonModelException(error[1])
    return reply


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model of the repository; needs a server with --model-control explicit.

    `config` is a ModelConfig as JSON in place of its own. `files` are the contents of its folder by path with a prefix, such as
    "file:1/model.onnx", in place of the repository's; they need `config`, and a server with --model-uploads.

    Raises:
        TritonModelException: the server refuses; or a path has no prefix.
    """
    files = files or {}
    for name in files:
        if not name.startswith(FILE_PREFIX):
            raise TritonModelException(f"files has {name!r}, expected a path such as '{FILE_PREFIX}1/model.onnx'")
    contents = [
        WireTensor(name.removeprefix(FILE_PREFIX), "BYTES", [len(content)], np.asarray(memoryview(content)))
        for name, content in files.items()
    ]
    done(server().call("load_model", {"model": model_name, "config": config}, contents))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:  # noqa: ARG001  (Triton's signature)
    """Unload a model, later: this returns at once. One of the repository that is not loaded stays so.

    Raises:
        TritonModelException: there is no such model.
    """
    done(server().call("unload_model", {"model": model_name}, []))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a model, or one version of it, is there and takes requests."""
    return bool(done(server().call("is_ready", {"model": model_name, "version": model_version}, []))[0]["ready"])
