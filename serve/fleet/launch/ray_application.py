"""The Ray Serve application: replicas, each with an agent and its server, and the actor of the controller."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.util import get_node_ip_address

from halfserve.serve.fleet.agent.agent import Agent
from halfserve.serve.fleet.agent.server_process import AgentError, AgentOptions
from halfserve.serve.fleet.control.autoscaling import MemberLoad, ScalingOptions, wanted_members
from halfserve.serve.fleet.control.controller import Controller, ControllerOptions
from halfserve.serve.fleet.control.reports import LEASE_S, REPORT_S, Orders, Report
from halfserve.serve.fleet.launch.cluster_arguments import ClusterArguments

logger = logging.getLogger(__name__)

ANY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104  (compared with, never listened on)
DEPLOYMENT = "Server"  # its name in Ray Serve
OF_SCALING = ("replicas", "latency_target_ms", "scale_down_seconds")  # arguments of autoscaling
PUSH_S = 0.5  # interval of a replica's load reports to Ray Serve, whose default is 10 s
SHUTDOWN_S = 60.0  # time for a server to drain before Ray Serve kills the replica
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

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the controller."""
        answer = getattr(self._controller, method)(*arguments)
        return await answer if isinstance(answer, Awaitable) else answer


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
    remote: Any = ray.remote  # its overloads know no such options
    actor = remote(num_cpus=0, max_restarts=-1, max_concurrency=CALLS)(ControllerActor)
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
        self._handle: Any = None  # the controller's ActorHandle
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

    async def _ask(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                if self._handle is None:
                    # On a thread, because this asks Ray's head, which may be unreachable.
                    handle: Any = await asyncio.to_thread(start_controller, self._application, self._options, self.cluster)
                    self.cluster = await handle.join.remote(self._options)
                    self._handle = handle
                return await self._handle.ask.remote(method, *arguments)
        except RayTaskError as error:  # the controller answered with an error
            raise error.cause from None
        except RayActorError as error:
            self._handle = None
            raise ConnectionError(f"the controller is gone: {type(error).__name__}") from error
        except (RayError, TimeoutError, ValueError) as error:  # ValueError: an actor of that name is just ending
            raise ConnectionError(f"the controller is out of reach: {type(error).__name__}") from error


class ScalingHook:
    """Autoscaling policy for Ray Serve: number of replicas that the load needs, as computed by `autoscaling.py`."""

    def __init__(self, queue_s: float, look_back_s: float) -> None:
        self._options = ScalingOptions(queue_s=queue_s, look_back_s=look_back_s)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Compute the number of replicas; Ray Serve calls this about ten times a second, and keeps the state."""
        figures = context.aggregated_metrics or {}
        loads = [
            MemberLoad(busy=busy, queue_s=figures["queue_s"][replica], refused=figures["refused"][replica])
            for replica, busy in figures.get("busy", {}).items()
        ]
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        options = replace(self._options, least=least, most=most)
        state, now_s = context.policy_state or {}, cast("float", context.current_time)
        return wanted_members(loads, context.target_num_replicas, options, state, now_s)


class Replica:
    """Ray Serve replica that holds one agent and its server."""

    async def __init__(self, arguments: ClusterArguments) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        context = ray.get_runtime_context()
        address = get_node_ip_address()
        link = RayLink(serve.get_replica_context().app_name, ControllerOptions(models_per_member=arguments.models_per_member))
        await link.connect()
        options = AgentOptions(
            path=arguments.path,
            cluster=link.cluster,
            arguments=server_options(arguments),
            host=arguments.host or address,
            advertised_host=address if arguments.host in ANY_ADDRESS else arguments.host,
            first_port=arguments.first_port,
            machine=f"{address}/{context.get_node_id()[:8]}",
        )
        # Started on this event loop's thread, which lives as long as the process: the kernel ends the server together with the
        # thread that started it.
        self._agent = Agent(options, link)
        try:
            await self._agent.start()
        except BaseException:
            await self._agent.stop()
            raise

    def reconfigure(self, deployed: Mapping[str, Any]) -> None:
        """Accept `user_config`, which only records the deployed arguments for `halfserve cluster` to read."""

    async def check_health(self) -> None:
        """End this replica if its server has ended: Ray Serve would replace it only after the third failed check."""
        try:
            self._agent.check()
        except AgentError as error:
            logger.error("%s", error)  # noqa: TRY400  (a line that says it all)
            with contextlib.suppress(Exception):
                await self._agent.stop()
            os._exit(1)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return asdict(self._agent.load)

    def record_replica_metadata(self) -> dict[str, str]:
        return {"address": self._agent.address, "http_address": self._agent.http_address}

    async def __del__(self) -> None:  # Ray Serve awaits it
        await self._agent.stop()


def server_options(arguments: ClusterArguments) -> tuple[str, ...]:
    """Options of `halfserve serve` that limit a server to its replica's share of the machine."""
    own = ["--require-gpu" if arguments.gpus else "--cpu"]
    if not any(option.startswith("--threads") for option in arguments.server):
        own += ["--threads", str(max(1, int(arguments.cpus)))]
    return (*own, *arguments.server)


def build(given: Mapping[str, Any]) -> Application:
    """Build the application from its arguments, the fields of `ClusterArguments`.

    Raises:
        ClusterArgumentError: a name is unknown, or a value is invalid.
    """
    arguments = ClusterArguments.read(given)
    fewest, most = arguments.bounds
    deployed = arguments.as_given()
    # Serve replaces all replicas when the version changes, so the version must not depend on the number of replicas.
    version = hashlib.sha256(
        json.dumps([one for one in sorted(deployed.items()) if one[0] not in OF_SCALING]).encode()
    ).hexdigest()
    deployment = serve.deployment(
        name=DEPLOYMENT,
        user_config=deployed,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=fewest,
            max_replicas=most,
            # The policy has its own delays, to which Serve would add these.
            upscale_delay_s=0,
            downscale_delay_s=0,
            look_back_period_s=2 * PUSH_S,
            metrics_interval_s=PUSH_S,  # deprecated, but what Ray 2.60 reads
            policy=AutoscalingPolicy(
                policy_function=ScalingHook,
                policy_kwargs={"queue_s": arguments.latency_target_ms / 1000, "look_back_s": arguments.scale_down_seconds},
            ),
        ),
        health_check_period_s=0.5,
        graceful_shutdown_timeout_s=SHUTDOWN_S,
        graceful_shutdown_wait_loop_s=0.1,  # no requests pass through Ray, so there are none to wait for
        max_constructor_retry_count=2,
        max_surge_percent=25,  # a new version starts before an old one ends, so a broken version never replaces a working one
    )
    application: Application = deployment(Replica).options(_internal=True, version=version).bind(arguments)
    return application
