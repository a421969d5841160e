"""The controller's record of one member: its reports, the orders it was sent, and its load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from halfserve.protos import cluster_pb2
from halfserve.serve.fleet.control.autoscaling import LoadMeter
from halfserve.serve.fleet.control.cluster_memory import estimate
from halfserve.serve.fleet.control.reports import NOTHING, ModelReport, Orders, Report


@dataclass(kw_only=True)
class Given:
    """Versions of everything that the member was sent last."""

    generations: Mapping[str, int]
    directory: int = 0
    counters: int = 0
    memory: int = 0
    drain: bool = False


class MemberRecord:
    """Controller's record of one member. Lives on the event loop.

    Attributes:
        report: its last report.
        reported_at: arrival time of the last report, in seconds of the controller's clock.
        joined_at: arrival time of the first report.
        counters: the last counters received; None before.
        counters_number: the `Orders.counters_number` that those counters answer.
        served: names of the models that it serves.
        failed: names of the models whose last order failed.
        published: names of the models that the last directory lists for it.
        profile: the part of its report that other members and clients depend on; compared to detect changes.
        meter: measures the load of the member and of its models.
        drains: whether the member was asked to leave.
        hands_over_until: time, in seconds of the controller's clock, until which the member keeps answering unless other
            members serve its models earlier; None while it is not leaving, and once it may leave.
        given: versions of everything that it was sent last.
    """

    def __init__(self, report: Report, now: float) -> None:
        self.report = report
        self.joined_at = self.reported_at = now
        self.counters: bytes | None = None
        self.counters_number = 0
        self.served: frozenset[str] = frozenset()
        self.failed: frozenset[str] = frozenset()
        self.published: frozenset[str] = frozenset()
        self.profile: object = None
        self.meter = LoadMeter()
        self.drains = False
        self.hands_over_until: float | None = None
        self.given = Given(generations={})
        self._counters_models: Mapping[str, ModelReport] = {}
        self._poll: asyncio.Future[bool] | None = None

    @property
    def id(self) -> str:
        return self.report.member

    @property
    def title(self) -> str:
        """Name of the member for messages."""
        return f"member {self.id} on {self.report.machine} ({self.report.grpc_address})"

    @property
    def is_leaving(self) -> bool:
        return self.drains or self.report.is_draining

    @property
    def takes_requests(self) -> bool:
        """Whether clients may send it requests; a leaving member accepts them until other members serve its models."""
        return not self.report.is_draining and (not self.drains or self.hands_over_until is not None)

    def model(self, name: str) -> ModelReport:
        """Last report of a model; NOTHING if the member did not report it."""
        return self.report.models.get(name, NOTHING)

    def serves(self, name: str) -> bool:
        return name in self.served

    def take(self, report: Report, now: float) -> None:
        """Take in a new report."""
        self.report, self.reported_at = report, now
        self.served = frozenset(name for name, model in report.models.items() if model.is_served)
        self.failed = frozenset(name for name, model in report.models.items() if model.error)
        self.profile = (report.grpc_address, report.http_address, report.is_draining, self.served, self.failed)
        self.meter.take(report.models, report.compute_slots, now)
        if report.counters is not None and report.counters_number >= self.counters_number:
            self.counters, self.counters_number, self._counters_models = report.counters, report.counters_number, report.models

    def last_counters(self) -> bytes:
        """Counters estimated from its last report, for a member that ended without reporting its counters."""
        return estimate(self.counters, self._counters_models, self.report.models)

    def entry(self) -> cluster_pb2.Member:
        """Entry of this member in the directory."""
        states = cluster_pb2.Member.State
        return cluster_pb2.Member(
            id=self.id,
            grpc_address=self.report.grpc_address,
            http_address=self.report.http_address,
            state=states.SERVING if self.takes_requests else states.DRAINING,
            models=sorted(self.served),
        )

    async def wait(self, limit_s: float) -> bool:
        """Wait until there are new orders for this member, at most `limit_s` seconds.

        Returns:
            Whether the report that began the wait is still the last one: a later report ends the wait.
        """
        self.wake(is_last=False)
        poll = self._poll = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_s):
                is_last: bool = await poll
        except TimeoutError:
            is_last = True
        finally:
            if self._poll is poll:
                self._poll = None
        return is_last

    def wake(self, *, is_last: bool = True) -> None:
        """End the wait."""
        poll, self._poll = self._poll, None
        if poll is not None and not poll.done():
            poll.set_result(is_last)

    def is_news(self, orders: Orders, directory: int) -> bool:
        """Whether orders contain anything not sent yet; `directory` is the version of the current directory."""
        given = self.given
        return (
            {name: order.generation for name, order in orders.models.items()} != given.generations
            or (orders.directory is not None and directory > given.directory)
            or orders.counters_number > given.counters
            or orders.settings is not None
            or orders.memory is not None
            or orders.drain != given.drain
        )

    def tell(self, orders: Orders, *, directory: int, memory: int) -> None:
        """Record the orders as sent."""
        self.given = Given(
            generations={name: order.generation for name, order in orders.models.items()},
            directory=directory,
            counters=orders.counters_number,
            memory=memory,
            drain=orders.drain,
        )
