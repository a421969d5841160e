"""Ray cluster as used by `halfserve cluster`: connect to or start Ray; deploy, wait for and delete applications."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import ray
from ray import serve
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default, ensure_token_if_auth_enabled
from ray._private.services import get_ray_address_from_environment, resolve_ip_for_localhost
from ray._private.state import jobs
from ray._private.utils import write_ray_address
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from halfserve.serve.fleet.launch.cluster_arguments import ClusterArguments, ClusterError
from halfserve.serve.fleet.launch.ray_application import OF_SCALING, SHUTDOWN_S, submit
from halfserve.serve.fleet.launch.ray_controller import NAMESPACE, find_controller
from halfserve.serve.fleet.launch.ray_deployment import Deployed, applications, deployed
from halfserve.serve.fleet.launch.ray_failures import STARTING, check_machine, explained, reason

LOCAL = "local"  # value of RAY_ADDRESS that makes Ray start
OTHER_PROGRAM = "another program listens there, or Ray no longer answers; expected the HOST:PORT that `ray start` prints"
CONNECT_S = 5.0
CALL_S = 30.0
LEAVE_S = 10.0  # time for other commands to notice that the cluster has stopped
LOOK_S = 0.2
ROOM_S = 30.0  # before this time, Ray Serve's message that replicas wait for room may be about earlier replicas


def connect(*, start: bool = False, detach: bool = False) -> bool:
    """Connect to the Ray of RAY_ADDRESS, or else to the one on this machine; returns whether Ray was started.

    With `start` it starts Ray where there is none, and with `detach` that outlives this process.

    Raises:
        ClusterError: there is no Ray, it cannot be reached, or its version differs from the installed one.
    """
    for name in ("ray", "ray.serve", "ray._private.authentication.authentication_token_setup"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # For a Ray started here: by default, its workers and so the servers run at a lower priority than other programs.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The same lookup as in `ray.init`, whose "auto" would also accept a Ray of any other user on this machine.
    found = get_ray_address_from_environment(None, None)  # pyright: ignore[reportArgumentType]  (its stubs)
    error = None if found in (None, LOCAL) else _connection_error(str(found))
    if error and os.environ.get("RAY_ADDRESS"):
        raise ClusterError(f"Ray at {found} (RAY_ADDRESS) cannot be reached: {error}")
    # A killed Ray leaves its address file behind.
    is_there = found not in (None, LOCAL) and not error
    if not is_there or _is_on_loopback_alone(str(found)):
        _stay_on_loopback()
    if is_there:
        # For an address that Ray finds itself, it uses the token that was stored with the address.
        _init(os.environ.get("RAY_ADDRESS") or None)
    elif not start:
        raise ClusterError("no Ray runs on this machine, and RAY_ADDRESS names none; `halfserve cluster run` starts one")
    elif detach:
        check_machine()
        _start_head()
        _init(None)
    else:
        check_machine()
        _init(LOCAL, include_dashboard=False)
        write_ray_address(address())  # as `ray start` does, so that later commands find the address
    return not is_there


def _is_on_loopback_alone(address: str) -> bool:
    """Return whether the Ray at an address listens on 127.0.0.1 only, and not on the machine's own address."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    own = resolve_ip_for_localhost(host)
    return own != host and _connection_error(f"{own}:{port}") is not None


def _stay_on_loopback() -> None:
    """Make a Ray for this machine alone listen on 127.0.0.1, and be reached there.

    On Linux, Ray replaces 127.0.0.1 by the machine's own address wherever it is given, and its processes listen on all
    addresses. This setting prevents both on any system, although its name refers to systems where that is Ray's default.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False  # for this process, which has read the variable already


def _init(address: str | None, **options: Any) -> None:
    what, hint = f"Ray at {address or 'this machine'} cannot be used", "; if it wants a token, set RAY_AUTH_MODE=token"
    if address == LOCAL:
        what, hint = STARTING, ""
    with explained(what, hint):
        ray.init(address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False, **options)


def _connection_error(address: str) -> str | None:
    """Reason why nothing answers at Ray's address, or None; Ray itself would try for over a minute and then end the process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            pass
    except ValueError:
        return "expected HOST:PORT, or ray://HOST:PORT"
    except OSError as error:
        return error.strerror or str(error)
    return None if os.environ.get("RAY_USE_TLS", "0") != "0" or _speaks_grpc(f"{host}:{port}") else OTHER_PROGRAM


def _speaks_grpc(address: str) -> bool:
    """Return whether a server of gRPC without TLS listens at the address, as Ray does."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=CONNECT_S)
        except grpc.RpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


def _start_head() -> None:
    """Start Ray on this machine with a token, as `ray.init` does; `ray start` requires a token only where one exists."""
    enable_token_auth_by_default()
    ensure_token_if_auth_enabled()
    command, began_s = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0"], time.time()
    done = subprocess.run(
        [*command, "--include-dashboard=false", "--disable-usage-stats"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"{STARTING}: {reason(done.stderr or done.stdout, began_s)}")


def address() -> str:
    """Address of the Ray that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


def cluster_of(name: str) -> str:
    """Name of the cluster that an application belongs to; the name itself if there is no such application."""
    found = deployed(name)
    return (found.arguments.cluster if found is not None else "") or name


def controller(name: str) -> ActorHandle:
    """Return the controller of a cluster; `name` is that of the cluster, or of a group of its servers.

    Raises:
        ClusterError: there is no cluster of this name.
    """
    found = find_controller(cluster_of(name))
    if found is None:
        raise ClusterError(f"Ray at {address()} has no cluster {name!r}; start one with `halfserve cluster run PATH`")
    return found


def ask(name: str, method: str, *arguments: Any, limit_s: float | None = CALL_S) -> Any:
    """Call a method of a cluster's controller, and retry while Ray restarts the controller.

    Raises:
        ClusterError: there is no cluster of this name, or no answer.
        InferenceError: the controller answered with this error.
    """
    until_s = time.monotonic() + CALL_S
    while True:
        try:
            return ray.get(controller(name).ask.remote(method, *arguments), timeout=limit_s)
        except RayTaskError as error:
            raise error.cause from None
        except (GetTimeoutError, RayError) as error:
            if time.monotonic() > until_s or isinstance(error, GetTimeoutError):
                raise ClusterError(f"the controller of {name!r} does not answer ({type(error).__name__}); try again") from error
        time.sleep(LOOK_S)


def deploy(name: str, arguments: ClusterArguments, *, wait_s: float, say: Callable[[str], None]) -> Deployed:
    """Deploy or change a cluster's application, and wait until it runs as requested.

    A new application that cannot run is deleted. An existing one continues with its previous servers. `say` is called with a
    line for the user when replicas wait for a machine.

    Raises:
        ClusterError: the application does not run in time, or cannot run.
    """
    before = deployed(name)
    if before is not None and before.is_declared:
        raise ClusterError(f"cluster {name!r} was deployed by a config file; change that, and deploy it with `serve deploy`")
    serve.start(proxy_location="Disabled")
    try:
        if before is not None and _ends_some(before, arguments):
            _start_one(name, arguments, before, wait_s, say)
        submit(name, arguments)
        return _wait(name, arguments, lambda _: False, wait_s, say)
    except BaseException:
        if before is None:
            delete(name)
        raise


def _ends_some(before: Deployed, arguments: ClusterArguments) -> bool:
    """Return whether the change replaces the servers and also reduces their number."""
    as_before = replace(arguments, **{name: getattr(before.arguments, name) for name in OF_SCALING})
    return arguments.bounds[1] < before.target and as_before != before.arguments


def _start_one(name: str, arguments: ClusterArguments, before: Deployed, wait_s: float, say: Callable[[str], None]) -> None:
    """Replace servers without reducing their number, until a new one runs; the caller reduces the number afterwards.

    To reduce the number, Ray Serve ends surplus servers at once, even if no new one can run. This is accepted only where
    the machines have no room for a new server beside the old ones.
    """
    as_many, began_s = replace(arguments, replicas=str(before.target)), time.monotonic()

    def suffices(now: Deployed) -> bool:
        lacks_room = now.lacks_room and time.monotonic() - began_s > ROOM_S
        return bool(now.running - before.running) or (lacks_room and not _lacking(arguments))

    submit(name, as_many)
    _wait(name, as_many, suffices, wait_s, say)


def _wait(
    name: str,
    arguments: ClusterArguments,
    suffices: Callable[[Deployed], bool],
    wait_s: float,
    say: Callable[[str], None],
) -> Deployed:
    """Wait until the application runs as requested, or until `suffices` holds."""
    began_s, has_said = time.monotonic(), False
    while True:
        now = deployed(name)
        waited_s = time.monotonic() - began_s
        if now is not None:
            if now.status == "RUNNING" or suffices(now):
                return now
            if now.status == "DEPLOY_FAILED":
                raise ClusterError(f"cluster {name!r} cannot run: {now.message}")
            if now.lacks_room and waited_s > ROOM_S and not has_said:
                has_said = True
                say(f"servers wait for room: {_needs(arguments)}")
        if waited_s > wait_s:
            why = _needs(arguments) if now is not None and now.lacks_room else "their models are not loaded yet"
            raise ClusterError(f"not all servers run after {wait_s:g} s: {why}; `halfserve cluster status` shows those that do")
        time.sleep(LOOK_S)


def check_room(arguments: ClusterArguments) -> None:
    """Check that a Ray of fixed size has the resources for the smallest number of servers.

    Raises:
        ClusterError: it does not; the text names the resource.
    """
    for kind in _lacking(arguments):
        raise ClusterError(f"not enough {kind}s: {_needs(arguments)}; take fewer --replicas or less --{kind.lower()}s")


def _lacking(arguments: ClusterArguments) -> list[str]:
    """Kinds of resource of which the whole cluster has too little for the smallest number of servers."""
    totals, fewest = ray.cluster_resources(), arguments.bounds[0]
    return [kind for kind, each in (("GPU", arguments.gpus), ("CPU", arguments.cpus)) if fewest * each > totals.get(kind, 0.0)]


def _needs(arguments: ClusterArguments) -> str:
    """Text with the resources that the smallest number of servers needs, and what the cluster has."""
    totals, free, fewest = ray.cluster_resources(), ray.available_resources(), arguments.bounds[0]
    kinds = [(kind, each) for kind, each in (("GPU", arguments.gpus), ("CPU", arguments.cpus)) if each]
    return "; ".join(
        f"each takes {each:g} {kind}, {fewest} of them {each * fewest:g}, and the cluster has {totals.get(kind, 0.0):g}, "
        f"{free.get(kind, 0.0):g} of them free"
        for kind, each in kinds
    )


def delete(name: str) -> None:
    """Drain and end the servers of an application, or of all applications of the cluster of this name.

    The controller ends with the last application of its cluster. Ray Serve itself stays.

    Raises:
        ClusterError: the servers have not ended in time.
    """
    cluster, found = cluster_of(name), applications()
    ending = {name} if name in found else {one for one in found if cluster_of(one) == name}
    for one in ending:
        serve.delete(one, _blocking=False)
    until_s = time.monotonic() + 2 * SHUTDOWN_S
    while ending & applications().keys():
        if time.monotonic() > until_s:
            raise ClusterError(f"servers of {name!r} have not ended yet; `halfserve cluster status` shows them")
        time.sleep(LOOK_S)
    actor = find_controller(cluster)
    if actor is not None and not any(cluster_of(one) == cluster for one in applications()):
        ray.kill(actor)


def await_other_commands() -> None:
    """Wait until no other process uses the Ray that ends with this one.

    If Ray ended first, it would make a process such as `halfserve cluster stop` wait for a minute and then end it.
    """
    until_s = time.monotonic() + LEAVE_S
    while time.monotonic() < until_s:
        if all(job["IsDead"] or job["DriverPid"] == os.getpid() for job in jobs()):
            return
        time.sleep(LOOK_S)
