"""The controller as a Ray actor, which Ray restarts after a failure, and the agents' connection to it."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from halfserve.serve.fleet.control.controller import Controller, ControllerOptions
from halfserve.serve.fleet.control.reports import LEASE_S, REPORT_S, Orders, Report

NAMESPACE = "halfserve"
CALLS = 4096  # concurrent calls: one long poll per member, and calls from users
ALONE_S = 600.0  # time without members before the controller ends; a member may take long to start
LOOK_S = 5.0
STARTS_S = 30.0  # time limit for the start of an actor


class ControllerActor:
    """Ray actor around a `Controller`; after a crash Ray starts a new one, which recovers its state from the agents."""

    def __init__(self, cluster: str, options: ControllerOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._controller = Controller(options)
        self._leaving: asyncio.Task[None] | None = None

    async def _leave_when_alone(self) -> None:
        """End the actor for good once the cluster has no members, because Ray does not end a detached actor by itself."""
        alone_s = 0.0
        while alone_s < ALONE_S:
            await asyncio.sleep(LOOK_S)
            alone_s = 0.0 if self._controller.status()["members"] else alone_s + LOOK_S
        ray.kill(ray.get_runtime_context().current_actor)

    async def join(self, options: ControllerOptions) -> str:
        """Return the cluster's id, which differs from that of an earlier cluster of the same name.

        If the options differ, as those of replicas that replace others may, a new controller takes over. It recovers its state
        from the agents, as after a crash.
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
    """Find the controller of a Ray Serve application; None if there is none."""
    try:
        return ray.get_actor(application, NAMESPACE)
    except ValueError:
        return None


def start_controller(application: str, options: ControllerOptions, cluster: str = "") -> ActorHandle:
    """Find the controller of a Ray Serve application, or start it.

    Args:
        application: name of the application.
        options: options of a new controller.
        cluster: id of the cluster if it had a controller before; empty for a new cluster.
    """
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=CALLS)(ControllerActor)
    # Detached, so that it outlives the replica that started it.
    named = actor.options(name=application, namespace=NAMESPACE, lifetime="detached", get_if_exists=True)
    return named.remote(cluster or uuid.uuid4().hex, options)


class RayLink:
    """An agent's connection to the controller: a `ControllerLink`.

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
            ConnectionError: no controller can be found or started now.
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
                    # On a thread, because this asks Ray's head, which may be unreachable.
                    handle = await asyncio.to_thread(start_controller, self._application, self._options, self.cluster)
                    self.cluster = await handle.join.remote(self._options)
                    self._handle = handle
                return await getattr(self._handle, method).remote(*arguments)
        except RayTaskError as error:  # the controller answered with an error
            raise error.cause from None
        except RayActorError as error:
            self._handle = None
            raise ConnectionError(f"the controller is gone: {type(error).__name__}") from error
        except (RayError, TimeoutError, ValueError) as error:  # ValueError: an actor of that name is just ending
            raise ConnectionError(f"the controller is out of reach: {type(error).__name__}") from error
