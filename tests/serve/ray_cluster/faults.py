"""Faults of a cluster under load, and the time until it is restored."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness.models import save_models
from halfserve import Client, ClientError, RetryPolicy
from tests.serve.faults.soaking.clients import TIMEOUT_S, Work, ask_affine, ask_flip, ask_steps, clients
from tests.serve.faults.soaking.tally import Tally
from tests.serve.ray_cluster.machines import (
    CONTROLLER,
    RAYLET,
    REPLICA,
    SERVER,
    Machines,
    kill_all,
    machines,
    processes_of,
    serving,
    until,
)
from tests.serve.ray_cluster.network import Host, Network, missing

MEMBERS = 2
ANSWERS = 200  # answers that clients receive between two faults
WORKS: tuple[Work, ...] = (ask_affine, ask_flip)  # clients use them in turn
RETRIES = RetryPolicy(retries=8, wait_for_server=True)
OPTIONS = ("--warm-up-seconds", "0", "--lame-duck-seconds", "1")


@dataclass
class Restored:
    seconds: float = 0.0


@dataclass
class Cluster:
    """A cluster with room for one member per machine, and clients that send requests continuously."""

    machines: Machines  # machines, of which the first is Ray's head and has no room for a member
    repository: Path  # repository of the models in `benchmarks.harness.models`
    tally: Tally = field(default_factory=Tally)  # results of the requests, by model
    known: list[str] = field(default_factory=list)  # addresses of members, the most recently seen first
    isolated: Host | None = None  # machine that may have an old directory and is not asked
    upgrades: int = 0  # number of times that all members were replaced

    def serving(self) -> dict[str, str]:
        """Addresses of the members that serve, by id."""
        found = serving([address for address in self.known if self.isolated is None or not self.isolated.has(address)])
        self.known = [*found.values(), *(address for address in self.known if address not in found.values())]
        return found

    def run(self, *options: str) -> None:
        printed = self.machines.done("run", str(self.repository), "--detach", "--first-port", "0", *options)
        self.known += printed.strip().rpartition("cluster://")[2].split(",")

    @contextmanager
    def restored(self) -> Iterator[Restored]:
        """Wait after the block until there are as many members as before it, at least one of them new."""
        before, restored, began_s = self.serving(), Restored(), time.monotonic()
        yield restored
        until(lambda: len(found := self.serving()) == len(before) and set(found) - set(before), "new member")
        restored.seconds = time.monotonic() - began_s

    def wait_for_answers(self) -> None:
        """Wait until the clients have received answers, so that the cluster is in use at the next fault."""
        enough = self.tally.answered().total() + ANSWERS
        until(lambda: self.tally.answered().total() >= enough, "answers")

    @contextmanager
    def clients(self, count: int) -> Iterator[None]:
        """Clients that send one request after the other and check every answer; they end with the block."""
        works = [WORKS[number % len(WORKS)] for number in range(count)]
        with clients(self.address, works, self.tally, retries=RETRIES):
            self.wait_for_answers()
            yield
            self.wait_for_answers()

    @property
    def address(self) -> str:
        return f"cluster://{','.join(self.known)}"


@contextmanager
def idle_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster with room for one more member; where possible, each machine can be cut off from the network."""
    save_models(folder)
    with machines([0, *[1] * (MEMBERS + 1)], apart=True, redis=True) as found:
        cluster = Cluster(found, folder)
        cluster.run("--replicas", str(MEMBERS), "--", *OPTIONS)
        yield cluster


@contextmanager
def cluster_under_load(folder: Path, count: int = 4) -> Iterator[Cluster]:
    with idle_cluster(folder) as cluster, cluster.clients(count):
        yield cluster


def kill_server(cluster: Cluster) -> float:
    """Send SIGKILL to one server's process."""
    with cluster.restored() as restored:
        cluster.machines.kill(SERVER)
    return restored.seconds


def kill_replica(cluster: Cluster) -> float:
    """Send SIGKILL to one of Ray Serve's replicas, which ends its server too."""
    with cluster.restored() as restored:
        cluster.machines.kill(REPLICA)
    return restored.seconds


def kill_machine(cluster: Cluster) -> float:
    """Kill all processes of a machine at once, for good; then another machine joins."""
    with cluster.restored() as restored:
        kill_all(cluster.machines.place(SERVER)[1])
    cluster.machines.start(1)
    return restored.seconds


def cut_off(cluster: Cluster) -> float:
    """Cut a machine off completely, until its member is replaced."""
    return _isolate(cluster, _network(cluster).cut)


def cut_off_from_machines(cluster: Cluster) -> float:
    """Cut a machine off from Ray's head and other machines, but not from clients, until its member is replaced."""
    return _isolate(cluster, _network(cluster).cut_from_machines, serves=True)


def _isolate(cluster: Cluster, cut: Callable[[Host], AbstractContextManager[None]], *, serves: bool = False) -> float:
    """Cut a machine off until its member is replaced; then check that its processes have ended, and restart Ray there."""
    found, serve = cluster.machines, cluster.serving().values()
    members = {mark: address for mark in found.nodes for address in serve if found.host(mark).has(address)}
    controller = found.place(CONTROLLER)[1]  # it continues there alone, beside its replacement
    mark = controller if controller in members else next(iter(members))
    address, host = members[mark], found.host(mark)
    with ExitStack() as isolated, cluster.restored() as restored:
        isolated.enter_context(cut(host))
        cluster.isolated = host
        if serves:  # asked at once: Ray ends what it has lost, on a busy machine before there is a replacement
            with Client(address, timeout_s=TIMEOUT_S) as client:
                ask_affine(client, np.random.default_rng(), cluster.tally)
    until(lambda: not [*processes_of(mark, SERVER), *processes_of(mark, RAYLET)], "end of what was cut off")
    kill_all(mark)  # some programs of Ray do not notice the loss
    cluster.isolated = None
    found.start(1, mark)
    until(
        lambda: len(now := cluster.serving()) == MEMBERS and address not in now.values(),
        "as many members as wanted",
    )
    return restored.seconds


def restart_head(cluster: Cluster) -> float:
    """Kill all processes of Ray's head at once, and restart it; it is restored when it knows all members."""
    head, began_s = cluster.machines.nodes[0], time.monotonic()
    kill_all(head)
    cluster.machines.start(0, head)

    def is_back() -> bool:
        asked = cluster.machines.run("status", "--json")
        status = {} if asked.returncode else json.loads(asked.stdout)
        return status.get("running") == len(status.get("members", ())) == MEMBERS and not status["is_recovering"]

    until(is_back, "head")
    return time.monotonic() - began_s


def _network(cluster: Cluster) -> Network:
    if cluster.machines.network is None:
        raise SystemExit(f"machines cannot be cut off here: network namespaces need {missing()}")
    return cluster.machines.network


def kill_controller(cluster: Cluster) -> float:
    """Send SIGKILL to the controller; it is restored when a member answers for the whole cluster."""
    cluster.machines.kill(CONTROLLER)
    began_s = time.monotonic()

    def answers() -> bool:
        try:
            with Client(cluster.known[0], timeout_s=2, retries=0) as client:
                return bool(client.models())
        except ClientError:
            return False

    until(answers, "controller")
    return time.monotonic() - began_s


def reload_models(cluster: Cluster) -> float:
    """Reload all models, at one member first."""
    began_s = time.monotonic()
    cluster.machines.done("reload")
    return time.monotonic() - began_s


def replace_members(cluster: Cluster) -> float:
    """Replace members by ones with other options, each of which starts before an old one leaves."""
    before, began_s = set(cluster.serving()), time.monotonic()
    cluster.upgrades += 1
    cluster.run("--replicas", str(MEMBERS), "--", *OPTIONS, "--max-queue-size", str(1000 + cluster.upgrades))
    until(lambda: len(found := cluster.serving()) == MEMBERS and not before & set(found), "new members")
    return time.monotonic() - began_s


FAULTS: dict[str, Callable[[Cluster], float]] = {
    "server killed": kill_server,
    "replica killed": kill_replica,
    "machine killed": kill_machine,
    "machine cut off": cut_off,
    "machine cut off from machines": cut_off_from_machines,
    "controller killed": kill_controller,
    "head restarted": restart_head,
    "models reloaded": reload_models,
    "members replaced": replace_members,
}


def left_out(cluster: Cluster) -> dict[str, str]:
    """Faults that cannot be caused on this machine, with the reason."""
    found = {}
    if cluster.machines.network is None:
        found = dict.fromkeys(("machine cut off", "machine cut off from machines"), f"network namespaces need {missing()}")
    if not cluster.machines.redis:
        found["head restarted"] = "the program redis-server is not installed"
    return found


def scale_up(cluster: Cluster, count: int = 8) -> tuple[float, float]:
    """Apply load that one member cannot carry until there are two; then none until there is one again.

    Returns:
        Seconds until a second member serves, and seconds until it has left.
    """
    cluster.run("--replicas", f"1:{MEMBERS}", "--scale-down-seconds", "10", "--", *OPTIONS)
    until(lambda: len(cluster.serving()) == 1, "a single member")
    began_s = time.monotonic()
    with clients(cluster.address, [ask_steps] * count, cluster.tally, retries=RETRIES):
        until(lambda: len(cluster.serving()) == MEMBERS, "more members under load")
        up_s = time.monotonic() - began_s
    began_s = time.monotonic()
    until(lambda: len(cluster.serving()) == 1, "fewer members without load")
    return up_s, time.monotonic() - began_s
