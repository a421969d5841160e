"""`halfserve triton -- FLAGS`: start the server with the flags of a script that starts tritonserver.

The flags become arguments of `halfserve serve`, which replaces this process, so that a script can signal it and wait for it.
tritonserver's behaviour without flags, such as listening on every address, is requested explicitly.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from halfserve.serve.fleet.agent.worker_process import program


class TritonFlagError(Exception):
    """A flag cannot be translated; the text names it and says what was expected."""


EXIT_CODES: dict[type[Exception], int] = {TritonFlagError: 2}
MIB = 2**20
ANY_ADDRESS = "0.0.0.0"  # noqa: S104  (tritonserver's default)
SECRETS = {"--grpc-restricted-protocol", "--http-restricted-api"}
# Options of `halfserve serve` that take a flag's value unchanged, by flag.
SAME = {
    "http-port": "--http-port",
    "grpc-port": "--grpc-port",
    "model-control-mode": "--model-control",
    "repository-poll-secs": "--poll-seconds",
    "load-model": "--load-model",
    "exit-timeout-secs": "--drain-seconds",
    "model-load-thread-count": "--load-threads",
    "grpc-header-forward-pattern": "--grpc-header-forward-pattern",
    "http-header-forward-pattern": "--http-header-forward-pattern",
    "grpc-restricted-protocol": "--grpc-restricted-protocol",
    "http-restricted-api": "--http-restricted-api",
    "metrics-config": "--metrics-config",
}
FILES = {"grpc-server-cert": "--tls-cert", "grpc-server-key": "--tls-key", "grpc-root-cert": "--tls-client-ca"}
ADDRESSES = ("http-address", "grpc-address", "metrics-address")
REPOSITORIES = ("model-repository", "model-store")
# Flags with a value of true or false, and the value that changes nothing here; None if both values are ignored.
SWITCHES: dict[str, bool | None] = {
    "allow-grpc": True,
    "allow-http": True,
    "allow-metrics": True,
    "exit-on-error": True,
    "grpc-use-ssl": False,
    "grpc-use-ssl-mutual": False,
    "allow-sagemaker": False,
    "allow-vertex-ai": False,
    "disable-auto-complete-config": False,
    "strict-model-config": False,
    "model-namespacing": False,
    "strict-readiness": False,
    "enable-peer-access": None,
    "reuse-http-port": False,
    "reuse-grpc-port": False,
    "log-info": True,
    "log-warning": True,
    "log-error": True,
    "allow-gpu-metrics": True,
    "allow-cpu-metrics": True,
}
TRANSLATED_SWITCHES = {"allow-http", "allow-metrics", "exit-on-error", "grpc-use-ssl", "grpc-use-ssl-mutual"}
# Ignored flags, with advice on what to do instead.
IGNORED = {
    "id": "the server's name is halfserve",
    "log-verbose": "set log_verbose_level by the log settings, while the server runs",
    "log-format": "see --log-format of halfserve serve",
    "log-file": "the log goes to standard error; redirect it",
    "metrics-interval-ms": "figures are read at each scrape",
    "rate-limit": "compute slots share the CPU (--compute-slots)",
    "rate-limit-resource": "compute slots share the CPU (--compute-slots)",
    "cache-directory": "the cache is built in",
    "backend-directory": "backends are built in",
    "repoagent-directory": "there are no repository agents",
    "model-config-name": "each model has one config.pbtxt",
    "http-thread-count": "one event loop serves all connections; see --processes",
    "model-load-retry-count": "a model that cannot be loaded is refused",
    "model-load-gpu-limit": "the device's memory is the limit",
    "grpc-keepalive-time": "connections are checked for progress",
    "grpc-keepalive-timeout": "connections are checked for progress",
    "grpc-keepalive-permit-without-calls": "pings are answered at any time",
    "grpc-http2-max-pings-without-data": "pings are answered at any time",
    "grpc-http2-min-recv-ping-interval-without-data": "pings are answered at any time",
    "grpc-http2-max-ping-strikes": "pings are answered at any time",
    "grpc-max-connection-age": "connections stay open",
    "grpc-max-connection-age-grace": "connections stay open",
    "grpc-infer-allocation-pool-size": "requests need no pool",
    "grpc-infer-response-compression-level": "answers over gRPC are not compressed",
    "pinned-memory-pool-byte-size": "there is no pool",
    "cuda-memory-pool-byte-size": "there is no pool",
    "cuda-virtual-address-size": "there is no pool",
    "buffer-manager-thread-count": "there is no pool",
    "host-policy": "use taskset or numactl",
    "sagemaker-port": "there is no SageMaker port",
    "sagemaker-safe-port-range": "there is no SageMaker port",
    "sagemaker-thread-count": "there is no SageMaker port",
    "vertex-ai-port": "there is no Vertex AI port",
    "vertex-ai-thread-count": "there is no Vertex AI port",
    "vertex-ai-default-model": "there is no Vertex AI port",
}
# Older flags, by the settings of --trace-config that replace them.
TRACE_FLAGS = {
    "trace-file": "triton,file",
    "trace-log-frequency": "triton,log-frequency",
    "trace-level": "level",
    "trace-rate": "rate",
    "trace-count": "count",
}
TRACE_OPTIONS = {"rate": "--trace-rate", "count": "--trace-count", "triton,log-frequency": "--trace-log-frequency"}
LEVELS_ON = {"timestamps", "true", "on", "min", "max"}
LEVELS_OFF = {"off", "false"}
OTHERS = {"metrics-port", "cache-config", "response-cache-byte-size", "backend-config", "trace-config", *TRACE_FLAGS}
FLAGS = {*SAME, *FILES, *ADDRESSES, *REPOSITORIES, *SWITCHES, *IGNORED, *OTHERS}
NO_VALUE = {"disable-auto-complete-config"}
BOOLS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


@dataclass
class Translation:
    """Translation of a script's flags."""

    paths: list[str] = field(default_factory=list)  # paths of the model repositories
    arguments: list[str] = field(default_factory=list)  # arguments of `halfserve serve`, besides the paths
    remarks: list[str] = field(default_factory=list)  # one line for each flag that is ignored


def triton(
    flags: Annotated[list[str], typer.Argument(metavar="-- FLAGS", help="The flags of tritonserver, behind two dashes.")],
) -> None:
    """Start the server with the flags of tritonserver, one line on standard error for each that is ignored.

    As tritonserver does, it listens on every address, runs the repository's Python models, lets clients use shared memory and
    takes model files from load requests.

    Example: halfserve triton -- --model-repository=models --http-port=8000
    """
    translation = translated(flags)
    command = ["serve", *translation.paths, *translation.arguments]
    for line in (*translation.remarks, f"starts: halfserve {shown(command)}"):
        typer.echo(line, err=True)
    os.execv(sys.executable, [*program("halfserve"), *command])  # noqa: S606  (our own program, and no shell)


def translated(flags: Sequence[str]) -> Translation:
    """Translate the flags of tritonserver.

    Raises:
        TritonFlagError: a flag is unknown, has no value, or asks for something that this server does not support.
    """
    given: dict[str, list[str]] = {}
    for name, value in _pairs(flags):
        given.setdefault(name, []).append(value)
    made = Translation(paths=_repositories(given))
    switches = {name: _switch(name, values[-1]) for name, values in given.items() if name in SWITCHES}
    made.arguments += ["--host", _address(given), "--shared-memory", "--trust-python-models"]
    for name, option in SAME.items():
        for value in given.get(name, ()):
            made.arguments += [option, value]
    if given.get("model-control-mode", [""])[-1] == "explicit":
        made.arguments.append("--model-uploads")
    _listen(made, given, switches)
    if switches.get("exit-on-error") is False:
        made.arguments.append("--keep-going")
    _encrypt(made, given, switches)
    _keep_responses(made, given)
    _configure_backends(made, given)
    _trace(made, given)
    for name, is_on in switches.items():
        if name not in TRANSLATED_SWITCHES and is_on is not SWITCHES[name]:
            made.remarks.append(f"--{name}={str(is_on).lower()} is ignored")
    made.remarks += [f"--{name} is ignored: {reason}" for name, reason in IGNORED.items() if name in given]
    return made


def shown(command: Sequence[str]) -> str:
    """Return a command as one line, without its secrets."""
    hidden = ["***" if before in SECRETS else word for before, word in zip(["", *command], command, strict=False)]
    return shlex.join(hidden).replace("'***'", "***")


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag's name and value: --name=value, or --name value."""
    words = iter(flags)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in FLAGS:
            raise TritonFlagError(f"{word.partition('=')[0]!r} is no flag of tritonserver that is known here")
        if equals or name in NO_VALUE:
            yield name, value or "true"
            continue
        following = next(words, None)
        if following is None or following.startswith("--"):
            raise TritonFlagError(f"--{name} has no value, expected --{name}=VALUE")
        yield name, following


def _switch(name: str, value: str) -> bool:
    if value.lower() not in BOOLS:
        raise TritonFlagError(f"--{name} is {value!r}, expected true or false")
    return BOOLS[value.lower()]


def _repositories(given: dict[str, list[str]]) -> list[str]:
    found = [path for name in REPOSITORIES for path in given.get(name, ())]
    if not found:
        raise TritonFlagError("there is no --model-repository; expected one")
    return list(dict.fromkeys(found))


def _address(given: dict[str, list[str]]) -> str:
    found = {given[name][-1] for name in ADDRESSES if name in given}
    if len(found) > 1:
        raise TritonFlagError(f"the addresses differ ({', '.join(sorted(found))}), expected one for gRPC, HTTP and metrics")
    return found.pop() if found else ANY_ADDRESS


def _listen(made: Translation, given: dict[str, list[str]], switches: dict[str, bool]) -> None:
    has_http, has_metrics = switches.get("allow-http", True), switches.get("allow-metrics", True)
    if not has_http:
        made.arguments.append("--no-http")
        if has_metrics:
            made.remarks.append("--allow-http=false: there are no metrics either")
    elif not has_metrics:
        made.arguments += ["--metrics-port", "-1"]
    elif "metrics-port" in given:
        made.arguments += ["--metrics-port", given["metrics-port"][-1]]


def _encrypt(made: Translation, given: dict[str, list[str]], switches: dict[str, bool]) -> None:
    if not (switches.get("grpc-use-ssl") or switches.get("grpc-use-ssl-mutual")):
        return
    for name, option in FILES.items():
        if name in given and (name != "grpc-root-cert" or switches.get("grpc-use-ssl-mutual")):
            made.arguments += [option, given[name][-1]]
    made.remarks.append("--grpc-use-ssl: HTTP and metrics are encrypted too")


def _keep_responses(made: Translation, given: dict[str, list[str]]) -> None:
    sizes = [("--response-cache-byte-size", value) for value in given.get("response-cache-byte-size", ())]
    for setting in given.get("cache-config", ()):
        cache, _, size = setting.partition(",size=")
        if cache == "local" and size:
            sizes.append(("--cache-config", size))
        else:
            made.remarks.append(f"--cache-config={setting} is ignored: the cache is the local one, and has a size alone")
    for flag, size in sizes:
        if not size.isdecimal():
            raise TritonFlagError(f"{flag} has the size {size!r}, expected a number of bytes")
        made.arguments += ["--response-cache-mib", str(int(size) / MIB).removesuffix(".0")]


def _configure_backends(made: Translation, given: dict[str, list[str]]) -> None:
    for setting in given.get("backend-config", ()):
        _, _, pair = setting.partition(",")
        name, _, value = pair.partition("=")
        if name == "default-max-batch-size" and value.isdecimal():
            made.arguments += ["--max-batch-size", str(max(1, int(value)))]
        else:
            made.remarks.append(f"--backend-config={setting} is ignored: a model's config.pbtxt has its parameters")


def _trace(made: Translation, given: dict[str, list[str]]) -> None:
    pairs = [(setting, value) for flag, setting in TRACE_FLAGS.items() for value in given.get(flag, ())]
    for text in given.get("trace-config", ()):
        name, _, value = text.partition("=")
        pairs.append((name, value))
    settings = {name: value for name, value in pairs if name != "level"}
    levels = {value.lower() for name, value in pairs if name == "level"}
    mode = settings.pop("mode", "triton").lower()
    if mode not in {"triton", "opentelemetry"}:
        raise TritonFlagError(f"--trace-config has the mode {mode!r}, expected triton or opentelemetry")
    if unknown := levels - LEVELS_ON - LEVELS_OFF - {"tensors"}:
        raise TritonFlagError(f"--trace-config has the level {min(unknown)!r}, expected TIMESTAMPS or OFF")
    is_off = not levels or bool(levels & LEVELS_OFF)
    to = _trace_destination(made, mode, settings, levels, is_off=is_off)
    if not to:
        return
    made.arguments += ["--trace-to", to]
    if is_off:
        made.arguments += ["--trace-level", "OFF"]
    for name, option in TRACE_OPTIONS.items():
        if name in settings and (mode == "triton" or not name.startswith("triton,")):
            made.arguments += [option, settings.pop(name)]
    for name, value in settings.items():
        reason = f"mode {mode} does not use it"
        if name.startswith("opentelemetry,") and mode == "opentelemetry":
            reason = "set OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" if name.endswith(",url") else "see OpenTelemetry's variables"
        made.remarks.append(f"--trace-config={name}={value} is ignored: {reason}")


def _trace_destination(made: Translation, mode: str, settings: dict[str, str], levels: set[str], *, is_off: bool) -> str:
    """Return the value of --trace-to; "" for none. Removes the file from the settings."""
    if mode == "opentelemetry":
        return "" if is_off else "otlp"
    if "tensors" in levels and not is_off:
        raise TritonFlagError("--trace-config=level=TENSORS wants tensors in traces, which have none; expected TIMESTAMPS")
    file = settings.pop("triton,file", "")
    if not file and not is_off:
        made.remarks.append("--trace-config=level is ignored: without triton,file=FILE there are no traces, as in Triton")
    return f"triton:{file}" if file else ""
