"""Ray on this machine as if on several machines, and `halfserve cluster` on it."""

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

from halfserve.protos.cluster_pb2 import Directory, Member, WatchRequest
from tests.serve.ray_cluster.network import Host, Network, missing, network

T = TypeVar("T")
WAIT_S = 240.0  # on a busy machine with two cores; faster operations return at once
POLL_S = 0.05  # Ray's processes tell nobody when they begin or end
MARK = "BENCHMARK_MACHINE"  # environment variable that each process of a machine inherits
REDIS = "redis-server"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# Excludes Python processes that are not needed here and would take longest to start.
WITHOUT = ["--include-log-monitor=false"]
HEAD_WITHOUT = ["--include-dashboard=false", "--no-monitor"]
# Ray reports a dead machine within seconds, instead of a quarter of a minute.
FAST = {"RAY_health_check_initial_delay_ms": "500", "RAY_health_check_period_ms": "500"}
FAST |= {"RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "3"}
# A busy machine may start Ray and its head slowly; by default the others would wait only 60 s for it.
FAST |= dict.fromkeys(("RAY_raylet_start_wait_time_s", "RAY_gcs_rpc_server_reconnect_timeout_s"), f"{WAIT_S:.0f}")
FAST |= {"RAY_worker_niceness": "0"}  # priority of workers, and so of the servers; Ray's default is 15
FAST |= {"RAY_worker_register_timeout_seconds": str(int(WAIT_S))}  # 60 by default, after which a slow start would begin again
SERVER, REPLICA, CONTROLLER = ("halfserve", "serve"), ("ray::ServeReplica",), ("ray::ControllerActor",)
RAYLET = ("raylet/raylet",)


class NotInTimeError(Exception):
    """An awaited condition did not become true in time."""


def until(holds: Callable[[], T], what: str, limit_s: float = WAIT_S) -> T:
    ends_s = time.monotonic() + limit_s
    while not (found := holds()):
        if time.monotonic() > ends_s:
            raise NotInTimeError(f"no {what} within {limit_s:g} s")
        time.sleep(POLL_S)
    return found


def processes_of(mark: str, words: Sequence[str] = ()) -> list[int]:
    """The living processes of one machine whose command has these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            is_there = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if is_there and command and " ".join(words) in command:
                found.append(int(folder.name))
    return found


def kill_all(mark: str) -> None:
    """End a machine as a power loss does: all of its processes at once."""

    def is_gone() -> bool:
        pids = processes_of(mark)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    until(is_gone, f"end of {mark}")


class Machines:
    """A Ray cluster of several simulated machines on this one."""

    def __init__(
        self, folder: Path, variables: Mapping[str, str] = MappingProxyType({}), network: Network | None = None, redis: str = ""
    ) -> None:
        """Start without machines; their processes will inherit these variables."""
        self._folder = folder
        self._variables = variables
        self._current = folder / "ray" / "ray_current_cluster"
        self._hosts: dict[str, Host] = {}
        self.address = ""  # address of Ray's head; "" before it is started
        self.nodes: list[str] = []  # marks of the started machines, the head first
        self.network = network  # network with an address for each machine; None if all use this machine's address
        self.redis = redis  # HOST:PORT of the head's storage; "" for none, in which case the head cannot be restarted

    def mark(self) -> str:
        """Make the mark of a further machine, which has its own folder for temporary files."""
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
        """Environment variables of a machine's processes."""
        own = {"RAY_TMPDIR": str(self._folder), "TMPDIR": str(self._folder / mark[:8]), MARK: mark}
        own |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        if self.redis and mark == self.nodes[0]:
            own["RAY_REDIS_ADDRESS"] = self.redis
        cleaned = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HALFSERVE_"))}
        return cleaned | own | FAST | dict(self._variables)

    def start(self, cpus: int, mark: str = "") -> str:
        """Start a machine, the first one as Ray's head, or restart one that has ended. Returns its mark."""
        mark = mark or self.mark()
        role = [f"--address={self.address}"]
        if mark == self.nodes[0]:
            role = ["--head", f"--port={self.address.rpartition(':')[2] or 0}", *HEAD_WITHOUT]
            # A head that has ended leaves this file behind, and Ray would take raylets of other machines here for that head.
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
        """Find a process whose command has these words; returns its id and the mark of its machine."""

        def found() -> list[tuple[int, str]]:
            return [(pid, mark) for mark in self.nodes for pid in processes_of(mark, words)]

        return until(found, f"process {' '.join(words)}")[0]

    def kill(self, words: Sequence[str]) -> None:
        """Kill a process whose command has these words."""
        os.kill(self.place(words)[0], signal.SIGKILL)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "halfserve", "cluster", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment(self.nodes[0]), "RAY_ADDRESS": self.address}
        command = [*self._enter(self.nodes[0]), *self.command(*arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)

    def done(self, *arguments: str) -> str:
        done = self.run(*arguments)
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout

    def status(self, name: str = "halfserve") -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.done("status", "--json", "--name", name))
        return status

    def _enter(self, mark: str) -> list[str]:
        """Start of a command that runs on a machine."""
        return self._hosts[mark].enter if mark in self._hosts else []


@contextmanager
def machines(
    cpus: Sequence[int],
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    apart: bool = False,
    redis: bool = False,
) -> Iterator[Machines]:
    """Run Ray on one machine per number of cores; everything is removed after the block.

    Args:
        cpus: cores of each machine, the head first.
        variables: environment variables for all of their processes.
        apart: give each machine its own address, if that is possible here.
        redis: have the head store its state in Redis, if that is installed.
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
    """Run Redis without persistence; yields its HOST:PORT."""
    with socket.socket() as free:
        free.bind((host, 0))
        port = str(free.getsockname()[1])
    # Ray writes to a socket of this machine, or of a bridge without a way out.
    command = [REDIS, "--bind", host, "--port", port, "--protected-mode", "no", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield f"{host}:{port}"
        finally:
            process.kill()


def serving(addresses: Sequence[str]) -> dict[str, str]:
    """Addresses of the members that serve, by id, as reported by the first of `addresses` that answers; empty if none does."""
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
