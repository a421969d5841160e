"""The controller with simulated members, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import pytest
from google.protobuf import wrappers_pb2
from google.protobuf.message import Message

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import FailedPreconditionError, NotFoundError, UnavailableError
from halfserve.serve.fleet.control.controller import Controller, ControllerOptions
from halfserve.serve.fleet.control.reports import LEASE_S
from halfserve.serve.fleet.member.shared_rpcs import METRICS
from tests.serve.simulated_cluster.members import Refusal, SimulatedMember
from tests.serve.simulated_cluster.virtual_time import run_virtually

M = TypeVar("M", bound=Message)
SIZES = {"digits": 100, "words": 200}
SERVICE = "/inference.GRPCInferenceService"


class Cluster:
    """A controller and its simulated members. A new controller may take the place of the first one."""

    def __init__(self, clock: Callable[[], float], models_per_member: int = 0) -> None:
        self._clock = clock
        self.members: dict[str, SimulatedMember] = {}
        self.controller = Controller(ControllerOptions(models_per_member=models_per_member), clock=clock)

    def replace_controller(self) -> None:
        self.controller = Controller(clock=self._clock)
        for member in self.members.values():
            member.link = self.controller

    def add(self, *names: str, load_s: float = 1.0) -> None:
        for name in names:
            self.members[name] = member = SimulatedMember(self.controller, name, SIZES, load_s=load_s)
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


def run(scene: Callable[[Cluster], Awaitable[None]], *names: str, models_per_member: int = 0) -> None:
    """Play a scene in a cluster; 0 models per member: all serve everything."""

    async def main(clock: Callable[[], float]) -> None:
        cluster = Cluster(clock, models_per_member)
        cluster.add(*names)
        await asyncio.sleep(LEASE_S + 3)
        await scene(cluster)
        await cluster.stop()

    run_virtually(main)


def listed(member: SimulatedMember) -> dict[str, list[str]]:
    return {one.id: list(one.models) for one in member.directory.members}


def test_members_serve_all_models_and_know_each_other() -> None:
    async def scene(cluster: Cluster) -> None:
        assert cluster.serve("digits") == cluster.serve("words") == ["a", "b"]
        for member in cluster.members.values():
            assert listed(member) == {"a": ["digits", "words"], "b": ["digits", "words"]}

    run(scene, "a", "b")


def test_a_member_that_joins_later_loads_what_was_loaded() -> None:
    async def scene(cluster: Cluster) -> None:
        await cluster.unload("words")
        assert cluster.serve("words") == []
        cluster.add("c")
        await asyncio.sleep(2)
        assert (cluster.serve("digits"), cluster.serve("words")) == (["a", "b", "c"], [])
        await cluster.load("words")
        assert cluster.serve("words") == ["a", "b", "c"]

    run(scene, "a", "b")


def test_a_load_that_the_first_member_refuses_reaches_no_other() -> None:
    async def scene(cluster: Cluster) -> None:
        moves = {name: member.moves for name, member in cluster.members.items()}
        for member in cluster.members.values():
            member.refused["digits"] = Refusal(status="INVALID_ARGUMENT", text="the new version is broken")
        with pytest.raises(Exception, match="the new version is broken") as refused:
            await cluster.controller.reload("digits")
        assert type(refused.value).__name__ == "InvalidArgumentError"
        await asyncio.sleep(5)
        assert sum(member.moves - moves[name] for name, member in cluster.members.items()) == 1
        assert cluster.serve("digits") == ["a", "b"]
        assert (await cluster.index())["digits"] == ("READY", "")

    run(scene, "a", "b")


def test_a_load_that_a_later_member_refuses_names_it() -> None:
    async def scene(cluster: Cluster) -> None:
        await cluster.unload("digits")
        cluster.members["b"].refused["digits"] = Refusal(status="FAILED_PRECONDITION", text="no memory")
        with pytest.raises(FailedPreconditionError, match=r"member b on machine-b .*: no memory"):
            await cluster.load("digits")
        assert cluster.serve("digits") == ["a"]
        assert (await cluster.index())["digits"] == ("UNAVAILABLE", "member b on machine-b (b:8001): no memory")

    run(scene, "a", "b")


def test_an_unknown_model_is_not_found() -> None:
    async def scene(cluster: Cluster) -> None:
        cluster.members["a"].refused["nothing"] = Refusal(status="NOT_FOUND", text="the repository has no model 'nothing'")
        with pytest.raises(NotFoundError, match="no model 'nothing'"):
            await cluster.load("nothing")
        with pytest.raises(NotFoundError, match="'nothing' is not loaded"):
            await cluster.unload("nothing")

    run(scene, "a")


def test_another_member_decides_if_the_first_one_ends_while_it_loads() -> None:
    async def scene(cluster: Cluster) -> None:
        loading = asyncio.ensure_future(cluster.load("digits"))
        await asyncio.sleep(0.5)
        await cluster.members.pop("a").kill()
        await loading
        assert cluster.serve("digits") == ["b"]

    run(scene, "a", "b")


def test_statistics_are_exact_while_members_come_and_go() -> None:
    async def scene(cluster: Cluster) -> None:
        cluster.members["a"].count("digits", 3)
        cluster.members["b"].count("words", 5)
        assert await cluster.counted() == {"digits": 3, "words": 5}
        cluster.members["a"].count("digits", 4)
        await cluster.members.pop("a").end()
        assert await cluster.counted() == {"digits": 7, "words": 5}
        cluster.members["b"].count("words", 6)
        await asyncio.sleep(1)  # it has reported that
        lost = cluster.members.pop("b")
        lost.count("words", 1)  # it has not
        await lost.kill()
        cluster.add("c")
        await asyncio.sleep(LEASE_S + 3)
        assert await cluster.counted() == {"digits": 7, "words": 11}
        cluster.members["c"].left = {"b": lost.counters()}
        await asyncio.sleep(1)
        assert await cluster.counted() == {"digits": 7, "words": 12}

    run(scene, "a", "b")


def test_a_member_that_was_cut_off_is_not_counted_twice() -> None:
    async def scene(cluster: Cluster) -> None:
        cluster.members["a"].count("digits", 3)
        await asyncio.sleep(1)
        cluster.members["a"].mute = True
        await asyncio.sleep(LEASE_S + 1)
        assert set(listed(cluster.members["b"])) == {"b"}
        assert await cluster.counted() == {"digits": 3, "words": 0}
        cluster.members["a"].mute = False
        await asyncio.sleep(1)
        assert set(listed(cluster.members["b"])) == {"a", "b"}
        assert await cluster.counted() == {"digits": 3, "words": 0}

    run(scene, "a", "b")


def test_a_member_without_counters_is_named() -> None:
    async def scene(cluster: Cluster) -> None:
        cluster.members["b"].answers_counters = False
        with pytest.raises(UnavailableError, match=r"member b on machine-b .* has not reported its counters"):
            await cluster.counted()

    run(scene, "a", "b")


def test_a_new_controller_knows_what_the_last_one_decided() -> None:
    async def scene(cluster: Cluster) -> None:
        await cluster.unload("words")
        await cluster.controller.reload("digits")
        verbose = pb.LogSettingsRequest(settings={"log_verbose_level": pb.LogSettingsRequest.SettingValue(uint32_param=1)})
        await cluster.call("LogSettings", verbose, pb.LogSettingsResponse)
        cluster.members["a"].count("digits", 3)
        await cluster.members.pop("a").end()
        moves, version = cluster.members["b"].moves, cluster.members["b"].directory.version
        cluster.replace_controller()
        await asyncio.sleep(LEASE_S / 2)
        assert cluster.members["b"].directory.version == version  # before all could report, there is no new one
        assert await cluster.counted() == {"digits": 3, "words": 0}
        await asyncio.sleep(LEASE_S + 1)
        assert cluster.members["b"].directory.version > version
        assert (cluster.serve("digits"), cluster.serve("words")) == (["b", "c"], [])
        assert cluster.members["b"].moves == moves
        assert await cluster.index() == {"digits": ("READY", ""), "words": ("UNAVAILABLE", "not loaded")}
        cluster.add("d")
        await asyncio.sleep(1)
        told = [list(cluster.members[name].settings.changes) for name in "bcd"]
        assert told == [[(f"{SERVICE}/LogSettings", verbose.SerializeToString())]] * 3

    run(scene, "a", "b", "c")


def test_a_member_that_ends_while_a_new_controller_learns_is_counted() -> None:
    async def scene(cluster: Cluster) -> None:
        for name in "abc":
            cluster.members[name].count("digits", 1)
        await cluster.members.pop("a").end()
        await asyncio.sleep(1)
        cluster.replace_controller()
        await cluster.members.pop("b").end()  # before the new controller knows of "a"
        assert await cluster.counted() == {"digits": 3, "words": 0}

    run(scene, "a", "b", "c")


def test_questions_at_the_same_time_are_answered_together() -> None:
    async def scene(cluster: Cluster) -> None:
        first = asyncio.ensure_future(cluster.counted())
        await asyncio.sleep(0)
        cluster.members["a"].count("digits", 3)
        later = await asyncio.gather(*(cluster.counted() for _ in range(50)))
        await first
        assert later == [{"digits": 3, "words": 0}] * 50
        assert cluster.members["a"].answered < 5

    run(scene, "a", "b")


def test_a_draining_member_is_shown_as_such_until_it_leaves() -> None:
    async def scene(cluster: Cluster) -> None:
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

    run(scene, "a", "b")


def test_a_member_drains_once_others_serve_its_models() -> None:
    async def scene(cluster: Cluster) -> None:
        assert [len(cluster.serve(model)) for model in SIZES] == [1, 1]
        (member,) = cluster.serve("digits")
        leaving = cluster.members[member]
        cluster.controller.drain(member)
        while not leaving.is_draining:
            serving = [one for one in cluster.controller.status()["members"] if one["state"] == "SERVING"]
            assert {model for one in serving for model in one["models"]} == set(SIZES)
            await asyncio.sleep(0.1)
        assert len([name for name in cluster.serve("digits") if name != member]) == 1

    run(scene, "a", "b", models_per_member=1)


@pytest.mark.parametrize("hundredths", range(100, 120))
def test_a_member_knows_who_serves_a_model_before_it_unloads_it(hundredths: int) -> None:
    async def scene(cluster: Cluster) -> None:
        (first,) = cluster.members.values()
        cluster.add("b")
        await asyncio.sleep(hundredths / 100)
        cluster.add("c")  # at one of these moments, the directory that has the new place must wait
        moved: set[str] = set()
        while not moved:
            await asyncio.sleep(0.001)
            moved = {model for model in SIZES if not first.serves(model)}
        assert [one.id for one in first.directory.members if one.id != "a" and moved <= {*one.models}]

    run(scene, "a", models_per_member=1)


def names(entries: Iterable[dict[str, object]]) -> list[object]:
    return [one["name"] for one in entries]


def test_status_has_members_machines_and_models() -> None:
    async def scene(cluster: Cluster) -> None:
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

    run(scene, "a", "b")


def test_metrics_are_those_of_all_members() -> None:
    async def scene(cluster: Cluster) -> None:
        cluster.members["a"].count("digits", 3)
        await cluster.members.pop("a").end()
        cluster.members["b"].count("digits", 4)
        answer = await cluster.controller.call(METRICS, b"")
        text = wrappers_pb2.BytesValue.FromString(answer).value.decode()
        assert 'nv_inference_request_success{model="digits",version="1"} 7' in text

    run(scene, "a", "b")
