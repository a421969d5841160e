"""Simulates a day's load, a hundred models, or a thousand members, in deterministic virtual time.

    python -m benchmarks.cluster_simulation day         (our autoscaling policy and Ray Serve's default on the same day)
    python -m benchmarks.cluster_simulation placement   (100 models over 4 members by the real controller, Zipf load)
    python -m benchmarks.cluster_simulation size        (10, 100 and 1,000 members at the real controller)

Members and their models are simulated; the policy, the placement and the controller are those of `halfserve cluster`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cluster_simulating.day import Policy, ours, rays, simulate
from benchmarks.cluster_simulating.members import SimulatedMember
from benchmarks.cluster_simulating.metering import Meter, MeteredLink, MeteredLoop
from benchmarks.cluster_simulating.traffic import Traffic, zipf
from benchmarks.cluster_simulating.virtual_time import run_virtually
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.fleet.control.autoscaling import ScalingOptions, wanted_members
from halfserve.serve.fleet.control.controller import Controller, ControllerOptions
from halfserve.serve.fleet.control.reports import LEASE_S
from halfserve.serve.protocol.service import SERVICE

app = typer.Typer(add_completion=False)
MIB = 2**20


@app.command()
def day(
    days: Annotated[int, typer.Option(help="How many, each with other chances.")] = 5,
    hours: Annotated[float, typer.Option(help="Length of a day.")] = 24.0,
) -> None:
    """Compare autoscaling policies on the same days' load."""
    table = Table(
        "policy", "member hours a day", "missed of a million", "changes a day", "most members", "burst served after, s"
    )
    policies: dict[str, Callable[[], Policy]] = {
        "ours, models compute 70 % of the time": ours,
        "ours, 55 %": lambda: ours(busy=0.55),
        "Ray's default, 2 requests per replica (its default)": rays,
        "Ray's default, 1.4 (70 %)": lambda: rays(1.4),
        "Ray's default, 1.1 (55 %)": lambda: rays(1.1),
    }
    for name, policy in policies.items():
        outcomes = [simulate(policy(), hours=hours, seed=seed) for seed in range(days)]
        missed = sum(one.missed for one in outcomes) / sum(one.requests for one in outcomes)
        bursts = sorted(seconds for one in outcomes for seconds in one.rise_s)
        table.add_row(
            name,
            f"{sum(one.member_hours for one in outcomes) / days:.1f}",
            f"{missed * 1e6:.1f}",
            f"{sum(one.changes for one in outcomes) / days:.0f}",
            f"{max(one.largest for one in outcomes)}",
            f"{bursts[len(bursts) // 2]:.0f} (at most {bursts[-1]:.0f})",
        )
    Console().print(table)


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


@app.command()
def placement() -> None:
    """Show the placement of 100 models over 4 members under Zipf load."""
    table = Table("what happens", "answered", "lost", "longest wait, s", "loads", "most MiB", "sums exact")
    for phase in place_models():
        counted = "yes" if phase.counted else "NO"
        figures = phase.answered, phase.lost, f"{phase.longest_s:.1f}", phase.loads, phase.largest // MIB, counted
        table.add_row(phase.name, *(str(one) for one in figures))
    Console().print(table)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a controller for a number of members.

    Attributes:
        members: number of members.
        calm: processor seconds per second while nothing changes.
        changing: processor seconds per second while one member a second is replaced.
        start: processor seconds until all members, started at once, know each other.
        directory: size of one directory in bytes.
        statistics: processor seconds of one ModelStatistics call.
        policy: processor seconds of one decision on the number of members.
    """

    members: int
    calm: float
    changing: float
    start: float
    directory: int
    statistics: float
    policy: float


def measure(count: int, *, models: int = 10, seconds: float = 10.0, per_member: int = 0) -> Cost:
    """Measure the real controller's processor time, without that of the simulated members.

    Args:
        count: number of members.
        models: number of models in the repository.
        seconds: virtual time of each measured phase, in seconds.
        per_member: models that one member serves; 0 for all.
    """
    sizes = {f"model-{i:03}": MIB for i in range(models)}
    meter = Meter()

    async def main(clock: Callable[[], float]) -> Cost:
        controller = Controller(ControllerOptions(models_per_member=per_member), clock)
        link = MeteredLink(controller, meter)
        members = [SimulatedMember(link, f"{i:04}", sizes) for i in range(count)]
        for member in members:
            member.start()
        await asyncio.sleep(LEASE_S + 10)
        start = meter.take()
        await asyncio.sleep(seconds)
        calm = meter.take() / seconds
        for i in range(round(seconds)):
            await members.pop(0).end()
            members.append(SimulatedMember(link, f"new-{i:04}", sizes))
            members[-1].start()
            await asyncio.sleep(1)
        changing = meter.take() / seconds
        await link.call(f"/{SERVICE}/ModelStatistics", b"")
        statistics = meter.take()
        meter.run(lambda: wanted_members(controller.loads().values(), count, ScalingOptions(most=count), {}, clock()))
        policy = meter.take()
        directory = members[0].directory
        for member in members:
            await member.kill()
        return Cost(
            members=len(directory.members),
            calm=calm,
            changing=changing,
            start=start,
            directory=directory.ByteSize(),
            statistics=statistics,
            policy=policy,
        )

    return run_virtually(main, lambda: MeteredLoop(meter))


@app.command()
def size(
    members: Annotated[list[int] | None, typer.Option(help="How many; may be given several times.")] = None,
    models: Annotated[int, typer.Option(help="In the repository.")] = 10,
    per_member: Annotated[int, typer.Option(help="Models that one member serves; 0 for all.")] = 0,
) -> None:
    """Show the controller's cost by number of members."""
    table = Table(
        "members",
        "calm, ms/s",
        "changing, ms/s",
        "start, ms",
        "directory, KiB",
        "statistics, ms",
        "decision, ms",
    )
    for count in members or [10, 100, 1000]:
        cost = measure(count, models=models, per_member=per_member)
        figures = (cost.calm, cost.changing, cost.start)
        table.add_row(
            f"{cost.members}",
            *(f"{seconds * 1000:.1f}" for seconds in figures),
            f"{cost.directory / 1024:.1f}",
            f"{cost.statistics * 1000:.1f}",
            f"{cost.policy * 1000:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    app()
