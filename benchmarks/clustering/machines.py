"""Ray on this machine as if it were several, and `halfserve cluster` on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import grpc

from benchmarks.clustering.network import Host, Network, missing, network
from halfserve.protos.cluster_pb2 import Directory, Member, WatchRequest

T = TypeVar("T")
WAIT_S = 240.0  # on a busy machine of two cores; what takes less returns at once
MARK = "BENCHMARK_MACHINE"  # the variable that each process of a machine inherits
REDIS = "redis-server"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# Python processes that nothing here asks for: they would take longer to start than all else.
WITHOUT = ["--include-log-monitor=false"]
HEAD_WITHOUT = ["--include-dashboard=false", "--no-monitor"]
# Ray's own notice of a dead machine, in seconds instead of a quarter of a minute.
FAST = {"RAY_health_check_initial_delay_ms": "500", "RAY_health_check_period_ms": "500"}
FAST |= {"RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "3"}
# A busy machine takes its time to start Ray, and its head again, for which the others would wait for 60 s.
FAST |= dict.fromkeys(("RAY_raylet_start_wait_time_s", "RAY_gcs_rpc_server_reconnect_timeout_s"), f"{WAIT_S:.0f}")
FAST |= {"RAY_worker_niceness": "0"}  # of the servers too, where Ray's default is 15
FAST |= {"RAY_worker_register_timeout_seconds": str(int(WAIT_S))}  # 60 by default: then a slow start would begin again
SERVER, REPLICA, CONTROLLER = ("halfserve", "serve"), ("ray::ServeReplica",), ("ray::ControllerActor",)
RAYLET = ("raylet/raylet",)


class NotInTimeError(Exception):
    """Something that was waited for has not come."""


def until(holds: Callable[[], T], what: str, limit_s: float = WAIT_S) -> T:
    """The first true value.

    Raises:
        NotInTimeError: there is none in time.
    """
    ends_s = time.monotonic() + limit_s
    while not (found := holds()):
        if time.monotonic() > ends_s:
            raise NotInTimeError(f"no {what} within {limit_s:g} s")
        time.sleep(0.05)
    return found


def processes_of(mark: str, words: Sequence[str] = ()) -> list[int]:
    """The living processes of one machine whose command has these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone, or another user's
            is_there = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if is_there and command and " ".join(words) in command:
                found.append(int(folder.name))
    return found


def kill_all(mark: str) -> None:
    """End a machine as a loss of power does: all of its processes at once."""

    def is_gone() -> bool:
        pids = processes_of(mark)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    until(is_gone, f"end of {mark}")


class Machines:
    """A Ray cluster of several machines that are this one.

    Attributes:
        address: of Ray's head; "" before it is started.
        nodes: marks of the machines that were started, the head first.
        network: in which each machine has an address of its own; None: all have this machine's.
        redis: HOST:PORT, where the head keeps what it knows; "" for nowhere: it cannot be started again.
    """

    def __init__(
        self, folder: Path, variables: Mapping[str, str] = MappingProxyType({}), network: Network | None = None, redis: str = ""
    ) -> None:
        """No machine yet; their processes inherit these variables."""
        self._folder = folder
        self._variables = variables
        self._current = folder / "ray" / "ray_current_cluster"
        self._hosts: dict[str, Host] = {}
        self.address = ""
        self.nodes: list[str] = []
        self.network = network
        self.redis = redis

    def mark(self) -> str:
        """The mark of another machine, which has a folder for temporary files to itself."""
        mark = uuid.uuid4().hex
        self.nodes.append(mark)
        (self._folder / mark[:8]).mkdir()
        if self.network is not None:
            self._hosts[mark] = self.network.add()
        return mark

    def host(self, mark: str) -> Host:
        """A machine's place in the network."""
        return self._hosts[mark]

    def environment(self, mark: str) -> dict[str, str]:
        """What processes of a machine inherit."""
        own = {"RAY_TMPDIR": str(self._folder), "TMPDIR": str(self._folder / mark[:8]), MARK: mark}
        own |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        if self.redis and mark == self.nodes[0]:
            own["RAY_REDIS_ADDRESS"] = self.redis
        cleaned = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HALFSERVE_"))}
        return cleaned | own | FAST | dict(self._variables)

    def start(self, cpus: int, mark: str = "") -> str:
        """Start a machine, the first one as Ray's head, or one that has ended again. Returns its mark.

        Raises:
            SystemExit: Ray does not start; with what it says.
        """
        mark = mark or self.mark()
        role = [f"--address={self.address}"]
        if mark == self.nodes[0]:
            role = ["--head", f"--port={self.address.rpartition(':')[2] or 0}", *HEAD_WITHOUT]
            # A head that has ended leaves it behind, and Ray would take raylets of other machines here for that head.
            self._current.unlink(missing_ok=True)
        host = self._hosts.get(mark)
        if host is not None:
            role.append(f"--node-ip-address={host.address}")
        memory = f"--object-store-memory={100 * 2**20}"
        command = [*self._enter(mark), *RAY, "start", *role, *WITHOUT, f"--num-cpus={cpus}", memory]
        done = subprocess.run(command, env=self.environment(mark), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"Ray does not start:\n{done.stdout}{done.stderr}")
        self.address = self.address or self._current.read_text().strip()
        return mark

    def place(self, words: Sequence[str]) -> tuple[int, str]:
        """A process whose command has these words, and the mark of its machine.

        Raises:
            NotInTimeError: there is none.
        """

        def found() -> list[tuple[int, str]]:
            return [(pid, mark) for mark in self.nodes for pid in processes_of(mark, words)]

        return until(found, f"process {' '.join(words)}")[0]

    def kill(self, words: Sequence[str]) -> None:
        """Kill a process whose command has these words."""
        os.kill(self.place(words)[0], signal.SIGKILL)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "halfserve", "cluster", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `halfserve cluster ...` to its end, on the head."""
        environment = {**self.environment(self.nodes[0]), "RAY_ADDRESS": self.address}
        command = [*self._enter(self.nodes[0]), *self.command(*arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)

    def done(self, *arguments: str) -> str:
        """What `halfserve cluster ...` prints.

        Raises:
            SystemExit: it fails; with what it says.
        """
        done = self.run(*arguments)
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.done("status", "--json"))
        return status

    def _enter(self, mark: str) -> list[str]:
        """What stands before a command of a machine."""
        return self._hosts[mark].enter if mark in self._hosts else []


@contextmanager
def machines(
    cpus: Sequence[int],
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    apart: bool = False,
    redis: bool = False,
) -> Iterator[Machines]:
    """Ray on as many machines as there are numbers of cores; nothing of it is left after the block.

    Args:
        cpus: cores of each machine, the head first.
        variables: of the environment, for all of their processes.
        apart: give each an address of its own, where that can be done here.
        redis: have the head keep what it knows in Redis, where that is installed.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        between = stack.enter_context(network()) if apart and not missing() else None
        host = "127.0.0.1" if between is None else between.address
        found = Machines(folder, variables, between, stack.enter_context(_redis(host)) if redis and shutil.which(REDIS) else "")
        try:
            for count in cpus:
                found.start(count)
            yield found
        finally:
            for mark in found.nodes:
                kill_all(mark)


@contextmanager
def _redis(host: str) -> Iterator[str]:
    """Redis that keeps nothing on disk; its HOST:PORT."""
    with socket.socket() as free:
        free.bind((host, 0))
        port = str(free.getsockname()[1])
    # Ray writes to a socket of this machine, or of a bridge that has no way out.
    command = [REDIS, "--bind", host, "--port", port, "--protected-mode", "no", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield f"{host}:{port}"
        finally:
            process.kill()


def serving(addresses: Sequence[str]) -> dict[str, str]:
    """The members that serve, as the first of these that answers says: address by id; empty if none answers."""
    for address in addresses:
        with grpc.insecure_channel(address) as channel:
            watch = channel.unary_stream(
                "/halfserve.Cluster/Watch",
                request_serializer=WatchRequest.SerializeToString,
                response_deserializer=Directory.FromString,
            )
            answers = watch(WatchRequest(), timeout=2)
            try:
                directory = next(answers)
            except grpc.RpcError:
                continue
            answers.cancel()
            return {one.id: one.grpc_address for one in directory.members if one.state == Member.SERVING and one.models}
    return {}
