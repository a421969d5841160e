"""Several servers that answer as one, as tests see them."""

from __future__ import annotations

import re
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from halfserve import Client

T = TypeVar("T")
WAIT_S = 60.0
X = np.ones((1, 64), np.float16)


class Fleet(ABC):
    """Servers with the models `mlp` and `picky`, and clients of all of them."""

    @property
    @abstractmethod
    def clients(self) -> Sequence[Client]:
        """Clients that together are connected to all servers."""

    @abstractmethod
    def url(self, port: str) -> str:
        """URL of a port of any of the servers: "http_port" or "metrics_port"."""

    @abstractmethod
    def lose_one(self, ask: Callable[[Client], object]) -> None:
        """Call `ask` with clients of a server, kill the server, and return once as many servers as before answer for all."""

    def page(self, port: str, path: str, data: bytes | None = None) -> str:
        with urllib.request.urlopen(f"{self.url(port)}{path}", data, timeout=WAIT_S) as answer:  # noqa: S310  (the test's own)
            text: str = answer.read().decode()
        return text

    def metric(self, name: str) -> float:
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.page("metrics_port", "/metrics"), re.MULTILINE)
        return sum(map(float, values))

    def agree(self, ask: Callable[[Client], T]) -> T:
        """What each client gets: it must be the same."""
        answers = [ask(client) for client in self.clients]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]


def infer(client: Client) -> object:
    return client.infer("mlp", {"x": X})["y"]


def rows(client: Client, model: str = "mlp") -> int:
    """Rows that a model has computed in all servers."""
    (counters,) = client.statistics(model)
    assert counters.inference_stats.success.count == counters.execution_count
    return int(counters.inference_count)


def states(client: Client) -> dict[str, str]:
    return {one.name: one.state for one in client.models()}
