"""Options of a command from environment variables and a config file.

The command line has priority over the environment, the environment over the file, and the file over the default. The command
declares the options; typer reads the variables, and uses the file's table as its defaults.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from halfserve.compiled_build import SWITCH
from halfserve.option_groups import OptionCommand

PREFIX = "HALFSERVE_"
SUPERVISED = "HALFSERVE_SUPERVISED"  # set by a supervisor for its workers: serve/fleet/member/handover.py
# The file as the supervisor's command read it: a restarted worker must not depend on later changes of the file.
AS_READ = f"{SUPERVISED}_CONFIG"
COMMON = {SWITCH, SUPERVISED, AS_READ}  # variables that belong to no single command
OF_CLIENTS = "HALFSERVE_TOKEN_FILE"  # the clients' variable, which could be mistaken for a server's
# Variables that Kubernetes sets for a Service named halfserve or halfserve-...
OF_A_SERVICE = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
REDACTED = "***"
URL = re.compile(r"([a-z][\w+.-]+:/+)([^/?]*@)?([^?]*)(\?.*)?", re.DOTALL)  # a path may have merged the two slashes into one
FILE, PRINT = f"{__name__}.file", f"{__name__}.print"  # keys in a context's `meta`


class ConfigurationError(Exception):
    """A variable or a config file cannot be used; the text names it and says what was expected."""


class ConfigFile(NamedTuple):
    """A config file as one command read it."""

    path: str  # path of the file
    table: dict[str, Any]  # options of the command in the file, by key


class ConfigurableCommand(OptionCommand):
    """A command with --config and --print-config, whose other parameters may be variables and keys of the config file.

    Attributes:
        configured: those parameters.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.configured: list[Any] = list(self.params)
        self._config, print_config = _own_options()
        self.params += [self._config, print_config]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, the environment and the config file; if requested, print the values and exit.

        Raises:
            ConfigurationError: a variable or the file has an unknown name or an invalid value.
        """
        words = _words(ctx)
        for parameter in (*self.configured, self._config):
            own = parameter.envvar
            parameter.envvar = [variable(words, key_of(parameter)), *([own] if own else [])]
            parameter.show_envvar = bool(own)
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            place = None if error.param is None else _place(ctx, error.param)
            if place is None:
                raise
            raise ConfigurationError(f"{place}: {error.message}") from None
        _check_variables(ctx, self.configured)
        if ctx.meta.get(PRINT):
            typer.echo(values_in_effect(ctx, self.configured))
            ctx.exit()
        os.environ.pop(AS_READ, None)
        if FILE in ctx.meta:
            os.environ[AS_READ] = json.dumps(ctx.meta[FILE])
        return rest


def key_of(parameter: Any) -> str:
    """Return the key in the config file: `grpc_port` for --grpc-port, `path` for the argument PATH."""
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name
    return str(name).lstrip("-").replace("-", "_")


def variable(words: Iterable[str], key: str) -> str:
    """Return the environment variable of an option: HALFSERVE_SERVE_GRPC_PORT for `grpc_port` of `halfserve serve`."""
    return (PREFIX + "_".join([*words, key])).replace("-", "_").upper()


def values_in_effect(ctx: Any, parameters: Iterable[Any]) -> str:
    """Format the values as TOML for --config, each with its source in a comment; secrets are redacted."""
    words = _words(ctx)
    lines = [f"# halfserve {' '.join(words)}: command line over environment over file over default", f"[{'.'.join(words)}]"]
    for parameter in parameters:
        value = ctx.params.get(parameter.name)
        source = "command line" if ctx.get_parameter_source(parameter.name).name == "COMMANDLINE" else "default"
        origin = "".join(c if c.isprintable() else "?" for c in _place(ctx, parameter) or source)
        written = f"# {key_of(parameter)} is not set" if value is None else f"{key_of(parameter)} = {_toml(parameter, value)}"
        lines.append(f"{written}  # {origin}")
    return "\n".join(lines)


def _own_options() -> list[Any]:
    """--config and --print-config; both are read before the others."""

    def declare(
        config: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help="TOML file with options; the command line and the environment have priority.",
                is_eager=True,
                callback=_read_file,
                expose_value=False,
            ),
        ] = None,
        print_config: Annotated[
            bool,
            typer.Option(
                "--print-config",
                help="Print the values in effect as TOML, with where each comes from, and do nothing else.",
                is_eager=True,
                callback=_print_instead,
                expose_value=False,
            ),
        ] = False,
    ) -> None:
        """Declare the options; the function is never called."""

    single = typer.Typer(add_completion=False)
    single.command()(declare)
    options: list[Any] = typer.main.get_command(single).params
    return options


def _read_file(ctx: typer.Context, path: Path | None) -> None:
    """Make the file's values the defaults of the options."""
    words = _words(ctx)
    kept = os.environ.get(AS_READ) if SUPERVISED in os.environ else None
    if kept is not None:
        file = ConfigFile(*json.loads(kept))
    elif path is not None:
        file = ConfigFile(str(path), _table(path, words, _commands(ctx)))
    else:
        return
    command: Any = ctx.command
    known = {key_of(parameter): parameter for parameter in command.configured}
    for key, value in file.table.items():
        where = f"config file {file.path}: [{'.'.join(words)}] {key}"
        if key not in known:
            raise ConfigurationError(f"{where} is no option{_nearest(key, known)}")
        is_flag = getattr(known[key], "is_flag", False)
        if isinstance(value, bool) != is_flag or not isinstance(value, str | int | float | list):
            expected = "true or false" if is_flag else "what its option takes: a text, a number, or a list of them"
            raise ConfigurationError(f"{where} is {str(value)[:64]!r}, expected {expected}")
    ctx.meta[FILE] = file
    ctx.default_map = {known[key].name: value for key, value in file.table.items()}


def _print_instead(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[PRINT] = True
        for parameter in ctx.command.params:
            parameter.required = False


def _table(path: Path, words: list[str], commands: list[str]) -> dict[str, Any]:
    """Return the command's table in a file, empty if there is none."""
    try:
        content: Any = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigurationError(f"config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"config file {path} is not UTF-8 text, expected TOML") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"config file {path} is not TOML: {error}") from None
    for name, value in content.items():
        if not isinstance(value, dict) and name not in commands:
            raise ConfigurationError(f"config file {path}: {name} stands outside of a table; put it below [{'.'.join(words)}]")
        if name not in commands:
            raise ConfigurationError(f"config file {path}: [{name}] is no configurable command{_nearest(name, commands)}")
    for word in words:
        content = content.get(word, {})
        if not isinstance(content, dict):
            raise ConfigurationError(f"config file {path}: {word} is a value, expected a table [{'.'.join(words)}]")
    return dict(content)


def _check_variables(ctx: Any, parameters: Sequence[Any]) -> None:
    """Reject a variable of this command that is not one of its options, and warn about one that no command reads."""
    words = _words(ctx)
    keys = {key_of(parameter) for parameter in parameters} | {"config"}
    known = {name for parameter in parameters for name in parameter.envvar} | {variable(words, "config")} | COMMON
    if "token_file" not in keys:
        known.add(OF_CLIENTS)
    others = tuple(variable([command], "") for command in _commands(ctx) if command != words[0])
    ours = variable(words, "")
    for name, value in sorted(os.environ.items()):
        of_a_service = OF_A_SERVICE.fullmatch(name) or (name.endswith("_PORT") and "://" in value)
        if not name.startswith(PREFIX) or name in known or of_a_service or name.startswith(others):
            continue
        key = name.removeprefix(ours if name.startswith(ours) else PREFIX).lower()
        hint = _nearest(key, keys, lambda near: variable(words, near))
        if name.startswith(ours):
            raise ConfigurationError(f"the variable {name} is no option{hint}")
        if SUPERVISED not in os.environ:  # the supervisor's command has warned already
            typer.echo(f"halfserve {' '.join(words)}: the variable {name} has no effect{hint}", err=True)


def _words(ctx: Any) -> list[str]:
    """Return the command's name without "halfserve"; several words for a command of a group."""
    own = [str(ctx.info_name)]
    return own if ctx.parent is None or ctx.parent.parent is None else [*_words(ctx.parent), *own]


def _commands(ctx: Any) -> list[str]:
    """Names of the configurable commands."""
    root = ctx.find_root()
    return [_words(ctx)[0]] if root is ctx else list(root.command.configurable)


def _place(ctx: Any, parameter: Any) -> str | None:
    """Source of a value that comes from a variable or the file; None for others."""
    source = ctx.get_parameter_source(parameter.name)
    if source is None or parameter.envvar is None:
        return None
    if source.name == "ENVIRONMENT":
        return f"variable {next(name for name in parameter.envvar if os.environ.get(name))}"
    if source.name == "DEFAULT_MAP":
        return f"config file {ctx.meta[FILE].path}: [{'.'.join(_words(ctx))}] {key_of(parameter)}"
    return None


def _nearest(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    near = get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.7)
    return f"; did you mean {shown(near[0])}?" if near else ""


def _toml(parameter: Any, value: Any) -> str:
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(parameter, item) for item in value)}]"
    text = str(value).encode("utf-8", "replace").decode()  # a path may be invalid UTF-8, which TOML cannot contain
    shown = REDACTED if getattr(parameter, "hide_input", False) else text
    url = URL.fullmatch(shown)
    if url is not None:  # a user name and password, and a signed query, are secrets
        shown = url[1] + (f"{REDACTED}@" if url[2] else "") + url[3] + (f"?{REDACTED}" if url[4] else "")
    return json.dumps(shown, ensure_ascii=False).replace("\x7f", "\\u007f")
