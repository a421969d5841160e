"""The one command: `halfserve STAGE ...` loads the stage it is asked for and nothing else.

Each stage keeps its command line in a module of its own, which defines two names: the function of the command's name (its typer
annotations are the options) and `EXIT_CODES`, the exit code of each exception that the user can fix. So `halfserve serve`
starts without importing torch, and the stages' errors need no common base class.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from halfserve.configuration import ConfigurableCommand, ConfigurationError, variable
from halfserve.installation import code_in_use, install_hint
from halfserve.option_groups import OptionCommand

if TYPE_CHECKING:
    from types import ModuleType

NO_SPACE_EXIT_CODE = 1
WRONG_USAGE_EXIT_CODE = 2
MISSING_EXTRA_EXIT_CODE = 69  # EX_UNAVAILABLE
NOT_ON_WINDOWS = frozenset({"fcntl", "resource"})  # modules of Python on Unix
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it
HYPHEN = "\u2011"  # the hyphen at which no line is broken
# A terminal would execute them, and an error's text may come from a server or contain a file's name.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where a command comes from, and what `halfserve --help` says of it."""

    module: str  # has a function of the command's name, or a group of commands, a `typer.Typer`
    help: str  # its line in `halfserve --help`
    extra: str | None = None  # installs its dependencies
    configurable: bool = False  # the options may also come from the environment and from a config file

    def load(self) -> ModuleType:
        """Import the module that contains the command."""
        return importlib.import_module(self.module)


STAGES = {
    "train": Stage(
        module="halfserve.amp_core.train_command",
        help="Train a PyTorch model in mixed precision.",
        extra="train",
        configurable=True,
    ),
    "export": Stage(
        module="halfserve.export.cli.export",
        help="Turn a checkpoint into a proven fp16 model.",
        extra="export",
        configurable=True,
    ),
    "convert": Stage(
        module="halfserve.export.cli.convert",
        help="Turn an ONNX model into a proven fp16 one.",
        extra="convert",
        configurable=True,
    ),
    "verify": Stage(
        module="halfserve.export.cli.verify", help="Compare an fp16 ONNX model with its float32 one.", extra="convert"
    ),
    "check": Stage(module="halfserve.export.cli.check", help="Find where a PyTorch model leaves its dtype.", extra="export"),
    "serve": Stage(
        module="halfserve.serve.serve_command", help="Serve models over gRPC and REST in batches.", configurable=True
    ),
    "triton": Stage(module="halfserve.serve.triton_flags", help="Serve models with the flags of tritonserver."),
    "cluster": Stage(
        module="halfserve.serve.fleet.launch.cluster_commands", help="Serve models on many machines with Ray.", extra="ray"
    ),
    "token": Stage(module="halfserve.serve.security.token_command", help="Make a bearer token for a server."),
    "models": Stage(module="halfserve.serve.client.cli", help="List the models of a running server."),
    "infer": Stage(module="halfserve.serve.client.cli", help="Ask a running server for a prediction.", configurable=True),
    "bench": Stage(
        module="halfserve.serve.benchmark.bench_command",
        help="Measure throughput and latency.",
        extra="bench",
        configurable=True,
    ),
    "tune": Stage(
        module="halfserve.serve.tuning.tune_command",
        help="Find a model's best settings within a latency limit.",
        configurable=True,
    ),
    "conformance": Stage(
        module="halfserve.conformance.conformance_command", help="Check a server against the Open Inference Protocol."
    ),
    "doctor": Stage(
        module="halfserve.serve.doctor.doctor_command", help="Report what works on this machine, and what is missing."
    ),
    "demo": Stage(
        module="halfserve.examples.digits.demo", help="Train, convert, serve and measure a small model of digits.", extra="demo"
    ),
}


_Formatter: Any = typer.Context.formatter_class  # its module is private


class HelpFormatter(_Formatter):  # type: ignore[misc]  # (see above)
    """Breaks the lines of a help text between words, and not at the hyphens of options."""

    def write_text(self, text: str) -> None:
        """Write a paragraph."""
        super().write_text(text.replace("-", HYPHEN))

    def write_dl(self, rows: Any, *args: Any, **options: Any) -> None:
        """Write names with their descriptions."""
        super().write_dl([(name, text.replace("-", HYPHEN)) for name, text in rows], *args, **options)

    def getvalue(self) -> str:
        """Return all that was written."""
        return str(super().getvalue()).replace(HYPHEN, "-")


class StageContext(typer.Context):
    """The context of a stage's command."""

    formatter_class = HelpFormatter


class StageCommand(OptionCommand):
    """One stage's command; its help has a heading for each group of options (their `rich_help_panel`)."""

    context_class = StageContext

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options.

        An unknown one that another option's help mentions, such as --png, suggests that option. Where further options belong
        behind two dashes, the error says so.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as raised:
            # The error of an unknown option; its class is only in a private module of typer.
            error: Any = raised
            if hasattr(error, "option_name") and hasattr(error, "possibilities"):
                word = re.compile(rf"\b{re.escape(error.option_name.lstrip('-'))}\b", re.IGNORECASE)
                described = [p for p in self.get_params(ctx) if word.search(getattr(p, "help", None) or "")]
                if described:
                    error.possibilities = [parameter.opts[0] for parameter in described]
                for metavar in (p.metavar or "" for p in self.get_params(ctx)):
                    if metavar.startswith("-- "):
                        error.message += f"; {metavar[3:]} belong behind two dashes: {ctx.command_path} ... {metavar}"
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, group after group in the order of their first."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class ConfigurableStageCommand(StageCommand, ConfigurableCommand):
    """The command of a stage that is configurable."""


def command_of(name: str) -> Any:
    """Return a stage's command, from the module that holds it."""
    stage = STAGES[name]
    single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    function = getattr(stage.load(), name)
    if isinstance(function, typer.Typer):
        for command in function.registered_commands:
            command.cls = StageCommand
        return typer.main.get_command(function)
    told = function.__doc__ or stage.help  # python -OO takes docstrings away
    kind, epilog = StageCommand, None
    if stage.configurable:
        kind = ConfigurableStageCommand
        epilog = (
            f"Each option may also be an environment variable ({variable([name], 'json')} for --json) or a key below [{name}] "
            "in --config's file. The command line wins over the environment, and that over the file."
        )
    single.command(name, cls=kind, help=told, epilog=epilog)(function)
    return typer.main.get_command(single)


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command by its words: "serve", "cluster run"; a group comes before its commands."""
    for name in STAGES:
        command = command_of(name)
        yield name, command
        for word, member in getattr(command, "commands", {}).items():
            yield f"{name} {word}", member


class LazyGroup(TyperGroup):
    """Lists the commands from STAGES and imports one only when it is the one called."""

    # The commands whose options may be environment variables and keys of a config file.
    configurable = tuple(name for name, stage in STAGES.items() if stage.configurable)

    def __init__(self, **options: Any) -> None:
        """Hold commands with the names and help lines for `halfserve --help`, without their options, in STAGES' order."""
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=stage.help) for name, stage in STAGES.items()}

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the command line, and print the help that it asks for."""
        with _reader_may_go():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _reader_may_go():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command to run, and import its module."""
        _, command, rest = super().resolve_command(ctx, args)
        name = str(command and command.name)
        return name, command_of(name), rest


app = typer.Typer(
    cls=LazyGroup,
    help="Train in mixed precision, convert to fp16 with proof, serve over gRPC in batches.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    *,
    version: bool = typer.Option(
        False, "--version", help="Print the version, whether the server is compiled, and the folder of the code."
    ),
) -> None:
    if version:
        from importlib.metadata import version as installed_version  # noqa: PLC0415  (only this branch needs it)

        from halfserve.compiled_build import build_in_use  # noqa: PLC0415  (see above)

        typer.echo(f"halfserve {installed_version('halfserve')}, {build_in_use()}; {code_in_use()}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 on success, 1, 3 or 4 as the stage defines, 2 for wrong usage, 69 if an extra is missing."""
    _open_standard_files()
    _print_what_can_be_printed()
    try:
        _run(arguments)
    except SystemExit as end:
        if _trains_with_others():
            # After an error, torch's threads still communicate with the other processes. Joining the threads would wait for
            # those processes, and a thread that frees a tensor during the interpreter's shutdown aborts this process (SIGABRT).
            if end.code is not None and not isinstance(end.code, int):
                typer.echo(end.code, err=True)  # text of a user's sys.exit("why"), which the interpreter would print at its end
            _drop_unwritten()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _open_standard_files() -> None:
    """Open /dev/null in place of closed standard files, also for child processes.

    Otherwise the next opened descriptor, such as a client's connection, would get such a number: libraries would write their
    messages to it, and uvloop ends the process when it closes it.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
        if getattr(sys, name) is None:  # the interpreter sets closed standard files to None
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _print_what_can_be_printed() -> None:
    """Print a question mark for characters that the output's encoding lacks, such as a table's ellipsis or those in names.

    An error would occur after the work and replace its result. JSON output is ASCII anyway.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="replace")


def _trains_with_others() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _run(arguments: Sequence[str] | None) -> None:
    # torch's CPU threads spin while they wait for each other. On cores shared with other programs, training took more than 15
    # times as long as with sleeping threads. OpenMP reads this variable when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # grpcio's core writes to stderr by itself, with names of its source files. It reads this variable when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # ONNX Runtime would record its runs in a file in the home folder for telemetry. It reads this variable when it is imported.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    stage = STAGES.get(next((a for a in arguments if not a.startswith("-")), ""))
    prefix = f"halfserve {arguments[0]}" if stage else "halfserve"
    try:
        app(args=arguments, prog_name="halfserve")
    except ModuleNotFoundError as error:
        if error.name in NOT_ON_WINDOWS:
            typer.echo(f"{prefix}: needs Linux or macOS; on Windows, install halfserve in WSL 2 and run it there", err=True)
            sys.exit(MISSING_EXTRA_EXIT_CODE)
        if stage is None or stage.extra is None or not error.name:
            raise
        typer.echo(f"{prefix}: needs the package {error.name!r}; {install_hint(stage.extra)}", err=True)
        sys.exit(MISSING_EXTRA_EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
    except Exception as error:
        exit_code = _exit_code(stage, error)
        if exit_code is None:
            raise
        _drop_unwritten()
        typer.echo(f"{prefix}: {error}".translate(CONTROLS), err=True)
        sys.exit(exit_code)


@contextmanager
def _reader_may_go() -> Iterator[None]:
    """Exit with 0 when the reader of the output (`halfserve bench --json | head`) has closed it; typer would exit with 1."""
    try:
        yield
    except BrokenPipeError:
        _drop_unwritten()
        raise typer.Exit(0) from None


def _drop_unwritten() -> None:
    """Drop output that could not be written: it would fail again, and be reported again, when the interpreter ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(stage: Stage | None, error: Exception) -> int | None:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return NO_SPACE_EXIT_CODE  # whatever was to be written, and wherever
    if isinstance(error, ConfigurationError):
        return WRONG_USAGE_EXIT_CODE
    if stage is None:
        return None
    codes: dict[type[Exception], int] = stage.load().EXIT_CODES
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)


if __name__ == "__main__":
    main()
