"""Sends malformed messages to a server, many in flight, with good requests on a separate connection between them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.harness.server_process import ServerProcess
from tests.serve.faults.exchange import Exchange, turn
from tests.serve.faults.malforming import connections, framing, messages, rest
from tests.serve.faults.malforming.case import Case, Counts, infer_case
from tests.serve.faults.malforming.interfaces import good_request, seeded
from tests.serve.faults.malforming.rest import RestClient
from tests.serve.faults.malforming.streams import REQUESTS, stream_case

# Percentages of the messages: broken connections and REST cost many times as much as calls.
OF_CONNECTIONS, OF_REST, OF_STREAMS, OF_FRAMING = 1, 4, 16, 20
IN_FLIGHT = 64
GOOD_IN_FLIGHT = 8
GOOD_REQUESTS = 64
GOOD = "good"
ROUND = 2000  # messages in a round, which consists of calls, then REST, then broken connections


def send_calls(address: str, cases: Iterator[Case], counts: Counts, good: Counts) -> None:
    """Send calls over one connection, and good ones over another, until all have been answered."""
    bad_line: Exchange[Case] = Exchange(address)
    good_line: Exchange[Case] = Exchange(address)
    always = itertools.cycle(good_cases())
    try:
        while True:
            for case in itertools.islice(cases, IN_FLIGHT - len(bad_line)):
                bad_line.start(case, case.headers, case.data, end=case.end)
            if not len(bad_line):
                break
            for case in itertools.islice(always, GOOD_IN_FLIGHT - len(good_line)):
                good_line.start(case, case.headers, case.data)
            for case, answer in turn([bad_line, good_line]):
                tally = good if case.kind == GOOD else counts
                tally.take(case.kind, case.complaint(answer), case.messages)
                tally.statuses[f"HTTP {answer.http}" if answer.code is None else f"gRPC {answer.code}"] += 1
        for case, answer in good_line.wait():
            good.take(case.kind, case.complaint(answer))
    finally:
        bad_line.close()
        good_line.close()


def send_all(server: ServerProcess, count: int, seed: int, counts: Counts, good: Counts) -> None:
    chance = seeded(seed)
    client = RestClient(server.http_address)
    try:
        while counts.total < count:
            size = min(ROUND, count - counts.total)
            calls = size * (100 - OF_CONNECTIONS - OF_REST) // 100
            send_calls(server.address, _calls(chance, max(1, calls)), counts, good)
            for _ in range(size * OF_REST // 100):
                fault = chance.choice(rest.MAKERS)(chance)
                counts.take(fault.kind, client.complaint(fault))
            for _ in range(size * OF_CONNECTIONS // 100):
                broken = chance.choice(connections.MAKERS)(chance)
                counts.take(broken.kind, broken.complaint(server.address))
    finally:
        client.close()


def good_cases() -> list[Case]:
    chance = seeded(GOOD_REQUESTS)
    return [infer_case(GOOD, good_request(chance).SerializeToString()) for _ in range(GOOD_REQUESTS)]


def _calls(chance: random.Random, count: int) -> Iterator[Case]:
    """Calls of every kind that count as at least `count` messages."""
    makers: list[Callable[[], Case]] = []
    left = count
    while left > 0:
        if not makers:
            makers = _mixed(chance)
        case = makers.pop()()
        left -= case.messages
        yield case


def _mixed(chance: random.Random) -> list[Callable[[], Case]]:
    """One set of all kinds, in random order."""
    kinds = list(messages.MAKERS)
    calls = 100 - OF_FRAMING - OF_STREAMS
    makers: list[Callable[[], Case]] = []
    makers += [partial(messages.message_case, kind, chance) for kind in itertools.islice(itertools.cycle(kinds), calls)]
    makers += [partial(make, chance) for make in itertools.islice(itertools.cycle(framing.MAKERS), OF_FRAMING)]
    makers += [partial(stream_case, chance)] * (OF_STREAMS // REQUESTS)
    chance.shuffle(makers)
    return makers
