"""What is done to a cluster under load, and how long it takes until all is as before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.clustering.machines import CONTROLLER, REPLICA, SERVER, Machines, kill_all, machines, serving, until
from benchmarks.soaking.clients import TIMEOUT_S, ask_affine
from benchmarks.soaking.models import STEPS, save_models
from benchmarks.soaking.tally import Tally
from halfserve import Client, ClientError, RetryPolicy

MEMBERS = 2
COUNTED = 30_000  # steps of the counting model: some 30 ms
ANSWERS = 200  # that clients get between two faults
RETRIES = RetryPolicy(retries=8, wait_for_server=True)
OPTIONS = ("--warm-up-seconds", "0", "--lame-duck-seconds", "1")


@dataclass
class Restored:
    """How long it took until all was as before."""

    seconds: float = 0.0


@dataclass
class Cluster:
    """A cluster with room for one member a machine, and clients that never stop asking.

    Attributes:
        machines: the first one is Ray's head, and has no room for a member.
        repository: of the models that `benchmarks.soaking.models` describes.
        tally: what became of the requests.
        known: addresses of members, those that were seen last first.
        upgrades: how often all members were replaced.
    """

    machines: Machines
    repository: Path
    tally: Tally = field(default_factory=Tally)
    known: list[str] = field(default_factory=list)
    upgrades: int = 0

    def serving(self) -> dict[str, str]:
        """The members that serve: address by id."""
        found = serving(self.known)
        self.known = [*found.values(), *(address for address in self.known if address not in found.values())]
        return found

    def run(self, *options: str) -> None:
        """Deploy it, or change how it is deployed."""
        printed = self.machines.done("run", str(self.repository), "--detach", "--first-port", "0", *options)
        self.known += printed.strip().rpartition("cluster://")[2].split(",")

    @contextmanager
    def restored(self) -> Iterator[Restored]:
        """Wait after the block until there are as many members as before it, one of them new."""
        before, restored, began_s = self.serving(), Restored(), time.monotonic()
        yield restored
        until(lambda: len(found := self.serving()) == len(before) and set(found) - set(before), "new member")
        restored.seconds = time.monotonic() - began_s

    def wait_for_answers(self) -> None:
        """Only what is in use is worth a fault."""
        enough = sum(self.tally.counted().answered.values()) + ANSWERS
        until(lambda: sum(self.tally.counted().answered.values()) >= enough, "answers")


@contextmanager
def cluster_under_load(folder: Path, clients: int = 4) -> Iterator[Cluster]:
    """Members that serve, with room for one more, and clients that ask one thing after the other and check every answer."""
    save_models(folder)
    with machines([0, *[1] * (MEMBERS + 1)]) as found:
        cluster = Cluster(found, folder)
        cluster.run("--replicas", str(MEMBERS), "--", *OPTIONS)
        stop = threading.Event()
        address = f"cluster://{','.join(cluster.known)}"
        threads = [threading.Thread(target=_ask, args=(address, seed, stop, cluster.tally)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        try:
            cluster.wait_for_answers()
            yield cluster
            cluster.wait_for_answers()
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def _ask(address: str, seed: int, stop: threading.Event, tally: Tally) -> None:
    random = np.random.default_rng(seed)
    with Client(address, timeout_s=TIMEOUT_S, retries=RETRIES) as client:
        while not stop.is_set():
            try:
                ask_affine(client, random, tally)
            except ClientError as error:
                tally.fault(f"{error.code}: {error}")


def kill_server(cluster: Cluster) -> float:
    """SIGKILL of one server's process."""
    with cluster.restored() as restored:
        cluster.machines.kill(SERVER)
    return restored.seconds


def kill_replica(cluster: Cluster) -> float:
    """SIGKILL of one of Ray Serve's replicas, which takes its server along."""
    with cluster.restored() as restored:
        cluster.machines.kill(REPLICA)
    return restored.seconds


def kill_machine(cluster: Cluster) -> float:
    """All processes of a machine at once; then another machine joins."""
    with cluster.restored() as restored:
        kill_all(cluster.machines.place(SERVER)[1])
    cluster.machines.start(1)
    return restored.seconds


def kill_controller(cluster: Cluster) -> float:
    """SIGKILL of the controller; it is back when a member answers for the whole cluster."""
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
    """All models again, at one member first."""
    began_s = time.monotonic()
    cluster.machines.done("reload")
    return time.monotonic() - began_s


def replace_members(cluster: Cluster) -> float:
    """Members with other options, each of which starts before an old one leaves."""
    before, began_s = set(cluster.serving()), time.monotonic()
    cluster.upgrades += 1
    cluster.run("--replicas", str(MEMBERS), "--", *OPTIONS, "--max-queue-size", str(1000 + cluster.upgrades))
    until(lambda: len(found := cluster.serving()) == MEMBERS and not before & set(found), "new members")
    return time.monotonic() - began_s


FAULTS: dict[str, Callable[[Cluster], float]] = {
    "server killed": kill_server,
    "replica killed": kill_replica,
    "machine killed": kill_machine,
    "controller killed": kill_controller,
    "models reloaded": reload_models,
    "members replaced": replace_members,
}


def scale_up(cluster: Cluster, clients: int = 8) -> tuple[float, float]:
    """Load that one member cannot carry, until there are two; then none, until there is one again.

    Returns:
        Seconds until a second member serves, and until it has left.
    """
    cluster.run("--replicas", f"1:{MEMBERS}", "--scale-down-seconds", "10", "--", *OPTIONS)
    until(lambda: len(cluster.serving()) == 1, "a single member")
    stop = threading.Event()
    address = f"cluster://{','.join(cluster.known)}"
    threads = [threading.Thread(target=_count, args=(address, stop, cluster.tally)) for _ in range(clients)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(cluster.serving()) == MEMBERS, "more members under load")
        up_s = time.monotonic() - began_s
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    began_s = time.monotonic()
    until(lambda: len(cluster.serving()) == 1, "fewer members without load")
    return up_s, time.monotonic() - began_s


def _count(address: str, stop: threading.Event, tally: Tally) -> None:
    """Keep a member's models computing."""
    with Client(address, timeout_s=TIMEOUT_S, retries=RETRIES) as client:
        while not stop.is_set():
            try:
                began = time.monotonic()
                answer = client.infer(STEPS, {"n": np.array([COUNTED], np.int64)})
                if answer["y"].tolist() != [COUNTED]:
                    tally.fault(f"counted to {answer['y']}")
                tally.right(STEPS, began)
            except ClientError as error:
                tally.fault(f"{error.code}: {error}")
