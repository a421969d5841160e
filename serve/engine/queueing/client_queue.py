"""A queue that serves clients in turn, so that no client waits for all entries of another one. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ClientQueue(Generic[T]):
    """Entries of clients, which are taken from one client after the other, and in order of arrival from each."""

    __slots__ = ("_entries", "_size")

    def __init__(self) -> None:
        self._entries: OrderedDict[str, deque[T]] = OrderedDict()  # the next client first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def clients(self) -> int:
        """Number of clients with entries."""
        return len(self._entries)

    def append(self, client: str, entry: T) -> None:
        """Add an entry of a client."""
        self._entries.setdefault(client, deque()).append(entry)
        self._size += 1

    def take(self) -> T:
        """Remove and return the next entry; the queue must not be empty."""
        client, entries = self._entries.popitem(last=False)
        entry = entries.popleft()
        if entries:
            self._entries[client] = entries
        self._size -= 1
        return entry

    def put_back(self, client: str, entry: T) -> None:
        """Add an entry as the client's first one, which is taken again after those of the other clients."""
        entries = self._entries.pop(client, None) or deque()
        entries.appendleft(entry)
        self._entries[client] = entries
        self._size += 1
