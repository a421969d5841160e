"""Requests of mixed lengths with and without padding, for `benchmarks.embeddings`.

A text model's folder is served twice by one server process, once unchanged and once without `halfserve.padding`. Each is loaded
by a closed loop of asynchronous clients over gRPC, A B A B ..., so that a drift in the machine's speed affects both. Both get
the same lengths in the same order.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import typer
from google.protobuf import text_format

from benchmarks.harness.server_process import ServerProcess, server_process
from halfserve import AsyncClient
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.padding.padding import PaddingRule
from halfserve.serve.engine.padding.padding_rule import BUCKETS_KEY, KEY, TOKENS_KEY, parse_padding_rule
from halfserve.serve.engine.tensors import Array

SHORT, LONGEST, ZIPF = (5, 20), 200, 1.2
WAYS = ("padded", "unpadded")
Device: TypeAlias = Literal["cuda", "cpu"]
TOKENS = 1000  # number of tokens in the vocabulary of the requests
REQUESTS = 4096  # prepared lengths, repeated


def lengths_of(mix: str, random: np.random.Generator) -> list[int]:
    """Tokens of each request: "short" 5 to 20, uniform; "tail" 5 to 200, by Zipf's law; a number: all of that length."""
    if mix == "short":
        return [int(length) for length in random.integers(SHORT[0], SHORT[1] + 1, REQUESTS)]
    if mix == "tail":
        sizes = np.arange(SHORT[0], LONGEST + 1)
        weights = (sizes - SHORT[0] + 1.0) ** -ZIPF
        return [int(length) for length in random.choice(sizes, REQUESTS, p=weights / weights.sum())]
    if not mix.isdigit():
        raise typer.BadParameter(f"{mix!r} is no mix; expected 'short', 'tail' or a length")
    return [int(mix)] * REQUESTS


def write_ways(model: Path, repository: Path) -> PaddingRule:
    """Write the model's folder under both names, with links to its versions; returns its padding."""
    if not (model / "config.pbtxt").is_file():
        raise typer.BadParameter(f"{model} has no config.pbtxt; expected a model's folder of a repository")
    config = text_format.Parse((model / "config.pbtxt").read_text(), ModelConfig())
    if KEY not in config.parameters:
        raise typer.BadParameter(f"{model} has no parameter {KEY!r}; export it again, or add it")
    rule = parse_padding_rule(config.parameters[KEY].string_value)
    for way in WAYS:
        folder = repository / way
        folder.mkdir(parents=True)
        for version in model.iterdir():
            if version.name.isdigit():
                (folder / version.name).mkdir()
                for file in version.iterdir():
                    os.link(file, folder / version.name / file.name)
        config.name = way
        if way == "unpadded":
            for key in (KEY, BUCKETS_KEY, TOKENS_KEY):
                config.parameters.pop(key, None)
        (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    return rule


def longest_inputs(rule: PaddingRule) -> dict[str, Array]:
    """Return the inputs of a request of `LONGEST` tokens: the rule's first input has the tokens, a mask is all ones."""
    tokens, *others = (padded.name for padded in rule.inputs)
    values: dict[str, Array] = {tokens: np.random.default_rng(0).integers(1, TOKENS, (1, LONGEST))}
    for name in others:
        values[name] = np.full((1, LONGEST), int("mask" in name), np.int64)
    return values


async def rate(
    client: AsyncClient, way: str, longest: dict[str, Array], lengths: list[int], in_flight: int, seconds: float
) -> tuple[int, float]:
    """Return the number of requests that a closed loop sends in this time, and the seconds until all are answered."""
    left = iter(range(1 << 60))
    answered, began = 0, time.perf_counter()

    async def ask() -> None:
        nonlocal answered
        while time.perf_counter() - began < seconds:
            length = lengths[next(left) % len(lengths)]
            await client.infer(way, {name: array[:, :length] for name, array in longest.items()})
            answered += 1

    await asyncio.gather(*(ask() for _ in range(in_flight)))
    return answered, time.perf_counter() - began


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Results of both ways for one mix and number of requests in flight; one value for each round, by way."""

    mix: str  # distribution of the lengths
    in_flight: int  # number of concurrent requests
    rates: dict[str, list[float]]  # requests a second

    @property
    def ratio(self) -> str:
        """Ratio of the rates, padded to unpadded: median, smallest and largest."""
        ratios = [one / other for one, other in zip(*self.rates.values(), strict=True)]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def compared(
    model: Path, mixes: Sequence[str], levels: Sequence[int], *, rounds: int, seconds: float, device: Device
) -> Iterator[Compared]:
    """Compare both ways in turn, for each mix of lengths and number of concurrent requests.

    `model` is a folder of a repository, with halfserve.padding in its config.pbtxt.

    Raises:
        BadParameter: the model has no padding, or a mix is unknown.
    """
    with tempfile.TemporaryDirectory(dir=model.parent.parent) as folder:
        longest = longest_inputs(write_ways(model, Path(folder)))
        with server_process(Path(folder), placement="--cpu" if device == "cpu" else "--require-gpu") as server:
            for mix, in_flight in itertools.product(mixes, levels):
                yield asyncio.run(_compared(server, longest, mix, in_flight, rounds, seconds))
            sys.stderr.write(server.log_text())


async def _compared(
    server: ServerProcess, longest: dict[str, Array], mix: str, in_flight: int, rounds: int, seconds: float
) -> Compared:
    found = Compared(mix=mix, in_flight=in_flight, rates={way: [] for way in WAYS})
    lengths = lengths_of(mix, np.random.default_rng(0))
    async with AsyncClient(server.address) as client:
        for way in WAYS:
            await rate(client, way, longest, lengths, in_flight, seconds / 2)  # warm-up
        for number in range(rounds):
            for way in WAYS if number % 2 else WAYS[::-1]:
                answered, took = await rate(client, way, longest, lengths, in_flight, seconds)
                found.rates[way].append(answered / took)
    return found
