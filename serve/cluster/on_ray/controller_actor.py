"""The controller as an actor of Ray, which starts it again wherever it died, and the agents' way to it."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from halfserve.serve.cluster.controller import Controller, ControllerOptions
from halfserve.serve.cluster.reports import LEASE_S, REPORT_S, Orders, Report

NAMESPACE = "halfserve"
CALLS = 4096  # at once: a long poll of each member, and questions of users
ALONE_S = 600.0  # without a member, which may be long in starting
LOOK_S = 5.0
STARTS_S = 30.0  # for an actor that is being started


class ControllerActor:
    """A `Controller`; its successor after a crash is another one, which learns from the agents."""

    def __init__(self, cluster: str, options: ControllerOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._controller = Controller(options)
        self._leaving: asyncio.Task[None] | None = None

    async def _leave_when_alone(self) -> None:
        """End for good once the application was deleted, by whatever means: nobody else ends a detached actor."""
        alone_s = 0.0
        while alone_s < ALONE_S:
            await asyncio.sleep(LOOK_S)
            alone_s = 0.0 if self._controller.status()["members"] else alone_s + LOOK_S
        ray.kill(ray.get_runtime_context().current_actor)

    async def join(self, options: ControllerOptions) -> str:
        """What tells this cluster from others, and from one of the same name before it.

        Other options than the present ones, of replicas that take the place of others, make another controller: it learns from
        the agents, as after a crash.
        """
        self._leaving = self._leaving or asyncio.get_running_loop().create_task(self._leave_when_alone())
        if options != self._options:
            self._options, self._controller = options, Controller(options)
        return self._cluster

    async def exchange(self, report: Report) -> Orders:
        return await self._controller.exchange(report)

    async def call(self, path: str, request: bytes) -> bytes:
        return await self._controller.call(path, request)

    async def metrics(self) -> tuple[bytes, str]:
        return await self._controller.metrics()

    async def status(self) -> dict[str, Any]:
        return self._controller.status()

    async def drain(self, member: str) -> None:
        self._controller.drain(member)

    async def reload(self, model: str | None) -> None:
        await self._controller.reload(model)


def find_controller(application: str) -> ActorHandle | None:
    """The controller of a Ray Serve application; None if there is none."""
    try:
        return ray.get_actor(application, NAMESPACE)
    except ValueError:
        return None


def start_controller(application: str, options: ControllerOptions, cluster: str = "") -> ActorHandle:
    """The controller of a Ray Serve application, which is started if there is none.

    Args:
        application: its name.
        options: of a new one.
        cluster: id of the cluster, if there was a controller before; empty for a new cluster.
    """
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=CALLS)(ControllerActor)
    # Detached: it outlives the replica that came first.
    named = actor.options(name=application, namespace=NAMESPACE, lifetime="detached", get_if_exists=True)
    return named.remote(cluster or uuid.uuid4().hex, options)


class RayLink:
    """How an agent reaches the controller: a `ControllerLink`.

    Attributes:
        cluster: id of the cluster; "" before `connect`.
    """

    def __init__(self, application: str, options: ControllerOptions) -> None:
        self._application = application
        self._options = options
        self._handle: ActorHandle | None = None
        self.cluster = ""

    async def connect(self) -> None:
        """Find the controller, or start it.

        Raises:
            ConnectionError: there is none now, and none can be started.
        """
        await self._ask(STARTS_S, "status")

    async def exchange(self, report: Report) -> Orders:
        orders: Orders = await self._ask(REPORT_S + LEASE_S, "exchange", report)
        return orders

    async def call(self, path: str, request: bytes) -> bytes:
        answer: bytes = await self._ask(None, "call", path, request)
        return answer

    async def metrics(self) -> tuple[bytes, str]:
        answer: tuple[bytes, str] = await self._ask(None, "metrics")
        return answer

    async def _ask(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                if self._handle is None:
                    # On a thread: it asks Ray's head, which may be out of reach.
                    handle = await asyncio.to_thread(start_controller, self._application, self._options, self.cluster)
                    self.cluster = await handle.join.remote(self._options)
                    self._handle = handle
                return await getattr(self._handle, method).remote(*arguments)
        except RayTaskError as error:  # the controller's answer
            raise error.cause from None
        except RayActorError as error:
            self._handle = None
            raise ConnectionError(f"the controller is gone: {type(error).__name__}") from error
        except (RayError, TimeoutError, ValueError) as error:  # ValueError: an actor of that name is just ending
            raise ConnectionError(f"the controller is out of reach: {type(error).__name__}") from error
