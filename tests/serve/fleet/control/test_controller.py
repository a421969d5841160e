"""The controller with simulated members, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

import pytest
from google.protobuf.message import Message

from benchmarks.cluster_simulation import measure
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError
from halfserve.serve.fleet.control.controller import Controller
from halfserve.serve.fleet.control.reports import LEASE_S
from tests.serve.simulated_cluster.members import SimulatedMember, SimulatedStore
from tests.serve.simulated_cluster.virtual_time import run_virtually

M = TypeVar("M", bound=Message)
NAMES = ("digits", "words")
SERVICE = "/inference.GRPCInferenceService"


class Cluster:
    """A controller and its simulated members. A new controller may take the place of the first one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.store = SimulatedStore()
        self.members: dict[str, SimulatedMember] = {}
        self.controller = Controller(self.store, clock)

    def replace_controller(self) -> None:
        self.controller = Controller(self.store, self._clock)
        for member in self.members.values():
            member.link = self.controller

    def add(self, *names: str, group: str = "", patterns: tuple[str, ...] = ("*",)) -> None:
        models = [model for model in NAMES if any(fnmatchcase(model, pattern) for pattern in patterns)]
        for name in names:
            member = SimulatedMember(self.controller, name, models, self.store, group=group, patterns=patterns)
            self.members[name] = member
            member.start()

    async def stop(self) -> None:
        for member in self.members.values():
            await member.kill()

    def serve(self, model: str) -> list[str]:
        return sorted(name for name, member in self.members.items() if member.serves(model))

    async def call(self, method: str, request: Message, answer: type[M]) -> M:
        return answer.FromString(await self.controller.call(f"{SERVICE}/{method}", request.SerializeToString()))

    async def load(self, name: str) -> None:
        await self.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=name), pb.RepositoryModelLoadResponse)

    async def unload(self, name: str) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=name)
        await self.call("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse)

    async def index(self) -> dict[str, tuple[str, str]]:
        found = await self.call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return {one.name: (one.state, one.reason) for one in found.models}

    async def counted(self) -> dict[str, int]:
        found = await self.call("ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse)
        return {one.name: one.inference_stats.success.count for one in found.model_stats}


def in_cluster(*names: str) -> Callable[[Callable[[Cluster], Awaitable[None]]], Callable[[], None]]:
    """Play a test, in virtual time, in a cluster whose members serve everything."""

    def decorate(scene: Callable[[Cluster], Awaitable[None]]) -> Callable[[], None]:
        async def main(clock: Callable[[], float]) -> None:
            cluster = Cluster(clock)
            cluster.add(*names)
            await asyncio.sleep(LEASE_S + 3)
            await scene(cluster)
            await cluster.stop()

        return lambda: run_virtually(main)

    return decorate


def listed(member: SimulatedMember) -> dict[str, list[str]]:
    return {one.id: list(one.models) for one in member.directory.members}


@in_cluster("a", "b")
async def test_members_serve_all_models_and_know_each_other(cluster: Cluster) -> None:
    assert cluster.serve("digits") == cluster.serve("words") == ["a", "b"]
    for member in cluster.members.values():
        assert listed(member) == {"a": ["digits", "words"], "b": ["digits", "words"]}


@in_cluster("a", "b")
async def test_a_member_that_joins_later_loads_what_was_loaded(cluster: Cluster) -> None:
    await cluster.unload("words")
    assert cluster.serve("words") == []
    cluster.add("c")
    await asyncio.sleep(2)
    assert (cluster.serve("digits"), cluster.serve("words")) == (["a", "b", "c"], [])
    await cluster.load("words")
    assert cluster.serve("words") == ["a", "b", "c"]


@in_cluster("a", "b")
async def test_a_load_that_the_first_member_refuses_reaches_no_other(cluster: Cluster) -> None:
    moves = {name: member.moves for name, member in cluster.members.items()}
    for member in cluster.members.values():
        member.refused["digits"] = InvalidArgumentError("the new version is broken")
    with pytest.raises(InvalidArgumentError, match="the new version is broken"):
        await cluster.controller.reload("digits")
    await asyncio.sleep(5)
    assert sum(member.moves - moves[name] for name, member in cluster.members.items()) == 1
    assert cluster.serve("digits") == ["a", "b"]
    assert (await cluster.index())["digits"] == ("READY", "")


@in_cluster("a", "b")
async def test_a_load_that_a_later_member_refuses_names_it(cluster: Cluster) -> None:
    await cluster.unload("digits")
    cluster.members["b"].refused["digits"] = FailedPreconditionError("no memory")
    with pytest.raises(FailedPreconditionError, match=r"member b on machine-b .*: no memory"):
        await cluster.load("digits")
    assert cluster.serve("digits") == ["a"]
    assert (await cluster.index())["digits"] == ("UNAVAILABLE", "member b on machine-b (b:8001): no memory")


@in_cluster("a")
async def test_an_unknown_model_is_not_found(cluster: Cluster) -> None:
    with pytest.raises(NotFoundError, match="no model 'nothing'"):
        await cluster.load("nothing")
    with pytest.raises(NotFoundError, match="'nothing' is not loaded"):
        await cluster.unload("nothing")


@in_cluster("a", "b")
async def test_another_member_decides_if_the_first_one_ends_while_it_loads(cluster: Cluster) -> None:
    loading = asyncio.ensure_future(cluster.load("digits"))
    await asyncio.sleep(0.5)
    await cluster.members.pop("a").kill()
    await loading
    assert cluster.serve("digits") == ["b"]


@in_cluster("a", "b")
async def test_a_member_without_counters_is_named(cluster: Cluster) -> None:
    cluster.members["b"].answers_counters = False
    with pytest.raises(UnavailableError, match=r"member b on machine-b .* has not answered within"):
        await cluster.counted()


@in_cluster("a", "b")
async def test_questions_at_the_same_time_are_answered_together(cluster: Cluster) -> None:
    first = asyncio.ensure_future(cluster.counted())
    await asyncio.sleep(0)
    cluster.members["a"].count("digits", 3)
    later = await asyncio.gather(*(cluster.counted() for _ in range(50)))
    await first
    assert later == [{"digits": 3, "words": 0}] * 50
    assert cluster.members["a"].answered < 5


@in_cluster("a", "b")
async def test_a_draining_member_is_shown_as_such_until_it_leaves(cluster: Cluster) -> None:
    cluster.controller.drain("a")
    await asyncio.sleep(1)
    assert cluster.members["a"].is_draining
    assert {one.id: one.state for one in cluster.members["b"].directory.members} == {"a": 1, "b": 0}
    assert [one["state"] for one in cluster.controller.status()["members"]] == ["DRAINING", "SERVING"]
    await cluster.members.pop("a").end()
    await asyncio.sleep(1)
    assert set(listed(cluster.members["b"])) == {"b"}
    with pytest.raises(NotFoundError, match="no member 'a'"):
        cluster.controller.drain("a")


def names(entries: Iterable[dict[str, object]]) -> list[object]:
    return [one["name"] for one in entries]


@in_cluster("a", "b")
async def test_status_has_members_machines_and_models(cluster: Cluster) -> None:
    for _ in range(20):
        cluster.members["a"].count("digits", 10, compute_s=0.05, queue_s=0.01, refusals=10)
        await asyncio.sleep(0.1)
    status = cluster.controller.status()
    assert names(status["models"]) == ["digits", "words"]
    assert status["models"][0]["members"] == ["a", "b"]
    assert status["models"][0]["requests_s"] == pytest.approx(100, rel=0.25)
    assert status["members"][0]["busy"] == pytest.approx(0.5, rel=0.25)
    assert status["members"][0]["queue_s"] == pytest.approx(0.001)
    assert status["members"][0]["refused"] == pytest.approx(0.5)
    assert len(status["machines"]) == 2


@in_cluster("a", "b", "c")
async def test_sums_are_over_the_living(cluster: Cluster) -> None:
    cluster.members["a"].count("digits", 3)
    cluster.members["b"].count("words", 5)
    assert await cluster.counted() == {"digits": 3, "words": 5}
    await cluster.members.pop("a").end()
    assert await cluster.counted() == {"digits": 0, "words": 5}
    counting = asyncio.ensure_future(cluster.counted())
    cluster.members["c"].answers_counters = False
    await asyncio.sleep(0.1)
    await cluster.members.pop("c").kill()  # while it is asked
    assert await counting == {"digits": 0, "words": 5}


@in_cluster("a", "b")
async def test_a_member_that_was_cut_off_is_known_again(cluster: Cluster) -> None:
    cluster.members["a"].mute = True
    await asyncio.sleep(LEASE_S + 1)
    assert set(listed(cluster.members["b"])) == {"b"}
    cluster.members["a"].mute = False
    await asyncio.sleep(1)
    assert set(listed(cluster.members["b"])) == {"a", "b"}


@in_cluster("a", "b")
async def test_a_new_controller_learns_the_members_and_orders_nothing(cluster: Cluster) -> None:
    await cluster.unload("words")
    await cluster.controller.reload("digits")
    verbose = pb.LogSettingsRequest(settings={"log_verbose_level": pb.LogSettingsRequest.SettingValue(uint32_param=1)})
    await cluster.call("LogSettings", verbose, pb.LogSettingsResponse)
    moves, version = cluster.members["b"].moves, cluster.members["b"].directory.version
    cluster.replace_controller()
    await asyncio.sleep(LEASE_S / 2)
    assert cluster.members["b"].directory.version == version  # before all could report, there is no new one
    await asyncio.sleep(LEASE_S + 1)
    assert cluster.members["b"].directory.version > version
    assert (cluster.serve("digits"), cluster.serve("words")) == (["a", "b"], [])
    assert cluster.members["b"].moves == moves
    assert await cluster.index() == {"digits": ("READY", ""), "words": ("UNAVAILABLE", "not loaded")}
    cluster.add("c")
    await asyncio.sleep(2)
    assert (cluster.serve("digits"), cluster.serve("words")) == (["a", "b", "c"], [])
    assert [[one.request for one in member.settings.values()] for member in cluster.members.values()] == [
        [verbose.SerializeToString()]
    ] * 3


@in_cluster("a", "b")
async def test_a_load_that_cannot_be_recorded_names_the_member_that_has_done_it(cluster: Cluster) -> None:
    cluster.store.error = UnavailableError("Ray Serve cannot be reached")
    with pytest.raises(UnavailableError, match=r"member a .* has loaded model 'digits', the others have not: Ray"):
        await cluster.load("digits")
    assert cluster.serve("digits") == ["a", "b"]


@in_cluster("a")
async def test_a_member_drains_once_others_serve_its_models(cluster: Cluster) -> None:
    cluster.add("b")
    leaving = cluster.members["a"]
    cluster.controller.drain("a")
    while not leaving.is_draining:
        assert listed(leaving).get("a") == [*NAMES]
        await asyncio.sleep(0.1)
    assert cluster.serve("digits") == ["a", "b"]


@in_cluster()
async def test_groups_have_their_own_models_and_share_a_directory(cluster: Cluster) -> None:
    cluster.add("a", "b", group="numbers", patterns=("digits", "new"))
    cluster.add("c", group="texts", patterns=("words*",))
    await asyncio.sleep(2)
    assert listed(cluster.members["c"]) == {"a": ["digits"], "b": ["digits"], "c": ["words"]}
    await cluster.unload("digits")
    assert (cluster.serve("digits"), cluster.serve("words")) == ([], ["c"])
    assert set(cluster.store.groups) == {"numbers"}
    with pytest.raises(NotFoundError, match="no servers of this cluster are for model 'third'"):
        await cluster.load("third")


def test_many_members_are_known_to_each_other_after_replacements() -> None:
    assert measure(30, models=3, seconds=5.0).members == 30
