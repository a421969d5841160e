"""The Ray actor of a cluster's controller, and an agent's connection to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from halfserve.serve.engine.errors import UnavailableError
from halfserve.serve.fleet.control.controller import Controller
from halfserve.serve.fleet.control.reports import LEASE_S, REPORT_S, Orders, Report
from halfserve.serve.fleet.control.wanted import Wanted
from halfserve.serve.fleet.launch.ray_deployment import deployed

logger = logging.getLogger(__name__)

NAMESPACE = "halfserve"
CALLS = 4096  # concurrent calls: one long poll per member, and calls from users
ALONE_S = 600.0  # time without members before the controller ends; a member may take long to start
LOOK_S = 5.0
STARTS_S = 30.0  # time limit for the start of an actor
STORE_S = 30.0  # time limit of Ray Serve's own controller
ChangeWanted = Callable[[str, Wanted], None]  # changes the wanted state of an application


class ServeStore:
    """Wanted states in the `user_config` of Ray Serve's deployments: a `WantedStore`."""

    def __init__(self, change: ChangeWanted) -> None:
        self._change = change
        self._lock = asyncio.Lock()

    async def read(self, group: str) -> Wanted:
        found = await self._in_time(deployed, group)
        return {} if found is None else found.wanted

    async def change(self, group: str, orders: Wanted) -> None:
        async with self._lock:  # a change reads the state, and writes it
            await self._in_time(self._change, group, orders)

    async def _in_time(self, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(STORE_S):
                return await asyncio.to_thread(work, *arguments)
        except Exception as error:
            logger.exception("Ray Serve does not tell or take the wanted state")
            raise UnavailableError(
                f"Ray Serve, which keeps what the servers shall do, does not answer now ({type(error).__name__}); try again"
            ) from None


class ControllerActor:
    """Ray actor around a `Controller`; after a crash Ray starts a new one, which learns the members from their reports."""

    def __init__(self, change: ChangeWanted) -> None:
        self._controller = Controller(ServeStore(change))
        self._leaving: asyncio.Task[None] | None = None

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the controller."""
        self._leaving = self._leaving or asyncio.get_running_loop().create_task(self._leave_when_alone())
        answer = getattr(self._controller, method)(*arguments)
        return await answer if isinstance(answer, Awaitable) else answer

    async def _leave_when_alone(self) -> None:
        """End the actor for good once the cluster has no members, because Ray does not end a detached actor by itself."""
        alone_s = 0.0
        while alone_s < ALONE_S:
            await asyncio.sleep(LOOK_S)
            alone_s = 0.0 if self._controller.status()["members"] else alone_s + LOOK_S
        ray.kill(ray.get_runtime_context().current_actor)


def find_controller(cluster: str) -> ActorHandle | None:
    """Find the controller of a cluster; None if there is none."""
    try:
        return ray.get_actor(cluster, NAMESPACE)
    except ValueError:
        return None


def start_controller(cluster: str, change: ChangeWanted) -> ActorHandle:
    """Find the controller of a cluster, or start it."""
    remote: Any = ray.remote  # its overloads know no such options
    actor = remote(num_cpus=0, max_restarts=-1, max_concurrency=CALLS)(ControllerActor)
    # Detached, so that it outlives the replica that started it.
    named = actor.options(name=cluster, namespace=NAMESPACE, lifetime="detached", get_if_exists=True)
    return named.remote(change)


class RayLink:
    """An agent's connection to the controller: a `ControllerLink`."""

    def __init__(self, cluster: str, change: ChangeWanted) -> None:
        """Connect at the first call; a controller that has to be started gets `change`."""
        self._cluster = cluster
        self._change = change
        self._handle: Any = None  # the controller's ActorHandle

    async def exchange(self, report: Report) -> Orders:
        orders: Orders = await self._ask(STARTS_S if self._handle is None else REPORT_S + LEASE_S, "exchange", report)
        return orders

    async def call(self, path: str, request: bytes) -> bytes:
        answer: bytes = await self._ask(None, "call", path, request)
        return answer

    async def _ask(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                if self._handle is None:
                    # On a thread, because this asks Ray's head, which may be unreachable.
                    self._handle = await asyncio.to_thread(start_controller, self._cluster, self._change)
                return await self._handle.ask.remote(method, *arguments)
        except RayTaskError as error:  # the controller answered with an error
            raise error.cause from None
        except RayActorError as error:
            self._handle = None
            raise ConnectionError(f"the controller is gone: {type(error).__name__}") from error
        except (RayError, TimeoutError, ValueError) as error:  # ValueError: an actor of that name is just ending
            raise ConnectionError(f"the controller is out of reach: {type(error).__name__}") from error
