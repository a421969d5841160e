"""Clients of a simulated cluster: load by Zipf's law over many models, sent to the members in the last directory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.serve.simulated_cluster.members import SimulatedMember

STEP_S = 0.1
COMPUTE_S = 0.002  # compute time of one request
PATIENCE_S = 10.0  # time for which a client retries


def zipf(models: Sequence[str], requests_s: float, exponent: float = 1.0) -> dict[str, float]:
    """Requests a second of each model; the first model has the most."""
    weights = [1 / rank**exponent for rank in range(1, len(models) + 1)]
    return {model: requests_s * weight / sum(weights) for model, weight in zip(models, weights, strict=True)}


@dataclass(kw_only=True)
class Tally:
    """Results of the clients' requests.

    Attributes:
        answered: number of answered requests.
        lost: number of requests for which no member was found in time.
        longest_s: longest time until a member was found, in seconds.
    """

    answered: int = 0
    lost: int = 0
    longest_s: float = 0.0


class Traffic:
    """Requests at random times. A client looks for the model in the directory of any member, and retries like real clients."""

    def __init__(self, members: Mapping[str, SimulatedMember], rates: Mapping[str, float], seed: int = 1) -> None:
        """Send traffic to members, which may come and go; `rates` has each model's requests a second, and may change."""
        self.members = members
        self.rates = rates
        self.tally = Tally()
        self.by_model = dict.fromkeys(rates, 0)
        self._chance = random.Random(seed)  # noqa: S311  (no secret)

    async def run(self) -> None:
        """Send until it is cancelled."""
        waiting: list[tuple[str, int, float]] = []
        while True:
            came = [(model, int(rate * STEP_S + self._chance.random()), 0.0) for model, rate in self.rates.items()]
            waiting = [
                (model, count, waited_s + STEP_S)
                for model, count, waited_s in [*waiting, *came]
                if count and not self._send(model, count, waited_s)
            ]
            await asyncio.sleep(STEP_S)

    def _send(self, model: str, count: int, waited_s: float) -> bool:
        """Send requests; returns whether they are finished, that is, answered or lost."""
        knows = self._chance.choice(list(self.members.values()))
        listed = [one.id for one in knows.directory.members if model in one.models]
        serving = [self.members[one] for one in listed if one in self.members and self.members[one].serves(model)]
        if not serving:
            if waited_s < PATIENCE_S:
                return False
            self.tally.lost += count
            return True
        self._chance.choice(serving).count(model, count, compute_s=count * COMPUTE_S)
        self.tally.answered += count
        self.tally.longest_s = max(self.tally.longest_s, waited_s)
        self.by_model[model] += count
        return True
