"""Everything that one `halfserve bench` measures, from the first connection to the report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from serve.benchmark.accuracy import differences
from serve.benchmark.comparison import ComparedLevel, compare
from serve.benchmark.contestant import Contestant, RequestOptions
from serve.benchmark.errors import BenchmarkError
from serve.benchmark.level import Level
from serve.benchmark.load.order import INTERRUPTED, Tally
from serve.benchmark.loads import Load
from serve.benchmark.measurement import Measurement, measure
from serve.benchmark.reports.report import Differences, Report
from serve.benchmark.sweep import Goal, search, sweep
from serve.client import InferenceClientError

MAX_DEFAULT_PROCESSES = 8
CPUS_PER_PROCESS = 4  # the server needs the others, if it is on this machine


class Watcher(Protocol):
    """Whoever shows how far it is."""

    def begin(self, what: str, measurements: int | None) -> None:
        """So many loads will be measured; None when that is not known."""

    def window(self, load: Load, tally: Tally) -> None:
        """What was measured in the last moment."""

    def done(self, level: Level) -> None:
        """A load has been measured."""

    def note(self, line: str) -> None:
        """Something that the user should know."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What is to be measured.

    Attributes:
        address: HOST:PORT of the server.
        models: that the requests are for, in turn.
        against: (address, model) of those that are compared with it.
        loads: one after the other; of a search, from where to where.
        how: each is measured.
        options: of the requests.
        batch_sizes: rows per request; the loads are measured with each.
        goal: to search for the highest load that keeps it; None to measure the loads as they are.
        rounds: of a comparison.
        command: the command line.
    """

    address: str
    models: Sequence[str]
    loads: Sequence[Load]
    how: Measurement
    options: RequestOptions
    batch_sizes: Sequence[int] = (1,)
    against: Sequence[tuple[str, str]] = ()
    goal: Goal | None = None
    rounds: int = 5
    command: str = ""


Ending = BenchmarkError | InferenceClientError | KeyboardInterrupt | None


def carry_out(campaign: Campaign, watcher: Watcher) -> tuple[Report, Ending]:
    """Measure, and say what ended it early: whatever was measured before is worth keeping.

    Raises:
        BenchmarkArgumentError: the options do not fit the model; nothing was measured.
        InferenceClientError: the server does not answer, or not as it should; nothing was measured.
    """
    return _compared(campaign, watcher) if campaign.against else _swept(campaign, watcher)


def default_processes() -> int:
    """As many as leave the machine to the server too."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_DEFAULT_PROCESSES, cpus // CPUS_PER_PROCESS))


def _swept(campaign: Campaign, watcher: Watcher) -> tuple[Report, Ending]:
    levels: list[Level] = []
    report: Report | None = None
    total = None if campaign.goal else len(campaign.loads) * len(campaign.batch_sizes)
    try:
        for batch_size in campaign.batch_sizes:
            options = replace(campaign.options, batch_size=batch_size)
            with Contestant(campaign.address, campaign.models, options) as contestant:
                if report is None:
                    report = _report(campaign, contestant)
                    watcher.begin(f"measuring {report.model}", total)
                _tell_notes(contestant, watcher)
                for level in _levels(campaign, contestant, watcher):
                    levels.append(level)
                    watcher.done(level)
                    _stop_if_ended(level)
    except (BenchmarkError, InferenceClientError, KeyboardInterrupt) as ending:
        if report is None:
            raise
        ended: Ending = ending
    else:
        ended = None
    if report is None:
        raise BenchmarkError("there was nothing to measure: no batch size was given")
    return replace(report, levels=levels), ended


def _levels(campaign: Campaign, contestant: Contestant, watcher: Watcher) -> Iterator[Level]:
    def measured(load: Load) -> Level:
        return measure(contestant.bench, load, campaign.how, lambda tally: watcher.window(load, tally))

    return sweep(campaign.loads, measured) if campaign.goal is None else search(campaign.loads, campaign.goal, measured)


def _compared(campaign: Campaign, watcher: Watcher) -> tuple[Report, Ending]:
    options = replace(campaign.options, batch_size=campaign.batch_sizes[0])
    places = [(campaign.address, list(campaign.models)), *((address, [model]) for address, model in campaign.against)]
    lines: list[ComparedLevel] = []
    names = _names(places)
    with ExitStack() as stack:
        contestants = [stack.enter_context(Contestant(address, models, options)) for address, models in places]
        watcher.begin("comparing", len(campaign.loads) * campaign.rounds * len(places))
        for contestant in contestants:
            _tell_notes(contestant, watcher)
        report = _report(campaign, contestants[0])
        ending: Ending = None
        try:
            report = replace(report, differences=_differences(names, contestants))
            for load in campaign.loads:
                lines += _compared_load(campaign, names, contestants, load, watcher)
        except (BenchmarkError, InferenceClientError, KeyboardInterrupt) as caught:
            ending = caught
    first = [line.rounds[0] for line in lines if line.name == names[0]]
    return replace(report, comparison=lines, levels=first), ending


def _compared_load(
    campaign: Campaign, names: Sequence[str], contestants: Sequence[Contestant], load: Load, watcher: Watcher
) -> Iterator[ComparedLevel]:
    def measured(number: int, load: Load) -> Level:
        level = measure(contestants[number].bench, load, campaign.how, lambda tally: watcher.window(load, tally))
        watcher.done(level)
        _stop_if_ended(level)
        return level

    return compare(names, load, campaign.rounds, measured)


def _names(places: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """What tells the contestants apart: the model, the address before it where there are several, a number where all agree."""
    several = len({address for address, _ in places}) > 1
    plain = [f"{address}/{'+'.join(models)}" if several else "+".join(models) for address, models in places]
    return [name if plain.count(name) == 1 else f"{name} ({plain[: i + 1].count(name)})" for i, name in enumerate(plain)]


def _differences(names: Sequence[str], contestants: Sequence[Contestant]) -> list[Differences]:
    first, *others = contestants
    found = []
    for name, other in zip(names[1:], others, strict=True):
        outputs, alone = differences(first.client, first.plain_requests, other.client, other.plain_requests)
        found.append(Differences(name=name, outputs=outputs, not_compared=alone))
    return found


def _report(campaign: Campaign, contestant: Contestant) -> Report:
    return Report(
        model="+".join(campaign.models),
        version="+".join(contestant.versions[model] for model in campaign.models),
        address=campaign.address,
        provider=contestant.provider,
        command=campaign.command,
        goal=campaign.goal,
    )


def _tell_notes(contestant: Contestant, watcher: Watcher) -> None:
    for note in contestant.notes:
        watcher.note(note)


def _stop_if_ended(level: Level) -> None:
    if level.ended_early == INTERRUPTED:
        raise KeyboardInterrupt
    if level.ended_early is not None:
        raise BenchmarkError(f"the server has gone while {level.load.text} were asked of it: {level.ended_early}")
