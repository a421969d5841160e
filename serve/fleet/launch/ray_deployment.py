"""Applications of Ray Serve that are groups of a cluster's servers: what they were deployed with, and how they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client

from halfserve.serve.fleet.control.wanted import Order, Wanted, wanted_from_json, wanted_to_json
from halfserve.serve.fleet.launch.cluster_arguments import ClusterArguments
from halfserve.serve.fleet.launch.ray_failures import last_line

DEPLOYMENT = "Server"  # name of the deployment in each application
RUNNING = ("RUNNING", "UPDATING")  # states of replicas whose server is ready; UPDATING while they take over a `user_config`
ARGUMENTS, WANTED = "arguments", "wanted"  # keys of its `user_config`


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """State of a group's application in Ray Serve.

    Attributes:
        status: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY or DELETING.
        message: reason of the status, in one line.
        is_declared: whether a config file deployed it.
        arguments: arguments that it was deployed with.
        wanted: wanted state of its servers.
        target: target number of replicas.
        running: ids of the replicas whose server is ready.
        lacks_room: whether some replicas wait for a machine with enough free resources.
    """

    status: str
    message: str
    is_declared: bool
    arguments: ClusterArguments
    wanted: Wanted
    target: int
    running: frozenset[str]
    lacks_room: bool


def user_config(arguments: ClusterArguments, wanted: Wanted) -> dict[str, Any]:
    """Return the deployment's `user_config`, which Ray Serve keeps and gives to each replica."""
    return {ARGUMENTS: arguments.as_given(), WANTED: wanted_to_json(wanted)}


def wanted_of(config: Mapping[str, Any]) -> dict[str, Order]:
    """Return the wanted state in a `user_config`."""
    return wanted_from_json(config[WANTED])


def deployed(name: str) -> Deployed | None:
    """State of a group's application; None if there is no application of this name."""
    found = applications().get(name, {"deployments": {}})
    one = found["deployments"].get(DEPLOYMENT)
    if one is None:
        return None
    config = one["deployment_config"]["user_config"]
    return Deployed(
        status=str(found["status"].value),
        message=last_line(one["message"] or found["message"]),
        is_declared=str(getattr(found["source"], "value", found["source"])) == "declarative",
        arguments=ClusterArguments.read(config[ARGUMENTS]),
        wanted=wanted_of(config),
        target=one["target_num_replicas"],
        running=frozenset(each["replica_id"] for each in one["replicas"] if str(each["state"].value) in RUNNING),
        lacks_room="to be scheduled" in one["message"],
    )


def applications() -> dict[str, Any]:
    """Ray Serve's details of its applications, by name; empty if Ray Serve does not run."""
    try:
        client: Any = _get_global_client(raise_if_no_controller_running=False)
        return dict(client.get_serve_details()["applications"]) if client else {}
    except RayActorError:  # it has just ended
        return {}


def serve_client() -> Any:
    """Return the client of Ray Serve's own controller."""
    return _get_global_client()
