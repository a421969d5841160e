"""Arguments of a cluster, as given on the command line, to `serve run` or in Ray Serve's config files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Annotated, Any, get_type_hints

import typer

REPLICAS = re.compile(r"(\d+)(?::(\d+))?")
# Options that the agent sets itself, or that have no meaning for its server: they are not allowed among a server's options.
MANAGED_OPTIONS = {
    "--host": "host sets it",
    "--grpc-port": "first_port sets it",
    "--http-port": "first_port sets it",
    "--metrics-port": "first_port sets it",
    "--model-control": "models and loading by request decide what is served",
    "--load-model": "models and loading by request decide what is served",
    "--processes": "a cluster's servers are its members",
    "--supervise": "the agent starts and replaces the server",
    "--transport": "members of a cluster use nghttp2",
}
MOST_REPLICAS = 1000  # most that one controller can handle, measured by benchmarks/cluster_simulation.py


class ClusterError(Exception):
    """The cluster cannot be reached or cannot do what was asked; the text is one line with the reason."""


class ClusterArgumentError(Exception):
    """An argument is invalid; the text names it and says what was expected."""


@dataclass(frozen=True, kw_only=True)
class MemberOptions:
    """Number, size and addresses of a cluster's servers: options of `cluster run`, and arguments of its application."""

    replicas: Annotated[str, typer.Option(help="How many servers: 2, or 1:8 for as many between these as the load needs.")] = (
        "1"
    )
    cpus: Annotated[float, typer.Option(help="Cores of each server.")] = 1.0  # also its threads for one operator
    gpus: Annotated[float, typer.Option(help="GPUs of each server.")] = 0.0
    models: Annotated[
        str,
        typer.Option(help="Models of these servers: names, or patterns such as 'resnet*', with commas between them."),
    ] = "*"
    cluster: Annotated[
        str,
        typer.Option(help="Cluster whose directory these servers join; by default one of their own.", show_default=False),
    ] = ""
    latency_target_ms: Annotated[
        float, typer.Option(help="Milliseconds in the queue above which more servers are started.")
    ] = 50.0
    scale_down_seconds: Annotated[float, typer.Option(help="A server is ended if it was not needed for so long.")] = 300.0
    host: Annotated[
        str, typer.Option(help="Address to listen on; by default the one by which Ray knows the machine.", show_default=False)
    ] = ""
    first_port: Annotated[
        int,
        typer.Option(help="First of the three ports of a server (gRPC, HTTP, metrics); where taken, the next row of three."),
    ] = 8001


@dataclass(frozen=True, kw_only=True)
class ClusterArguments(MemberOptions):
    """The arguments of the Ray Serve application.

    Attributes:
        path: model repository: a folder, or a URL of object storage; each machine must reach it under this path.
        server: further options of `halfserve serve`.
    """

    path: str
    server: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ClusterArgumentError: a value is invalid.
        """
        bounds_of(self.replicas)
        if not self.path:
            raise ClusterArgumentError("path is empty, expected a folder or a URL such as s3://bucket/models")
        _check("cpus", self.cpus, 0 <= self.cpus < math.inf, "0 or more cores")
        _check("gpus", self.gpus, 0 <= self.gpus < math.inf, "0 or more")
        _check("models", repr(self.models), all(self.patterns), "names or patterns with commas between them")
        _check("latency_target_ms", self.latency_target_ms, 0 < self.latency_target_ms < math.inf, "milliseconds above 0")
        _check("scale_down_seconds", self.scale_down_seconds, 0 < self.scale_down_seconds < math.inf, "seconds above 0")
        _check("first_port", self.first_port, 0 <= self.first_port <= 65000, "a port up to 65000, or 0 for any free ones")
        for option in self.server:
            reason = MANAGED_OPTIONS.get(option.partition("=")[0])
            if reason is not None:
                raise ClusterArgumentError(f"server has {option}, but {reason}; leave it out")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ClusterArguments:
        """Read the arguments from a config file's `args`, or from `serve run`'s KEY=VALUE, whose values are strings.

        Raises:
            ClusterArgumentError: a name is unknown, or a value is invalid.
        """
        types = get_type_hints(cls)
        for name in given:
            if name not in types:
                near = get_close_matches(name, types, n=1)
                hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(types))}"
                raise ClusterArgumentError(f"{name} is no argument; {hint}")
        if "path" not in given:
            raise ClusterArgumentError("path is missing, expected a folder or a URL such as s3://bucket/models")
        return cls(**{name: READERS[types[name]](name, value) for name, value in given.items()})

    def as_given(self) -> dict[str, Any]:
        """Input of `read` that gives these arguments: JSON values, without those equal to the default."""
        defaults = asdict(ClusterArguments(path=self.path))
        own = {"path": self.path} | {name: value for name, value in asdict(self).items() if value != defaults[name]}
        return own | ({"server": list(self.server)} if self.server else {})

    def serve_config(self, name: str) -> dict[str, Any]:
        """Config file for `serve deploy`, and for `serveConfigV2` of a RayService; `name` is the application's name."""
        application = {
            "name": name,
            "route_prefix": None,
            "import_path": "halfserve.serve.fleet:app",
            "args": self.as_given(),
        }
        return {"proxy_location": "Disabled", "applications": [application]}

    @property
    def patterns(self) -> tuple[str, ...]:
        """Names, or patterns of names, of the models that the servers have."""
        return tuple(one.strip() for one in self.models.split(","))

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest number of replicas."""
        return bounds_of(self.replicas)


def bounds_of(replicas: str) -> tuple[int, int]:
    """Smallest and largest number of replicas: (1, 8) of "1:8", (2, 2) of "2".

    Raises:
        ClusterArgumentError: the text has neither form.
    """
    found = REPLICAS.fullmatch(replicas)
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= fewest <= most <= MOST_REPLICAS:
        raise ClusterArgumentError(f"replicas is {replicas!r}, expected a number up to {MOST_REPLICAS}, or two such as 1:8")
    return fewest, most


def _check(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ClusterArgumentError(f"{name} is {value}, expected {expected}")


def _number(name: str, value: Any) -> float:
    try:
        return float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        raise ClusterArgumentError(f"{name} is {value!r}, expected a number") from None


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if not number.is_integer():
        raise ClusterArgumentError(f"{name} is {value!r}, expected a whole number")
    return int(number)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ClusterArgumentError(f"{name} is {value!r}, expected a text")
    return str(value)


def _options(name: str, value: Any) -> tuple[str, ...]:
    options = value.split() if isinstance(value, str) else value
    if not isinstance(options, list | tuple) or not all(isinstance(option, str) for option in options):
        raise ClusterArgumentError(f"{name} is {value!r}, expected options of halfserve serve, such as ['--max-batch-size=8']")
    return tuple(options)


READERS: dict[Any, Callable[[str, Any], Any]] = {str: _text, float: _number, int: _whole, tuple[str, ...]: _options}
