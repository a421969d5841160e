"""Follows the directory of a cluster, starting from any of its members."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import grpc

from halfserve.protos.cluster_pb2 import Directory, Member, WatchRequest
from halfserve.serve.client.channel_settings import Headers
from halfserve.serve.client.errors import Cancelled, Repeat, ServerUnavailable, Unsupported, from_rpc_error

WATCH = "/halfserve.Cluster/Watch"
FIRST_ANSWER_S = 5.0  # time after which a member that has not answered is skipped
PAUSES_S = (0.1, 2.0)  # first and longest bound of the pause after all known addresses were tried
MAX_FORMER = 64  # members of earlier directories that may be tried again
LASTING_S = FIRST_ANSWER_S + 1.0  # a Watch that broke sooner than this is not retried without a pause


class DirectoryWatch:
    """Follows the directory on a thread of its own, so that callers on threads and on event loops share one.

    It watches one member at a time. When that member stops answering or drains, it tries another: a member of the last
    directory, an address given at the start, or a member of an earlier directory. (A member cut off from other machines
    together with a controller lists only itself; when it has ended, only former members know the others.) The last directory
    stays valid meanwhile. `take` is called with each new directory, on the thread.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        open_channel: Callable[[str], Any],
        headers: Callable[[], Headers],
        take: Callable[[Directory], None],
    ) -> None:
        self._given = tuple(addresses)
        self._open_channel = open_channel
        self._headers = headers
        self._take = take
        self._directory: Directory | None = None
        self._former: dict[str, None] = {}  # addresses of members of earlier directories, the latest last
        self._call: Any = None
        self._stopped = threading.Event()
        # Future that is done when there is a directory, or all addresses were tried without success.
        self.settled: Future[None] = Future()
        self.settled.set_running_or_notify_cancel()  # so that a caller that gives up does not cancel the future for the others
        self.failure: Exception | None = None  # reason why there is no directory; None if there is one
        self._thread = threading.Thread(target=self._run, name="cluster directory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the Watch call and the thread, without waiting for either; may be called on any thread."""
        self._stopped.set()
        call = self._call
        if call is not None:
            call.cancel()

    def join(self) -> None:
        self._thread.join()

    @property
    def has_directory(self) -> bool:
        return self._directory is not None

    def check(self) -> None:
        """Raise the failure if there is no directory.

        Raises:
            Unsupported: the server at an address is not a member of a cluster.
            ServerUnavailable: none of the addresses answers.
            Exception: the error of the first member that answered, or of the function that gives the token.
        """
        if self._directory is None and self.failure is not None:
            raise self.failure.with_traceback(None)

    def _run(self) -> None:
        asked: set[str] = set()
        failures: list[Exception] = []
        pause_s, longest_s = PAUSES_S
        while not self._stopped.is_set():
            address = next((one for one in self._addresses() if one not in asked), None)
            if address is None:
                self.failure = _most_telling(failures, self._given)
                self._settle()
                self._stopped.wait(random.uniform(pause_s / 2, pause_s))  # noqa: S311  (spreads clients over time)
                pause_s = min(longest_s, 2 * pause_s)
                asked, failures = set(), []
                continue
            asked.add(address)
            began_s = time.monotonic()
            try:
                self._follow(address)
            except Exception as error:  # noqa: BLE001  (raised where a caller waits for the directory)
                failures.append(error)
            if time.monotonic() - began_s > LASTING_S:
                asked, failures, pause_s = {address}, [], PAUSES_S[0]
        self.failure = self.failure or Cancelled("this client is closed; make a new one")
        self._settle()

    def _addresses(self) -> Iterable[str]:
        """Members that serve, then the given addresses, then former members.

        Each group is in random order, so that the watchers of a lost member spread over the others.
        """
        listed = self._directory.members if self._directory is not None else ()
        serving = [member.grpc_address for member in listed if member.state == Member.SERVING]
        return [*random.sample(serving, len(serving)), *random.sample(self._given, len(self._given)), *reversed(self._former)]

    def _follow(self, address: str) -> None:
        """Take in the directories of one member, until it stops answering or drains."""
        channel = self._open_channel(address)
        too_late = threading.Event()
        try:
            watch = channel.unary_stream(WATCH, WatchRequest.SerializeToString, Directory.FromString)
            call = self._call = watch(WatchRequest(), metadata=self._headers())
            if self._stopped.is_set():
                call.cancel()

            def give_up() -> None:
                too_late.set()
                call.cancel()

            limit = threading.Timer(FIRST_ANSWER_S, give_up)
            limit.daemon = True
            limit.start()
            try:
                for directory in call:
                    limit.cancel()
                    self._accept(directory)
                    if self._is_draining(address):
                        return
            finally:
                limit.cancel()
                call.cancel()
        except grpc.RpcError as error:
            if too_late.is_set():
                text = f"{address} did not say within {FIRST_ANSWER_S:g} s who the members of the cluster are"
                raise ServerUnavailable(text, repeat=Repeat.SAFE) from None
            failure = from_rpc_error(error, method="Watch", address=address, timeout_s=None)
            if isinstance(failure, Unsupported):
                text = f"the server at {address} is no member of a cluster; write its address without cluster://"
                raise Unsupported(text) from None
            raise failure from None
        finally:
            self._call = None
            channel.close()

    def _accept(self, directory: Directory) -> None:
        """Accept a directory unless it is older than the last, as a member may lag. A new cluster counts from 1 again."""
        known = self._directory
        if known is not None and directory.version <= known.version:
            ids = {member.id for member in known.members}
            if not ids.isdisjoint(member.id for member in directory.members):
                return
        for member in known.members if known is not None else ():
            self._former.pop(member.grpc_address, None)
            self._former[member.grpc_address] = None
        for address in list(self._former)[:-MAX_FORMER]:
            del self._former[address]
        self._directory = directory
        self._take(directory)
        self._settle()

    def _is_draining(self, address: str) -> bool:
        """Return whether the watched member is about to leave; it should not have to wait for its watchers."""
        listed = self._directory.members if self._directory is not None else ()
        return any(member.grpc_address == address and member.state == Member.DRAINING for member in listed)

    def _settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)


def _most_telling(failures: Sequence[Exception], addresses: Sequence[str]) -> Exception:
    """Choose the reason why no address gave a directory: an error that a member answered before a missing answer."""
    answered = (error for error in failures if not isinstance(error, ServerUnavailable))
    first = next(answered, None) or next(iter(failures), None)
    if isinstance(first, ServerUnavailable) and len(addresses) > 1:
        text = f"none of the cluster's addresses answers ({', '.join(addresses)}): {first}"
        return ServerUnavailable(text, repeat=Repeat.SAFE)
    return first or ServerUnavailable("no member of the cluster said who the members are", repeat=Repeat.SAFE)
