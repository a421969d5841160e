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
from importlib.metadata import version
from typing import Annotated

import typer

from halfserve.serve.fleet.agent.worker_process import program
from halfserve.serve.triton_flag_tables import (
    ADDRESSES,
    ANY_ADDRESS,
    BOOLS,
    FILES,
    FLAGS,
    IGNORED,
    LEVELS_OFF,
    LEVELS_ON,
    MIB,
    NO_VALUE,
    OPENTELEMETRY,
    OWN_TRUST,
    REFUSED,
    REFUSED_SWITCHES,
    REPOSITORIES,
    SAME,
    SECRETS,
    SWITCH_OPTIONS,
    SWITCHES,
    TRACE_FLAGS,
    TRACE_OPTIONS,
    TRANSLATED_SWITCHES,
)


class TritonFlagError(Exception):
    """A flag cannot be translated; the text names it and says what was expected."""


TRITON_VERSIONS = "2.51 to 2.75"
EXIT_CODES: dict[type[Exception], int] = {TritonFlagError: 2}


@dataclass
class Translation:
    """Translation of a script's flags."""

    paths: list[str] = field(default_factory=list)  # paths of the model repositories
    arguments: list[str] = field(default_factory=list)  # arguments of `halfserve serve`, besides the paths
    variables: dict[str, str] = field(default_factory=dict)  # variables of the environment
    log_file: str = ""  # file of the log; "" for standard error
    remarks: list[str] = field(default_factory=list)  # one line for each flag that is ignored


def triton(
    flags: Annotated[list[str], typer.Argument(metavar="-- FLAGS", help="The flags of tritonserver, behind two dashes.")],
) -> None:
    """Start the server with the flags of tritonserver, one line on standard error for each that is ignored.

    As tritonserver does, it listens on every address, runs the repository's Python models, lets clients use shared memory and
    takes model files from load requests.

    Example: halfserve triton -- --model-repository=models --http-port=8000
    """
    if "--help" in flags or "--version" in flags:
        about = f"halfserve {version('halfserve')}, with the flags of tritonserver {TRITON_VERSIONS}"
        typer.echo(usage() if "--help" in flags else about)
        return
    translation = translated(flags)
    command = ["serve", *translation.paths, *translation.arguments]
    for line in (*translation.remarks, f"starts: halfserve {shown(command)}"):
        typer.echo(line, err=True)
    os.environ.update(translation.variables)
    if translation.log_file:
        _log_to(translation.log_file)
    os.execv(sys.executable, [*program("halfserve"), *command])  # noqa: S606  (our own program, and no shell)


def translated(flags: Sequence[str]) -> Translation:
    """Translate the flags of tritonserver.

    Raises:
        TritonFlagError: a flag is unknown, has no value, or asks for something that this server does not support.
    """
    given: dict[str, list[str]] = {}
    for name, value in _pairs(flags):
        given.setdefault(name, []).append(value)
    made = Translation(paths=_repositories(given), log_file=given.get("log-file", [""])[-1])
    switches = {name: _switch(name, values[-1]) for name, values in given.items() if name in SWITCHES}
    _check(made, given, switches)
    made.arguments += ["--host", _address(given), "--server-name", given.get("id", ["triton"])[-1], "--triton-errors"]
    made.arguments += ["--trust-python-models"] if switches.get("allow-client-shm") is False else OWN_TRUST
    made.arguments += ["--strict-readiness"] if switches.get("strict-readiness", True) else []
    _rename(made, given, switches)
    _listen(made, given, switches)
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
        meant = [flag for flag in FLAGS if flag.startswith(name)]
        if name not in FLAGS and len(meant) == 1:  # as getopt_long understands it
            name = meant[0]
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


def _rename(made: Translation, given: dict[str, list[str]], switches: dict[str, bool]) -> None:
    for name, option in SAME.items():
        for value in given.get(name, ()):
            made.arguments += [option, value.lower() if name == "model-control-mode" else value]
    if given.get("model-control-mode", [""])[-1].lower() == "explicit":
        made.arguments.append("--model-uploads")
    if given.get("log-verbose", ["0"])[-1] != "0":
        made.arguments += ["--access-log", "all"]  # tritonserver's verbose log has lines for each request
    options = [option for name, (value, option) in SWITCH_OPTIONS.items() if switches.get(name) is value]
    made.arguments += dict.fromkeys(options)


def _listen(made: Translation, given: dict[str, list[str]], switches: dict[str, bool]) -> None:
    has_http, has_metrics = switches.get("allow-http", True), switches.get("allow-metrics", True)
    if not has_http and not has_metrics:
        made.arguments.append("--no-http")
        return
    for name, is_on in (("http-port", has_http), ("metrics-port", has_metrics)):
        port = given[name][-1] if name in given and is_on else "-1"
        if name in given or not is_on:
            made.arguments += [f"--{name}", port]


def _check(made: Translation, given: dict[str, list[str]], switches: dict[str, bool]) -> None:
    """Refuse what would start a server that the script does not mean."""
    for name, reason in REFUSED.items():
        if name in given:
            raise TritonFlagError(f"--{name} cannot be honoured: {reason}")
    for name, reason in REFUSED_SWITCHES.items():
        if switches.get(name):
            raise TritonFlagError(f"--{name}=true cannot be honoured: {reason}")
    if (limit := given.get("rate-limit", ["off"])[-1]) != "off":
        raise TritonFlagError(
            f"--rate-limit={limit} cannot be honoured: models do not wait for resources; leave it out, or see --compute-slots "
            "of halfserve serve"
        )
    if switches.get("model-namespacing") and len(made.paths) > 1:
        raise TritonFlagError(
            "--model-namespacing=true cannot be honoured with several repositories, as models of one name cannot be served "
            "side by side; rename them, or start a server for each repository"
        )


def _log_to(file: str) -> None:
    """Write standard error, which has the log, to a file."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise TritonFlagError(f"--log-file={file} cannot be written: {error.strerror}; choose another file") from None
    os.dup2(descriptor, sys.stderr.fileno())


def usage() -> str:
    """Return what happens to each flag, as text."""
    lines = ["usage: halfserve triton -- --model-repository=FOLDER [FLAGS]", ""]
    for name in sorted(FLAGS):
        what = f"ignored: {IGNORED[name]}" if name in IGNORED else "taken"
        if name in REFUSED or name in REFUSED_SWITCHES:
            what = f"refused: {(REFUSED | REFUSED_SWITCHES)[name]}"
        lines.append(f"  --{name:48} {what}")
    return "\n".join([*lines, "", "See docs/tutorials/from_triton.md, and `halfserve serve --help` for all options."])


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
            raise TritonFlagError(
                f"--cache-config={setting} cannot be honoured: the cache lies in the server's memory; expected local,size=BYTES"
            )
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
    if mode == "opentelemetry":
        for name in OPENTELEMETRY.keys() & settings.keys():
            # Resources are given one by one.
            made.variables[OPENTELEMETRY[name]] = ",".join(value for given_name, value in pairs if given_name == name)
            del settings[name]
    made.remarks += [
        f"--trace-config={name}={value} is ignored: mode {mode} does not use it" for name, value in settings.items()
    ]


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
