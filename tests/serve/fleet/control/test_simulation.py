"""The real controller with simulated members, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.cluster_simulation import MIB, measure
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.fleet.control.controller import Controller, ControllerOptions
from halfserve.serve.fleet.control.reports import LEASE_S
from halfserve.serve.protocol.service import SERVICE
from tests.serve.simulated_cluster.members import SimulatedMember
from tests.serve.simulated_cluster.traffic import Traffic, zipf
from tests.serve.simulated_cluster.virtual_time import run_virtually


def test_every_request_is_answered_and_counted_while_members_come_and_go() -> None:
    phases = place_models(models=20, per_member=8, phase_s=20.0)
    assert [phase.lost for phase in phases] == [0] * len(phases)
    assert all(phase.counted for phase in phases)
    assert all(phase.largest <= 9 * 50 * MIB for phase in phases)
    assert [phase.loads for phase in phases if phase.name == "steady"] == [0]


def test_many_members_are_known_to_each_other_after_replacements() -> None:
    assert measure(30, models=3, seconds=5.0).members == 30


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Results of one phase of the placement scenario.

    Attributes:
        name: event of the phase.
        answered, lost: numbers of answered and lost requests.
        longest_s: longest time until a member was found for a request, in seconds.
        loads: number of model loads, at all members.
        largest: largest total size of models at any member so far, in bytes.
        counted: whether ModelStatistics equals the number of answered requests so far, for each model.
    """

    name: str
    answered: int
    lost: int
    longest_s: float
    loads: int
    largest: int
    counted: bool


def place_models(models: int = 100, per_member: int = 40, phase_s: float = 120.0) -> list[Phase]:
    """Place many models on four members, through the real controller, while members come and go and the load moves.

    A model takes 50 MiB, and a member has memory for one more than `per_member`.
    """
    names = [f"model-{i:03}" for i in range(models)]
    sizes = dict.fromkeys(names, 50 * MIB)

    async def main(clock: Callable[[], float]) -> list[Phase]:
        controller = Controller(ControllerOptions(models_per_member=per_member), clock)
        members: dict[str, SimulatedMember] = {}
        everyone: list[SimulatedMember] = []
        phases: list[Phase] = []

        def add(name: str, left: Mapping[str, bytes] | None = None) -> None:
            members[name] = member = SimulatedMember(controller, name, sizes, memory_size=(per_member + 1) * 50 * MIB)
            member.left = dict(left or {})
            everyone.append(member)
            member.start()

        for name in "abcd":
            add(name)
        await asyncio.sleep(LEASE_S + 20)
        traffic = Traffic(members, zipf(names, 2000.0))
        sending = asyncio.create_task(traffic.run())

        def moves() -> int:
            return sum(member.moves for member in everyone)

        before = 0, 0, moves()

        async def play(title: str) -> None:
            nonlocal before
            await asyncio.sleep(phase_s)
            tally = traffic.tally
            answer = await controller.call(f"/{SERVICE}/ModelStatistics", b"")
            counted = {
                one.name: one.inference_stats.success.count for one in pb.ModelStatisticsResponse.FromString(answer).model_stats
            }
            phases.append(
                Phase(
                    name=title,
                    answered=tally.answered - before[0],
                    lost=tally.lost - before[1],
                    longest_s=tally.longest_s,
                    loads=moves() - before[2],
                    largest=max(member.largest for member in everyone),
                    counted=counted == traffic.by_model,
                )
            )
            before, tally.longest_s = (tally.answered, tally.lost, moves()), 0.0

        await play("load begins")
        await play("steady")
        add("e")
        await play("a member joins")
        controller.drain("b")
        await asyncio.sleep(20)
        leaving = members.pop("b")
        await leaving.end()
        await play("a member drained and left")
        killed = members.pop("c")
        await killed.kill()
        add("f", left={"c": killed.counters()})
        await play("a member killed and replaced")
        traffic.rates = zipf(names[::-1], 2000.0)
        await play("hot models become cold, and cold ones hot")
        await play("steady again")
        sending.cancel()
        for member in members.values():
            await member.kill()
        return phases

    return run_virtually(main)
