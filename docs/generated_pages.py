"""Tables that reference pages include, such as commands, settings and statuses: written from the code for the site."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import onnx
from onnx import TensorProto, helper
from prometheus_client.parser import text_string_to_metric_families

import halfserve
from halfserve import cli
from halfserve.configuration import key_of, variable
from halfserve.export.conversion_settings import ConversionSettings, ModuleSettings, PipelineSettings
from halfserve.protos.request_parameters import REQUEST_PARAMETERS
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.client.errors import error_of_code
from halfserve.serve.engine import errors
from halfserve.serve.engine.config.parameters import OWN_PARAMETERS
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.http.responses import HTTP_STATUSES
from halfserve.serve.protocol.status import CODES, Code

# What a client does about each error; the likely ones come first.
ADVICE: dict[type[InferenceError], str] = {
    errors.InvalidArgumentError: "Correct the request: `halfserve models NAME` shows the inputs.",
    errors.NotFoundError: "Correct the name: `halfserve models` lists what is served, and why a model is not.",
    errors.QueueFullError: "Wait as long as the hint says (`grpc-retry-pushback-ms`, `retry-after`), or add replicas.",
    errors.OverloadedError: "Wait as long as the hint says, send less, or raise `halfserve.latency_target_ms`.",
    errors.RateLimitedError: "Wait as long as the hint says, or send less.",
    errors.DeadlineExceededError: "Allow more time, or send less: `halfserve bench --rate` shows what the server can do.",
    errors.UnavailableError: "Send the request to another replica, or repeat it after a moment.",
    errors.MessageTooLargeError: "Split the request; [limits](limits.md) names the options.",
    errors.OutOfMemoryError: "Send smaller tensors, or give the server more memory.",
    errors.ResourceExhaustedError: "Repeat the request later.",
    errors.UnauthenticatedError: "Send a token: `--token-file`, or `authorization: Bearer TOKEN`.",
    errors.PermissionDeniedError: "Use a token with the role that the text names: `halfserve token --role`.",
    errors.BackendError: "Read the server's log: it has the model, the request's id and the cause.",
    errors.FailedPreconditionError: "Change the server's state or configuration, as the text says.",
    errors.AlreadyExistsError: "Choose another name, or remove the old object first.",
    errors.UnsupportedError: "Leave the feature out.",
    errors.RequestCancelledError: "Repeat the request if you still want the answer.",
    errors.UnknownError: "Read the model's code: the text is its own.",
}
STAGES = {"halfserve.amp_core": "Training", "halfserve.export": "Converting", "halfserve.serve": "Client"}


def write(folder: Path) -> None:
    """Write the generated part of each reference page into `folder`; a file that says the same already is left alone."""
    folder.mkdir(exist_ok=True)
    pages = {
        "commands": _commands(),
        "configuration": _configuration(),
        "settings": _settings(),
        "request_parameters": _request_parameters(),
        "metrics": _metrics(),
        "statuses": _statuses(),
        "api": _names(),
    }
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |\n" for line in lines)


def _commands() -> str:
    commands = list(cli.commands())
    links = ((f"[{name}](#halfserve-{name.replace(' ', '-')})", _first_line(command.help)) for name, command in commands)
    parts = [_table(("command", "what it does"), links)]
    for name, command in commands:
        parts.append(f"\n## halfserve {name}\n\n```text\n{inspect.cleandoc(command.help)}\n```\n\n")
        parts.append(_table(("argument or option", "default", "meaning"), _parameters(command)))
    return "".join(parts)


def _first_line(text: str) -> str:
    return inspect.cleandoc(text).splitlines()[0]


def _parameters(command: Any) -> Iterator[tuple[str, str, str]]:
    for parameter in command.params:
        named = parameter.param_type_name == "option"
        names = (*parameter.opts, *parameter.secondary_opts) if named else (parameter.name.upper(),)
        default = parameter.default if named and not callable(parameter.default) else None
        shown = "" if default in (None, "", (), []) or parameter.required else f"`{default}`"
        yield ", ".join(f"`{text}`" for text in names), shown, parameter.help or ""


def _configuration() -> str:
    parts = []
    for name in (name for name, stage in cli.STAGES.items() if stage.configurable):
        command = cli.command_of(name)
        shown = zip(command.configured, _parameters(command), strict=False)  # what follows has no key: --config, --print-config
        keyed = ((key_of(parameter), names, default) for parameter, (names, default, _) in shown)
        rows = ((f"`{key}`", f"`{variable([name], key)}`", names, default) for key, names, default in keyed)
        parts.append(f"\n## [{name}]\n\n" + _table(("key", "variable", "argument or option", "default"), rows))
    return "".join(parts)


def _settings() -> str:
    rows = ((f"`{key}`", setting.default, setting.values, setting.meaning) for key, setting in OWN_PARAMETERS.items())
    return _table(("key", "default", "values", "meaning"), rows)


def _request_parameters() -> str:
    rows = (
        (f"`{name}`", parameter.values, parameter.meaning, "yes" if parameter.changes_answer else "no")
        for name, parameter in REQUEST_PARAMETERS.items()
    )
    return _table(("parameter", "value", "meaning", "part of the response cache's key"), rows)


def _metrics() -> str:
    with _server() as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    rows = [(f"`{family.name}`", family.type, family.documentation) for family in sorted(families, key=lambda f: f.name)]
    return _table(("name", "type", "meaning"), rows)


@contextmanager
def _server() -> Iterator[int]:
    """Provide a server with one small model, for as long as the block; gives its metrics port."""
    with tempfile.TemporaryDirectory() as folder:
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in "xy")
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
        model = Path(folder, "relu", "1", "model.onnx")
        model.parent.mkdir(parents=True)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), model)
        Path(folder, "relu", "config.pbtxt").write_text("response_cache { enable: true }")
        ports = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]
        latencies = [f"--metrics-config={kind}_latencies=true" for kind in ("summary", "histogram")]
        command = [sys.executable, "-m", "halfserve", "serve", folder, *ports, *latencies]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            lines = iter(server.stdout or ())
            yield next(int(found[1]) for line in lines if (found := re.search(r"[Mm]etrics on .*:(\d+)", line)))
        finally:
            server.terminate()
            server.communicate(timeout=30)


def _statuses() -> str:
    rows = (_status(kind, CODES[kind]) for kind in sorted(CODES, key=list(ADVICE).index))
    table = _table(("gRPC status", "REST", "client", "what happened", "what to do"), rows)
    other = "Any other error is INTERNAL (500), and its text stays in the server's log.\n\n"
    return f"{table}\n{other}{_tritons_errors()}"


def _tritons_errors() -> str:
    heading = (
        "## With `--triton-errors`\n\n`halfserve triton`, and `halfserve serve --triton-errors`, begin these errors with "
        "Triton's text. Where a status is given, it is Triton's, and another than ours:\n\n"
    )
    rows = [(f"`{one.text}`", "" if one.code is None else Code(one.code).name) for one in TritonPhrase]
    return heading + _table(("begins with", "gRPC status"), rows)


def _status(kind: type[InferenceError], code: Code) -> tuple[str, ...]:
    http = 413 if kind is errors.MessageTooLargeError else HTTP_STATUSES[code]  # as http_status() says
    raised = type(error_of_code(code.name, "")).__name__
    return code.name, str(http), f"`{raised}`", (inspect.getdoc(kind) or "").split("\n\n")[0], ADVICE[kind]


def _names() -> str:
    parts = []
    for prefix, title in STAGES.items():
        parts.append(f"\n## {title}\n")
        for name in sorted(halfserve.__all__, key=_is_error):
            value = getattr(halfserve, name)
            if value.__module__.startswith(prefix):
                kind, options = ("autoclass", "   :members:\n") if inspect.isclass(value) else ("autofunction", "")
                parts.append(f"\n```{{eval-rst}}\n.. {kind}:: halfserve.{name}\n{options}```\n")
        if prefix == "halfserve.export":
            parts.append(_settings_of_conversions())
    return "".join(parts)


def _is_error(name: str) -> bool:
    """Return the key that sorts exceptions behind what users call."""
    value = getattr(halfserve, name)
    return inspect.isclass(value) and issubclass(value, Exception)


def _settings_of_conversions() -> str:
    """Return the fields of the settings, which are keywords of the functions that convert."""
    parts = ["\n### Settings of a conversion\n\nKeywords of functions; a group has those of the groups before it too.\n"]
    shown: set[str] = set()
    for group in (ConversionSettings, PipelineSettings, ModuleSettings):
        types = get_type_hints(group, include_extras=True)
        new = [field for field in fields(group) if field.name not in shown]
        shown |= {field.name for field in new}
        help_of = {name: kind.__metadata__[-1].help for name, kind in types.items() if get_origin(kind) is Annotated}
        parts.append(f"\n`{group.__name__}`:\n\n")
        rows = ((f"`{field.name}`", f"`{field.default!r}`", help_of[field.name]) for field in new)
        parts.append(_table(("keyword", "default", "meaning"), rows))
    return "".join(parts)
