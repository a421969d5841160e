"""Runs the measurements of one `halfserve bench`: a sweep, a search for the highest load, or a comparison."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.benchmark.benchmark_report import BenchmarkReport
from halfserve.serve.benchmark.comparison import MAX_REQUESTS, ComparedLevel, compare, differences, unlike_inputs
from halfserve.serve.benchmark.level import Level, Load
from halfserve.serve.benchmark.load.spec import INTERRUPTED
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Goal, Measurement, measure, search
from halfserve.serve.benchmark.tables import ProgressBar
from halfserve.serve.benchmark.text_target import RestEndpoint, TextTarget
from halfserve.serve.client.errors import ClientError

MAX_DEFAULT_PROCESSES = 8
CPUS_PER_PROCESS = 4  # one load process per this many CPUs; the other CPUs are left to a server on this machine
Ending = BenchmarkError | ClientError | KeyboardInterrupt | None


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Measurements of one `halfserve bench`."""

    address: str  # HOST:PORT of the server
    models: Sequence[str]  # names of the models; requests go to them in turn
    loads: Sequence[Load]  # loads to measure in order; for a search, its lowest and highest load
    how: Measurement  # settings of each measurement
    options: RequestSettings  # contents and transport of the requests
    endpoint: RestEndpoint | None = None  # REST endpoint for texts to load in place of the models' inference calls
    batch_sizes: Sequence[int] = (1,)  # rows per request; every load is measured with each
    # (address, model, version) of each load target to compare with; the version "" is the server's choice
    against: Sequence[tuple[str, str, str]] = ()
    goal: Goal | None = None  # latency limit of a search for the highest load; None to measure the loads as they are
    rounds: int = 5  # rounds of a comparison
    command: str = ""  # the command line


def carry_out(campaign: Campaign, progress: ProgressBar) -> tuple[BenchmarkReport, Ending]:
    """Measure; return the report, and the error that ended the campaign early: the levels measured before are kept.

    Nothing was measured if it raises BenchmarkArgumentError: the options do not fit the model; or ClientError: the server does
    not answer, or refuses the requests.
    """
    return _compared(campaign, progress) if campaign.against else _swept(campaign, progress)


def default_processes() -> int:
    """Return the number of load processes that leaves CPUs for a server on this machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_DEFAULT_PROCESSES, cpus // CPUS_PER_PROCESS))


def _swept(campaign: Campaign, progress: ProgressBar) -> tuple[BenchmarkReport, Ending]:
    levels: list[Level] = []
    report: BenchmarkReport | None = None
    total = None if campaign.goal else len(campaign.loads) * len(campaign.batch_sizes)
    try:
        for batch_size in campaign.batch_sizes:
            options = replace(campaign.options, batch_size=batch_size)
            with _target(campaign, options) as target:
                if report is None:
                    report = _report(campaign, target)
                    progress.begin(f"measuring {report.model}", total)
                for note in target.notes:
                    progress.note(note)
                for level in _levels(campaign, target, progress):
                    levels.append(level)
                    progress.done(level)
                    _stop_if_ended(level)
    except (BenchmarkError, ClientError, KeyboardInterrupt) as ending:
        if report is None:
            raise
        ended: Ending = ending
    else:
        ended = None
    if report is None:
        raise BenchmarkError("there was nothing to measure: no batch size was given")
    return replace(report, levels=levels), ended


def _target(campaign: Campaign, options: RequestSettings) -> LoadTarget | TextTarget:
    if campaign.endpoint is None:
        return LoadTarget(campaign.address, campaign.models, options)
    return TextTarget(campaign.address, campaign.models[0], options, campaign.endpoint)


def _levels(campaign: Campaign, target: LoadTarget | TextTarget, progress: ProgressBar) -> Iterator[Level]:
    def measured(load: Load) -> Level:
        return measure(target.bench, load, campaign.how, lambda tally: progress.window(load, tally))

    return map(measured, campaign.loads) if campaign.goal is None else search(campaign.loads, campaign.goal, measured)


def _compared(campaign: Campaign, progress: ProgressBar) -> tuple[BenchmarkReport, Ending]:
    options = replace(campaign.options, batch_size=campaign.batch_sizes[0])
    places = [(campaign.address, campaign.models, options.version)]
    places += [(address, (model,), version) for address, model, version in campaign.against]
    lines: list[ComparedLevel] = []
    names = _names(places)
    with ExitStack() as stack:
        targets: list[LoadTarget] = []
        for address, models, version in places:
            targets.append(stack.enter_context(LoadTarget(address, models, replace(options, version=version))))
            options = replace(options, usual_shapes={**targets[-1].chosen_shapes, **options.usual_shapes})
        progress.begin("comparing", len(campaign.loads) * campaign.rounds * len(places))
        for note in dict.fromkeys(note for target in targets for note in target.notes):
            progress.note(note)
        report = _report(campaign, targets[0])
        ending: Ending = None
        first, *others = targets
        alike: list[tuple[str, LoadTarget]] = []
        for name, other in zip(names[1:], others, strict=True):
            inputs = unlike_inputs(first.plain_requests, other.plain_requests) if options.captured is None else ""
            if inputs:
                note = f"{name} takes other inputs than {names[0]}: {inputs}. Their speed is compared, and not their answers"
                progress.note(note)
                report = replace(report, notes=[*report.notes, note])
            else:
                alike.append((name, other))
        try:
            asked = first.plain_requests[: MAX_REQUESTS if options.captured is None else None]
            found = [differences(name, first.client, asked, other.client, other.plain_requests) for name, other in alike]
            report = replace(report, differences=found)
            for load in campaign.loads:
                lines += _compared_load(campaign, names, targets, load, progress)
        except (BenchmarkError, ClientError, KeyboardInterrupt) as caught:
            ending = caught
    levels = [line.rounds[0] for line in lines if line.name == names[0]]
    return replace(report, comparison=lines, levels=levels), ending


def _compared_load(
    campaign: Campaign, names: Sequence[str], targets: Sequence[LoadTarget], load: Load, progress: ProgressBar
) -> Iterator[ComparedLevel]:
    def measured(number: int, load: Load) -> Level:
        level = measure(targets[number].bench, load, campaign.how, lambda tally: progress.window(load, tally))
        progress.done(level)
        _stop_if_ended(level)
        return level

    return compare(names, load, campaign.rounds, measured)


def _names(places: Sequence[tuple[str, Sequence[str], str]]) -> list[str]:
    """Distinct names: the model, preceded by the address and followed by the version if these differ, or numbered if all are
    equal.
    """
    addresses, versions = ({place[at] for place in places} for at in (0, 2))
    plain = [
        (f"{address}/" if len(addresses) > 1 else "")
        + "+".join(models)
        + (f"/{version}" if len(versions) > 1 and version else "")
        for address, models, version in places
    ]
    return [name if plain.count(name) == 1 else f"{name} ({plain[: i + 1].count(name)})" for i, name in enumerate(plain)]


def _report(campaign: Campaign, target: LoadTarget | TextTarget) -> BenchmarkReport:
    return BenchmarkReport(
        model="+".join(campaign.models),
        version="+".join(target.versions[model] for model in campaign.models),
        address=campaign.address if campaign.endpoint is None else campaign.endpoint.url,
        provider=target.provider,
        command=campaign.command,
        notes=target.notes,
        goal=campaign.goal,
    )


def _stop_if_ended(level: Level) -> None:
    if level.ended_early == INTERRUPTED:
        raise KeyboardInterrupt
    if level.ended_early is not None:
        raise BenchmarkError(f"the server stopped under a load of {level.load.text}: {level.ended_early}")
