"""The way to the server for processes that a model forks, such as those of a `multiprocessing.Pool`.

A fork inherits one end of a socket pair, over which it hands the model's process the connection that it makes with its first
message. The model's process relays what comes there to the server, and the replies back.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

from halfserve.serve.backends.python_child.server_access import EventAccess, Reply, connect
from halfserve.serve.backends.python_child.triton_errors import TritonModelException
from halfserve.serve.backends.python_child.wire import Channel, ChannelClosedError, WireTensor


class ForkedProcesses:
    """Gives each fork of this process a way to the server."""

    def __init__(self, access: EventAccess, *connections: Channel) -> None:
        """Begin with the next fork.

        Args:
            access: the server, as this process reaches it.
            connections: connections of this process, which no fork may use or keep open.
        """
        self._access = access
        self._connections = set(connections)
        self._sockets: tuple[socket.socket, socket.socket] | None = None  # for this process, and for forks of any depth
        os.register_at_fork(before=self._prepare, after_in_child=self._begin)

    def _prepare(self) -> None:
        if self._sockets is None:
            self._sockets = ours, _ = socket.socketpair(type=socket.SOCK_DGRAM)
            threading.Thread(target=self._accept, args=(ours,), name="halfserve-forks", daemon=True).start()

    def _begin(self) -> None:
        """In the fork: a fork must neither answer in the place of this process nor keep its connections open."""
        for channel in self._connections:
            channel.close()
        self._connections.clear()
        if self._sockets is not None:
            self._sockets[0].close()
            connect(_Link(self._sockets[1], self._connections).access)

    def _accept(self, sockets: socket.socket) -> None:
        while True:
            _, numbers, _, _ = socket.recv_fds(sockets, 1, 1)
            for number in numbers:
                channel = Channel(socket.socket(fileno=number))
                self._connections.add(channel)
                relay = _Relay(self._access, channel)
                threading.Thread(target=self._relay, args=(relay, channel), name="halfserve-fork", daemon=True).start()

    def _relay(self, relay: _Relay, channel: Channel) -> None:
        try:
            relay.run()
        finally:
            self._connections.discard(channel)
            channel.close()


class _Link:
    """The connection of a fork, made with its first message."""

    def __init__(self, sockets: socket.socket, connections: set[Channel]) -> None:
        self.access = EventAccess(self.send)
        self._sockets = sockets
        self._connections = connections
        self._lock = threading.Lock()
        self._channel: Channel | None = None

    def send(self, header: dict[str, Any], tensors: list[WireTensor]) -> None:
        """Send a message to the server.

        Raises:
            TritonModelException: the process has closed the descriptors that it has inherited.
            ChannelClosedError: the model's process has ended.
        """
        with self._lock:
            if self._channel is None:
                self._channel = self._open()
        self._channel.send(header, tensors)

    def _open(self) -> Channel:
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._sockets, [b"+"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise TritonModelException(f"this process has lost its way to the server: {error.strerror}") from None
        finally:
            theirs.close()
        channel = Channel(ours)
        self._connections.add(channel)
        threading.Thread(target=self.access.take_replies, args=(channel,), name="halfserve-replies", daemon=True).start()
        return channel


class _Relay:
    """Relays between one fork and the server. Each side has its own numbers of calls."""

    def __init__(self, access: EventAccess, channel: Channel) -> None:
        self._access = access
        self._channel = channel
        self._calls: dict[int, int] = {}  # without a final reply: numbers of the server's side, by the fork's

    def run(self) -> None:
        """Relay until the fork ends; its calls are abandoned then."""
        with contextlib.suppress(ChannelClosedError):
            while True:
                self._pass_on(*self._channel.receive())
        for number in list(self._calls):
            self._abandon(number)

    def reply(self, number: int, reply: Reply) -> None:
        """Pass on a reply to the fork's call `number`."""
        header, tensors = reply
        if header.get("final", True):
            self._access.end_call(self._calls.pop(number, -1))
        with contextlib.suppress(ChannelClosedError):
            self._channel.send({**header, "call": number}, tensors)

    def _pass_on(self, header: dict[str, Any], tensors: list[WireTensor]) -> None:
        kind, number = header.pop("k"), header.pop("call", None)
        if kind == "abandon":
            self._abandon(number)
            return
        if kind == "read":
            if number in self._calls:
                self._access.tell("read", {"call": self._calls[number]}, [])
            return
        if kind == "cancel":
            header["of"] = self._calls.get(header["of"], -1)
        if number is not None:
            self._calls[number] = header["call"] = self._access.begin_call(_Replies(self, number))
        self._access.tell(kind, header, tensors)

    def _abandon(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            self._access.end_call(call)
            self._access.tell("abandon", {"call": call}, [])


class _Replies:
    """Takes the replies to one call of a fork."""

    def __init__(self, relay: _Relay, number: int) -> None:
        self._relay = relay
        self._number = number

    def put(self, reply: Reply) -> None:
        """See Replies."""
        self._relay.reply(self._number, reply)
