"""The Ray Serve application of a group of servers: replicas, each with an agent and its server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application
from ray.serve.api import RunTarget
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.schema import ServeDeploySchema
from ray.util import get_node_ip_address

from halfserve.serve.fleet.agent.agent import Agent
from halfserve.serve.fleet.agent.server_process import AgentError, AgentOptions
from halfserve.serve.fleet.control.autoscaling import MemberLoad, ScalingOptions, wanted_members
from halfserve.serve.fleet.control.wanted import Wanted
from halfserve.serve.fleet.launch.cluster_arguments import ClusterArguments
from halfserve.serve.fleet.launch.ray_controller import RayLink
from halfserve.serve.fleet.launch.ray_deployment import DEPLOYMENT, applications, deployed, serve_client, user_config, wanted_of

logger = logging.getLogger(__name__)

ANY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104  (compared with, never listened on)
OF_SCALING = ("replicas", "latency_target_ms", "scale_down_seconds")  # arguments of autoscaling
PUSH_S = 0.5  # interval of a replica's load reports to Ray Serve, whose default is 10 s
NO_ORDERS: Wanted = MappingProxyType({})
SHUTDOWN_S = 60.0  # time for a server to drain before Ray Serve kills the replica


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
        """Start the server; Ray Serve calls `reconfigure` next, which gives it its models."""
        context = ray.get_runtime_context()
        address, application = get_node_ip_address(), serve.get_replica_context().app_name
        options = AgentOptions(
            path=arguments.path,
            group=application,
            patterns=arguments.patterns,
            arguments=server_options(arguments),
            host=arguments.host or address,
            advertised_host=address if arguments.host in ANY_ADDRESS else arguments.host,
            first_port=arguments.first_port,
            machine=f"{address}/{context.get_node_id()[:8]}",
        )
        # Started on this event loop's thread, which lives as long as the process: the kernel ends the server together with the
        # thread that started it.
        self._agent = Agent(options, RayLink(arguments.cluster or application, change_wanted))
        self._serves = False
        await self._or_stop(self._agent.start())

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Serve what `user_config` says. Later calls raise nothing, as Ray Serve would end the replica."""
        if self._serves:
            self._agent.follow(wanted_of(config))
        else:
            await self._or_stop(self._agent.serve(wanted_of(config)))
            self._serves = True

    async def _or_stop(self, work: Awaitable[None]) -> None:
        """Wait for a step of the start; if it fails, end the server."""
        try:
            await work
        except BaseException:
            await self._agent.stop()
            raise

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


def build(arguments: ClusterArguments, wanted: Wanted) -> Application:
    """Build the application; servers that run already take over another wanted state without a restart."""
    fewest, most = arguments.bounds
    # Serve replaces all replicas when the version changes, so the version must not depend on the number of replicas.
    lasting = [one for one in sorted(arguments.as_given().items()) if one[0] not in OF_SCALING]
    version = hashlib.sha256(json.dumps(lasting).encode()).hexdigest()
    deployment = serve.deployment(
        name=DEPLOYMENT,
        user_config=user_config(arguments, wanted),
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


def submit(name: str, arguments: ClusterArguments, orders: Wanted = NO_ORDERS) -> None:
    """Deploy a group's application, or change it, without waiting for its servers; `orders` are added to its wanted state."""
    before = deployed(name)
    wanted = orders if before is None else {**before.wanted, **orders}
    target = RunTarget(target=build(arguments, wanted), name=name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def change_wanted(name: str, orders: Wanted) -> None:
    """Add orders to the wanted state of a group's application, in place of those for the same targets.

    Raises:
        LookupError: there is no application of this name.
    """
    now = deployed(name)
    if now is None:
        raise LookupError(f"Ray Serve has no application {name!r}")
    if now.is_declared:
        _declare(name, user_config(now.arguments, {**now.wanted, **orders}))
    else:
        submit(name, now.arguments, orders)


def _declare(name: str, config: Mapping[str, Any]) -> None:
    """Change the `user_config` of an application that a config file deployed; it counts as deployed by that file then too."""
    declared = {one: found["deployed_app_config"] for one, found in applications().items() if found["deployed_app_config"]}
    options = {one["name"]: one for one in declared[name].get("deployments") or ()}
    options[DEPLOYMENT] = {**options.get(DEPLOYMENT, {"name": DEPLOYMENT}), "user_config": config}
    declared[name] = {**declared[name], "deployments": list(options.values())}
    serve_client().deploy_apps(ServeDeploySchema.model_validate({"applications": list(declared.values())}))
