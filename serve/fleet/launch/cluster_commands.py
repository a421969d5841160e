"""Commands of `halfserve cluster`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Annotated, Any

import typer

from halfserve.installation import install_hint
from halfserve.option_groups import takes_option_groups
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.fleet.launch.cluster_arguments import (
    ClusterArgumentError,
    ClusterArguments,
    ClusterError,
    MemberOptions,
    bounds_of,
)
from halfserve.serve.fleet.member.fleet_commands import LOAD, UNLOAD

EXIT_CODES: dict[type[Exception], int] = {
    ClusterArgumentError: 2,
    ClusterError: 1,
    InferenceError: 1,
    OSError: 1,
}
OLDEST = (2, 60)  # oldest Ray with `record_replica_metadata` and `max_surge_percent`

cluster = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="""Serve models on many machines that answer as one, with Ray.

    RAY_ADDRESS says where Ray runs; without it, it is the one on this machine.

    Example: halfserve cluster run s3://bucket/models --replicas 1:8 --gpus 1
    """,
)
Name = Annotated[str, typer.Option(help="Name of these servers' application in Ray Serve, where one Ray has several.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Its name.")]
WaitSeconds = Annotated[float, typer.Option(min=1, help="Time for the servers to start.")]
NAME, WAIT_S, LOOK_S, LOOPBACK = "halfserve", 300.0, 1.0, "127.0.0.1"


def _ray() -> ModuleType:
    """Import the module that talks to Ray; only commands that need Ray call this.

    Raises:
        ClusterError: Ray is too old.
    """
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise ModuleNotFoundError("No module named 'ray'", name="ray") from None
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        raise ClusterError(f"Ray {installed} is installed, expected {OLDEST[0]}.{OLDEST[1]} or newer; {install_hint('ray')}")
    # Ray reads this at import. Without it, Ray prints a page about memory for each process that ends; `run` prints one line.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    from halfserve.serve.fleet.launch import ray_cluster  # noqa: PLC0415  (imports Ray)

    return ray_cluster


def _connected() -> Any:
    ray_cluster = _ray()
    ray_cluster.connect()
    return ray_cluster


@cluster.command()
@takes_option_groups
def run(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="The model repository, where each machine finds it: a folder, or a URL such as s3://bucket/models.",
        ),
    ],
    server: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="Further options of halfserve serve, for each server.", show_default=False),
    ] = None,
    *,
    members: MemberOptions,
    name: Name = NAME,
    wait_seconds: WaitSeconds = WAIT_S,
    detach: Annotated[bool, typer.Option("--detach", help="Leave the cluster running, and end this command.")] = False,
    print_serve_config: Annotated[
        bool,
        typer.Option(
            "--print-serve-config", help="Print the file for `serve deploy` and KubeRay's RayService, and do nothing else."
        ),
    ] = False,
) -> None:
    """Start a cluster, or change it while it serves.

    Deploys to the Ray of RAY_ADDRESS, or the one on this machine; where there is none, it starts one, for this machine alone.
    Without --detach it ends the cluster with Ctrl-C or SIGTERM, after all requests in flight are answered.

    Example: halfserve cluster run runs/demo/repository --replicas 2 -- --max-batch-size 64
    """
    arguments = ClusterArguments(path=path, server=tuple(server or ()), **asdict(members))
    if print_serve_config:
        import yaml  # noqa: PLC0415  (comes with Ray)

        typer.echo(yaml.safe_dump(arguments.serve_config(name), sort_keys=False), nl=False)
        return
    ray_cluster = _ray()
    is_own = ray_cluster.connect(start=True, detach=detach)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has installed its own handler
    if is_own:
        arguments = replace(arguments, host=members.host or LOOPBACK)
        typer.echo(f"started Ray on this machine, at {ray_cluster.address()}" + "; end it with `ray stop`" * detach, err=True)
        ray_cluster.check_room(arguments)
    ray_cluster.deploy(name, arguments, wait_s=wait_seconds, say=_say)
    found = ray_cluster.ask(name, "status")
    for model in found["models"]:
        reasons = [version["reason"] for version in model["versions"] if version["reason"]]
        if model["is_loaded"] and not model["members"] and reasons:
            _say(f"model {model['name']!r} is not served: {reasons[0]}")
    addresses = [member["grpc_address"] for member in found["members"]]
    servers = "1 server" if len(addresses) == 1 else f"{len(addresses)} servers"
    typer.echo(f"ready: {servers}; clients take cluster://{','.join(addresses)}")
    if not detach:
        _follow(ray_cluster, name, is_own=is_own)


def _follow(ray_cluster: Any, name: str, *, is_own: bool) -> None:
    """Report servers that end, until the cluster is deleted or this command is stopped, which deletes the cluster."""
    try:
        running: frozenset[str] = frozenset()
        while (now := ray_cluster.deployed(name)) is not None:
            if running - now.running and len(now.running) < now.target:
                _say(f"a server has ended, {len(now.running)} of {now.target} run; Ray starts another one")
            running = now.running
            time.sleep(LOOK_S)
        typer.echo("stopped", err=True)
        if is_own:
            ray_cluster.await_other_commands()
    except KeyboardInterrupt:
        typer.echo("draining", err=True)
        ray_cluster.delete(name)


@cluster.command()
def status(name: Name = NAME, as_json: AsJson = False) -> None:
    """Show members, models, load and versions.

    Example: halfserve cluster status --json
    """
    ray_cluster = _connected()
    found = ray_cluster.ask(name, "status")
    deployed = ray_cluster.deployed(name)
    if deployed is not None:
        found |= {
            "status": deployed.status,
            "message": deployed.message,
            "replicas": deployed.arguments.replicas,
            "wanted": deployed.target,
            "running": len(deployed.running),
            "lacks_room": deployed.lacks_room,
        }
    if as_json:
        typer.echo(json.dumps(found))
        return
    _print_status(name, found)


@cluster.command()
def load(model: Model, name: Name = NAME) -> None:
    """Load a model: at one member first, then at the others.

    Example: halfserve cluster load mnist
    """
    request = pb.RepositoryModelLoadRequest(model_name=model)
    _connected().ask(name, "call", LOAD, request.SerializeToString(), limit_s=None)


@cluster.command()
def unload(model: Model, name: Name = NAME) -> None:
    """Unload a model at all members.

    Example: halfserve cluster unload mnist
    """
    request = pb.RepositoryModelUnloadRequest(model_name=model)
    _connected().ask(name, "call", UNLOAD, request.SerializeToString(), limit_s=None)


@cluster.command()
def reload(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Its name; all that are loaded where none is given.")
    ] = None,
    name: Name = NAME,
) -> None:
    """Load models again from the repository.

    One member loads a model first; if it refuses, all serve on what they had.

    Example: halfserve cluster reload mnist
    """
    _connected().ask(name, "reload", model, limit_s=None)


@cluster.command()
def scale(
    replicas: Annotated[
        str, typer.Argument(metavar="REPLICAS", help="How many servers: 2, or 1:8 for as many as the load needs.")
    ],
    name: Name = NAME,
    wait_seconds: WaitSeconds = WAIT_S,
) -> None:
    """Change how many servers there are.

    Those that are too many answer what they have, and leave.

    Example: halfserve cluster scale 2:8
    """
    bounds_of(replicas)
    ray_cluster = _connected()
    deployed = ray_cluster.deployed(name)
    if deployed is None:
        ray_cluster.controller(name)
        raise ClusterError(f"no servers run under the name {name!r}; `halfserve cluster status --json` shows the groups")
    ray_cluster.deploy(name, replace(deployed.arguments, replicas=replicas), wait_s=wait_seconds, say=_say)


@cluster.command()
def drain(
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="Its id, as status shows it.")],
    name: Name = NAME,
) -> None:
    """Replace a member without a failed request.

    It answers what it has, and leaves; Ray starts another one in its place.

    Example: halfserve cluster drain 3f9a2c41
    """
    _connected().ask(name, "drain", member)


@cluster.command()
def stop(name: Name = NAME) -> None:
    """Drain and end all servers of an application; its cluster ends with its last one.

    Example: halfserve cluster stop
    """
    ray_cluster = _connected()
    ray_cluster.controller(name)
    ray_cluster.delete(name)
    typer.echo("stopped", err=True)


def _say(line: str) -> None:
    typer.echo(f"halfserve cluster: {line}", err=True)


def _print_status(name: str, status: Mapping[str, Any]) -> None:
    """Print a summary line, and one table each of members and models."""
    from rich import box  # noqa: PLC0415  (takes long to import)
    from rich.table import Column, Table  # noqa: PLC0415  (as above)

    from halfserve.serve.client.cli.display import PipedConsole  # noqa: PLC0415  (imports rich)

    console, members = PipedConsole(), status["members"]
    line = f"{name}: " + ("1 member" if len(members) == 1 else f"{len(members)} members")
    if "wanted" in status:
        line += f", {status['running']} of {status['wanted']} replicas run ({status['replicas']} asked for), {status['status']}"
        line += ", which wait for room" if status["lacks_room"] else ""
    console.print(line, soft_wrap=True)
    if status.get("message"):
        console.print(status["message"], soft_wrap=True)
    texts = [Column(heading, no_wrap=True) for heading in ("member", "gRPC", "state")]
    numbers = [Column(heading, justify="right", no_wrap=True) for heading in ("models", "busy %", "queue ms", "refused %")]
    table = Table(*texts, *numbers, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for one in members:
        load = f"{one['busy'] * 100:.0f}", f"{one['queue_s'] * 1000:.2f}", f"{one['refused'] * 100:.1f}"
        table.add_row(one["id"], one["grpc_address"], one["state"], str(len(one["models"])), *load)
    console.print(table)
    texts = [Column("model", overflow="fold"), *(Column(heading, no_wrap=True) for heading in ("version", "state"))]
    numbers = [Column(heading, justify="right", no_wrap=True) for heading in ("members", "requests/s")]
    reason = Column("reason", overflow="fold")
    table = Table(*texts, *numbers, reason, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for one in status["models"]:
        for each in one["versions"]:
            shown = f"{len(one['members'])}/{len(members)}", f"{one['requests_s']:,.0f}"
            table.add_row(one["name"], each["version"], each["state"], *shown, each["reason"])
    console.print(table)
