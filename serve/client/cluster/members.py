"""Chooses a member for each call: the less loaded of two random ones among the members that serve the model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from random import random
from typing import Any

from halfserve.protos import cluster_pb2
from halfserve.serve.client.errors import ClientError, Overloaded, Repeat, ServerUnavailable, Unsupported

MAX_SEQUENCES = 10_000  # sequences whose member a client remembers; above, the oldest ones are forgotten
AVOIDED_S = (0.25, 4.0)  # first and longest time for which a failed member is avoided; doubled with each failure in a row


class MemberConnection:
    def __init__(self, address: str) -> None:
        self.address = address  # HOST:PORT of the member
        self.channel: Any = None  # channel to the member; None before the first call
        self.rpcs: dict[str, Any] = {}  # the channel's callables, by method path
        self.is_listed = True  # whether the last directory lists it
        self.outstanding = 0  # number of calls that it has not answered
        self.avoided_until_s = 0.0  # time on the monotonic clock until which it gets no calls because it failed
        self.avoided_s = AVOIDED_S[0]

    @cached_property
    def is_here(self) -> bool:
        """Whether the member is on this machine: a socket can be bound to its host's first address."""
        host = self.address.rpartition(":")[0].strip("[]")
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
        except OSError:
            return False
        return True


class Members:
    """All members of a cluster. Thread-safe.

    A channel is opened before the first call to a member, and closed, on any thread, when the member has left and answered all
    calls.
    """

    def __init__(self, open_channel: Callable[[str], Any], close_channel: Callable[[Any], None]) -> None:
        self._open_channel = open_channel
        self._close_channel = close_channel
        self._lock = threading.Lock()
        self._members: dict[str, MemberConnection] = {}
        self._leaving: set[MemberConnection] = set()  # no longer listed, but with unanswered calls
        self._serving: Sequence[MemberConnection] = ()
        self._of_model: dict[str, list[MemberConnection]] = {}
        self._suspects: set[MemberConnection] = set()  # members whose last call failed
        self._sharing: MemberConnection | None = None
        self._of_sequence: dict[tuple[str, bytes], MemberConnection] = {}

    @property
    def is_sharing(self) -> bool:
        """Whether a member may have shared memory of this client registered."""
        return self._sharing is not None

    def take(self, directory: cluster_pb2.Directory) -> None:
        with self._lock:
            known, self._members = self._members, {}
            serving: list[MemberConnection] = []
            of_model: dict[str, list[MemberConnection]] = {}
            for entry in directory.members:
                member = known.pop(entry.id) if entry.id in known else MemberConnection(entry.grpc_address)
                self._members[entry.id] = member
                if entry.state == cluster_pb2.Member.SERVING:
                    serving.append(member)
                    for model in entry.models:
                        of_model.setdefault(model, []).append(member)
            self._serving, self._of_model = serving, of_model
            self._suspects.difference_update(known.values())
            for member in known.values():
                member.is_listed = False
                self._leaving.add(member)
                self._close_if_done(member)

    def pick(self, model: str, *, shared: bool = False) -> MemberConnection:
        """Choose the member for a call, which must be passed to `settle` afterwards; the model "" stands for any member.

        A model that no listed member serves may just have been loaded; then any member is chosen, and its answer decides. All
        calls about shared memory of this client go to one member, on this machine.

        Raises ServerUnavailable: no member takes requests; Unsupported: no member on this machine serves the model.
        """
        with self._lock:
            serving = self._of_model.get(model, self._serving) if model else self._serving
            if not serving:
                draining = f"; {len(self._members)} are about to leave" if self._members else ""
                raise ServerUnavailable(f"no member of the cluster takes requests now{draining}", repeat=Repeat.SAFE)
            member = self._with_shared_memory(serving, model) if shared else self._less_loaded(serving)
            if member.channel is None:
                member.channel = self._open_channel(member.address)
            member.outstanding += 1
            return member

    def pick_for_sequence(self, model: str, sequence: bytes, *, starts: bool, ends: bool) -> MemberConnection:
        """Choose the member for one step of a sequence, whose state only the member of its first step has. See `pick` for
        errors.
        """
        key = (model, sequence)
        with self._lock:
            member = self._of_sequence.pop(key, None)
            if member is not None and member.is_listed and not starts:
                member.outstanding += 1
            else:
                member = None
        member = member or self.pick(model)
        if not ends:
            with self._lock:
                self._of_sequence[key] = member
                if len(self._of_sequence) > MAX_SEQUENCES:
                    del self._of_sequence[next(iter(self._of_sequence))]
        return member

    def settle(self, member: MemberConnection, failure: ClientError | None = None) -> None:
        """Record that a call has ended. A member that refused it or was unreachable is avoided for a moment."""
        with self._lock:
            member.outstanding -= 1
            if isinstance(failure, ServerUnavailable | Overloaded):
                self._avoid(member, failure.retry_after_s)
            elif member in self._suspects:
                self._suspects.remove(member)
                member.avoided_s = AVOIDED_S[0]
            self._close_if_done(member)

    def has_other(self, model: str) -> bool:
        """Return whether a call that failed at one member can be repeated at once at another one."""
        now_s = time.monotonic()
        with self._lock:
            return any(self._is_usable(member, now_s) for member in self._of_model.get(model, self._serving))

    def take_channels(self) -> list[Any]:
        """Return all open channels, for the caller to close, and forget the members."""
        with self._lock:
            members = [*self._members.values(), *self._leaving]
            self._members, self._serving, self._of_model = {}, (), {}
            self._leaving.clear()
            return [member.channel for member in members if member.channel is not None]

    def _less_loaded(self, members: Sequence[MemberConnection]) -> MemberConnection:
        if self._suspects:
            now_s = time.monotonic()
            members = [member for member in members if self._is_usable(member, now_s)] or members
        count = len(members)
        if count == 1:
            return members[0]
        one = int(random() * count)  # noqa: S311  (spreads load)
        other = int(random() * (count - 1))  # noqa: S311  (as above)
        first, second = members[one], members[other + (other >= one)]
        return first if first.outstanding <= second.outstanding else second

    def _is_usable(self, member: MemberConnection, now_s: float) -> bool:
        # One call at a time tests a suspect: as it has the fewest outstanding calls, it would otherwise get all of them.
        return member not in self._suspects or (member.avoided_until_s <= now_s and not member.outstanding)

    def _with_shared_memory(self, serving: Sequence[MemberConnection], model: str) -> MemberConnection:
        if self._sharing is None or self._sharing not in serving:
            here = [member for member in serving if member.is_here]
            if not here:
                what = f" that serves model {model!r}" if model else ""
                raise Unsupported(
                    f"shared memory needs a member of the cluster{what} on this machine, and there is none; send the tensors"
                )
            self._sharing = self._less_loaded(here)
        return self._sharing

    def _avoid(self, member: MemberConnection, hint_s: float | None) -> None:
        now_s = time.monotonic()
        if member.avoided_until_s > now_s:
            return  # several calls that failed together count once
        longest_s = AVOIDED_S[1]
        member.avoided_until_s = now_s + min(longest_s, hint_s or member.avoided_s)
        member.avoided_s = min(longest_s, 2 * member.avoided_s)
        if member.is_listed:
            self._suspects.add(member)

    def _close_if_done(self, member: MemberConnection) -> None:
        if member in self._leaving and not member.outstanding:
            self._leaving.remove(member)
            if member.channel is not None:
                self._close_channel(member.channel)
