"""Checks whether a server's memory grows with the number of requests that it has answered.

    python -m benchmarks.million

A million requests in fp16, of several shapes, over several connections, each with an id of its own and each answer checked.
A line is fitted to resident memory over the last 90 % of them. Exits with 1 if an answer is wrong or missing, if memory grows
significantly by more than a megabyte per million requests, or if open files or threads remain.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.soaking.exchange import INFER_PATH, Answer, Exchange, call_headers, turn
from benchmarks.soaking.known_answers import Known, known_requests, large_requests
from benchmarks.soaking.models import save_models
from benchmarks.soaking.process_watch import Sample, look
from benchmarks.soaking.server_process import ServerProcess, server_process
from benchmarks.soaking.straight_line import BLOCKS, rise
from halfserve.serve.benchmark.load.http2_connection import ConnectionLostError

MILLION = 1_000_000
MAX_MB_PER_MILLION = 1.0
SAMPLES = 400
SETTLED_AFTER = 0.1  # fraction of the requests; by then every kind of batch has been run
SPARE_DESCRIPTORS, SPARE_THREADS = 2, 2
LISTED = 5
Tag = tuple[int, Known]


@dataclass
class Run:
    """Answers so far.

    Attributes:
        right: answers by kind of request.
        wrong: descriptions of the first few wrong answers.
        wrongs: number of wrong answers.
        samples: (answers so far, sample of the process).
    """

    right: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    wrongs: int = 0
    samples: list[tuple[int, Sample]] = field(default_factory=list)

    @property
    def answers(self) -> int:
        """Number of all answers, right or wrong."""
        return self.right.total() + self.wrongs

    def take(self, tag: Tag, answer: Answer) -> None:
        """Check one answer."""
        number, known = tag
        if answer.code == 0 and known.is_right(number, answer.body):
            self.right[known.kind] += 1
            return
        self.wrongs += 1
        if len(self.wrong) < LISTED:
            self.wrong.append(f"{known.kind}: status {answer.code} {answer.text or f'and {len(answer.body)} bytes'}")


def main(
    count: Annotated[int, typer.Option(min=1000, help="Requests.")] = MILLION,
    connections: Annotated[int, typer.Option(min=1, help="Connections.")] = 4,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests in flight on each of them.")] = 8,
    large_every: Annotated[int, typer.Option(min=0, help="One request in so many has 256 KiB a row; 0 is none.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the contents.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send the requests and watch the server's memory."""
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        with server_process(Path(folder)) as server:
            run, began = Run(), time.monotonic()
            _send(server, run, count, connections, in_flight, _sequence(seed, large_every))
            figures = _figures(run, count, time.monotonic() - began)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        Console().print("\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in figures.items()), highlight=False)
    raise typer.Exit(1 if figures["complaints"] else 0)


def _sequence(seed: int, large_every: int) -> Iterator[Known]:
    """An endless sequence of requests."""
    small, large = itertools.cycle(known_requests(seed)), itertools.cycle(large_requests(seed))
    for number in itertools.count(1):
        yield next(large) if large_every and number % large_every == 0 else next(small)


def _send(server: ServerProcess, run: Run, count: int, connections: int, in_flight: int, requests: Iterator[Known]) -> None:
    """Keep `in_flight` requests in flight on each connection until all are answered, or the server is gone."""
    headers = call_headers(INFER_PATH)
    exchanges: list[Exchange[Tag]] = [Exchange(server.address) for _ in range(connections)]
    numbers, every = itertools.islice(enumerate(requests), count), max(1, count // SAMPLES)
    try:
        run.samples.append((0, look(server.process.pid)))
        while run.answers < count:
            for exchange in exchanges:
                for number, known in itertools.islice(numbers, in_flight - len(exchange)):
                    exchange.start((number, known), headers, known.request(number))
            for tag, answer in turn(exchanges):
                run.take(tag, answer)
            if run.answers - run.samples[-1][0] >= every:
                run.samples.append((run.answers, look(server.process.pid)))
    except (ConnectionLostError, FileNotFoundError) as error:
        run.wrongs += count - run.answers
        run.wrong.append(f"the server hung up: {error}; its log ends with: {server.log_text()[-500:]}")
    finally:
        for exchange in exchanges:
            exchange.close()


def _figures(run: Run, count: int, seconds: float) -> dict[str, object]:
    settled = [(answers, sample) for answers, sample in run.samples if answers >= SETTLED_AFTER * count]
    figures: dict[str, object] = {
        "requests": count,
        "seconds": round(seconds, 1),
        "requests_per_second": round(run.answers / seconds),
        "right": run.right.total(),
        "wrong_or_lost": run.wrongs,
        "by_kind": dict(sorted(run.right.items())),
    }
    complaints = list(run.wrong)
    if len(settled) >= 2 * BLOCKS:
        line = rise([answers for answers, _ in settled], [sample.resident_mb for _, sample in settled]).times(MILLION)
        later = [(answers, sample.resident_mb) for answers, sample in settled if answers >= count / 2]
        late = rise([answers for answers, _ in later], [mb for _, mb in later]).times(MILLION)
        figures["mb_per_million"] = round(line.per_unit, 3)
        figures["mb_per_million_95"] = [round(line.low, 3), round(line.high, 3)]
        figures["mb_per_million_in_the_last_half"] = [round(late.per_unit, 3), round(late.low, 3), round(late.high, 3)]
        figures["resident_mb"] = [round(at.resident_mb, 1) for at in (run.samples[0][1], settled[0][1], settled[-1][1])]
        if line.low > MAX_MB_PER_MILLION:
            complaints.append(f"memory rises by {line.per_unit:.2f} MB a million requests, at least {line.low:.2f}")
        for what, spare in (("descriptors", SPARE_DESCRIPTORS), ("threads", SPARE_THREADS)):
            before, after = getattr(settled[0][1], what), getattr(settled[-1][1], what)
            figures[what] = [before, after]
            if after > before + spare:
                complaints.append(f"{what}: {before} after a tenth of the requests, {after} at the end")
    return figures | {"complaints": complaints}


if __name__ == "__main__":
    typer.run(main)
