"""More models than a member holds; most requests are for few of them, later for few others."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton

from benchmarks.harness.models import save_shift
from benchmarks.harness.process_watch import look
from benchmarks.harness.server_process import server_process
from halfserve import Client, ClientError, RetryPolicy
from halfserve.protos.cluster_pb2 import Directory
from halfserve.serve.client.cluster.directory import DirectoryWatch
from tests.serve.faults.soaking.clients import TIMEOUT_S
from tests.serve.faults.soaking.tally import Tally
from tests.serve.ray_cluster.machines import SERVER, machines, processes_of, until

HIDDEN = 4096  # values per row: 1 MiB of weights in fp16, and twice that in memory on the CPU
FORWARDED = re.compile(r"^halfserve_requests_forwarded_total (\S+)$", re.MULTILINE)
OPTIONS = ("--warm-up-seconds", "0", "--lame-duck-seconds", "1")
RETRIES = RetryPolicy(retries=8, wait_for_server=True)
Array = np.ndarray[Any, Any]


class Placement:
    """Assignment of models to members, as one member reports it, and the number of changes.

    Attributes:
        members: current members by id, as cluster.proto messages.
        loads: model loads since the start, over all members.
        unloads: model unloads since the start, over all members.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.members: dict[str, Any] = {}  # cluster.proto messages by id
        self.loads = self.unloads = 0
        self._watch = DirectoryWatch(addresses, grpc.insecure_channel, lambda: (), self._take)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the directory within the block."""
        self._watch.start()
        try:
            yield
        finally:
            self._watch.stop()
            self._watch.join()

    def served(self) -> set[str]:
        return {name for member in self.members.values() for name in member.models}

    def _take(self, directory: Directory) -> None:
        before, self.members = self.members, {member.id: member for member in directory.members}
        for one in before.keys() & self.members.keys():
            then, now = set(before[one].models), set(self.members[one].models)
            self.loads += len(now - then)
            self.unloads += len(then - now)


class Favourites:
    """Models with requests by Zipf's law: the first gets twice as many as the second.

    Attributes:
        order: order of the models; may be replaced.
    """

    def __init__(self, shifts: Mapping[str, int]) -> None:
        """All models, with the number that each adds to its input."""
        self._shifts = shifts
        self.order = list(shifts)
        shares = 1 / np.arange(1, len(shifts) + 1)
        self._shares = shares / shares.sum()

    def question(self, random: np.random.Generator) -> tuple[str, Array, Array]:
        """A model, rows for it, and the expected answer."""
        name = self.order[random.choice(len(self.order), p=self._shares)]
        x = random.integers(-500, 500, (int(random.integers(1, 5)), 64)).astype(np.float16)
        return name, x, 2 * x + np.float16(self._shifts[name])


def _ask(address: str, seed: int, favourites: Favourites, stop: threading.Event, tally: Tally) -> None:
    random = np.random.default_rng(seed)
    with Client(address, timeout_s=TIMEOUT_S, retries=RETRIES) as client:
        while not stop.is_set():
            name, x, expected = favourites.question(random)
            began_s = time.monotonic()
            try:
                _check(name, client.infer(name, {"x": x})["y"], expected, began_s, tally)
            except ClientError as error:
                tally.fault(f"{name}: {error.code}: {error}")


def _ask_one_member(address: str, seed: int, favourites: Favourites, stop: threading.Event, tally: Tally) -> None:
    """Send requests like a client that knows of no cluster."""
    random = np.random.default_rng(seed)
    with triton.InferenceServerClient(address) as client:
        while not stop.is_set():
            name, x, expected = favourites.question(random)
            given = triton.InferInput("x", list(x.shape), "FP16")
            given.set_data_from_numpy(x)
            began_s = time.monotonic()
            try:
                answer = client.infer(name, [given], client_timeout=TIMEOUT_S)
                _check(name, answer.as_numpy("y"), expected, began_s, tally)
            except triton.InferenceServerException as error:
                tally.fault(f"{name}: {error}")


def _check(name: str, answer: Array, expected: Array, began_s: float, tally: Tally) -> None:
    if np.array_equal(answer, expected):
        tally.right(name, began_s)
    else:
        tally.fault(f"{name}: a wrong answer to {expected.shape}")


@contextmanager
def _asked(*asks: partial[None]) -> Iterator[None]:
    """Run clients that send one request after the other, within the block."""
    stop = threading.Event()
    threads = [threading.Thread(target=ask, kwargs={"stop": stop}) for ask in asks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _forwarded(http_address: str) -> int:
    """Inference requests that members have forwarded to others, in the whole cluster."""
    with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=TIMEOUT_S) as answer:
        found = FORWARDED.search(answer.read().decode())
    return int(float(found[1])) if found else 0


@dataclass
class Load:
    """Results of clients of the whole cluster and of a client of one member, and the cost of serving them.

    Attributes:
        ours: results of `cluster://` clients.
        foreign: results of the client of one member.
        forwarded: requests of each that one member forwarded to another.
        moves: loads and unloads of models, before and after the favourites changed.
    """

    ours: Tally = field(default_factory=Tally)
    foreign: Tally = field(default_factory=Tally)
    forwarded: list[int] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)

    def answered(self, name: str) -> int:
        return sum(tally.counted().answered.get(name, 0) for tally in (self.ours, self.foreign))


def _load(placement: Placement, favourites: Favourites, seconds: float, clients: int) -> Load:
    """Send requests to all members, then with other favourites, then to one member, for a third of the time each."""
    load, members = Load(), list(placement.members.values())
    address = f"cluster://{','.join(member.grpc_address for member in members)}"
    with _asked(*(partial(_ask, address, seed, favourites, tally=load.ours) for seed in range(clients))):
        for order in (favourites.order, favourites.order[::-1]):
            favourites.order = order
            loads, unloads = placement.loads, placement.unloads
            time.sleep(seconds / 3)
            load.moves.append((placement.loads - loads, placement.unloads - unloads))
    load.forwarded.append(_forwarded(members[0].http_address))
    with _asked(partial(_ask_one_member, members[0].grpc_address, clients, favourites, tally=load.foreign)):
        time.sleep(seconds / 3)
        until(lambda: _forwarded(members[0].http_address) > load.forwarded[0], "answers that one member has from others")
    load.forwarded.append(_forwarded(members[0].http_address) - load.forwarded[0])
    return load


def many_models(folder: Path, *, models: int, members: int, most: int, seconds: float, clients: int) -> dict[str, Any]:
    """Run a cluster in which no member has all models, and collect the results.

    Args:
        folder: folder for the models.
        models: number of models.
        members: number of servers.
        most: most models per server.
        seconds: time of load in seconds.
        clients: number of clients, each of which sends one request after the other.

    Returns:
        Results by name. "wrong_or_lost" must be empty, and so must "counted_otherwise", the models for which the cluster's
        statistics differ from the clients' counts.
    """
    shifts = {f"model-{number:03}": number for number in range(models)}
    for name, shift in shifts.items():
        save_shift(folder, name, shift, HIDDEN)
    with machines([members]) as found:
        given = ("--replicas", str(members), "--models-per-member", str(most), "--first-port", "0")
        printed = found.done("run", str(folder), "--detach", *given, "--", *OPTIONS)
        placement = Placement(printed.strip().rpartition("cluster://")[2].split(","))
        with placement.followed():
            until(lambda: placement.served() == shifts.keys(), "members for all models")
            load = _load(placement, Favourites(shifts), seconds, clients)
            there = list(placement.members.values())
        resident_mib = [round(look(pid).resident_mb) for pid in processes_of(found.nodes[0], SERVER)]
        with Client(there[0].grpc_address, timeout_s=TIMEOUT_S) as client:
            sums = {each.name: each.inference_stats.success.count for each in client.statistics()}
    answered = [sum(tally.counted().answered.values()) for tally in (load.ours, load.foreign)]
    shares = [count / max(1, of) for count, of in zip(load.forwarded, answered, strict=True)]
    return {
        "answered": answered[0],
        "answered_through_one_member": answered[1],
        "wrong_or_lost": [*load.ours.counted().wrong, *load.foreign.counted().wrong],
        "counted_otherwise": {name: sums.get(name) for name in shifts if sums.get(name) != load.answered(name)},
        "models_asked_for": sum(count > 0 for count in sums.values()),
        "forwarded": round(shares[0], 4),
        "forwarded_through_one_member": round(shares[1], 4),
        "loads_and_unloads": load.moves[0],
        "loads_and_unloads_after_the_change": load.moves[1],
        "models_of_each_member": [len(member.models) for member in there],
        "resident_mib_of_each_member": resident_mib,
        "resident_mib_with_all_models": _resident_mib(folder, shifts),
    }


def _resident_mib(folder: Path, shifts: Mapping[str, int]) -> int:
    """Memory of a server that holds all models, after a request for each, in MiB."""
    with server_process(folder, "--warm-up-seconds", "0") as server, Client(server.address, timeout_s=TIMEOUT_S) as client:
        for name in shifts:
            client.infer(name, {"x": np.ones((4, 64), np.float16)})
        return round(look(server.process.pid).resident_mb)
