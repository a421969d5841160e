"""Reference pages that are written from the code when the site is built: commands, model settings, metrics, statuses, names."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import onnx
from onnx import TensorProto, helper
from prometheus_client.parser import text_string_to_metric_families

import halfserve
from halfserve import cli
from halfserve.configuration import key_of, variable
from halfserve.serve.engine.config.parameters import OWN_PARAMETERS
from halfserve.serve.protocol.status import CODES

STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
STAGES = {"halfserve.amp_core": "Training", "halfserve.export": "Converting", "halfserve.serve": "Client"}


def write(folder: Path) -> None:
    """Write every generated page into `folder`; a page that says the same already is left alone."""
    pages = {
        "commands": _commands(),
        "configuration": _configuration(),
        "settings": _settings(),
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
    parts = ["# Commands\n\nWritten from the code; `halfserve COMMAND --help` prints the same.\n"]
    for name, command in cli.commands():
        parts.append(f"\n## halfserve {name}\n\n```text\n{inspect.cleandoc(command.help)}\n```\n\n")
        parts.append(_table(("argument or option", "default", "meaning"), _parameters(command)))
    return "".join(parts)


def _parameters(command: Any) -> Iterator[tuple[str, str, str]]:
    for parameter in command.params:
        named = parameter.param_type_name == "option"
        names = (*parameter.opts, *parameter.secondary_opts) if named else (parameter.name.upper(),)
        default = parameter.default if named and not callable(parameter.default) else None
        shown = "" if default in (None, "", (), []) or parameter.required else f"`{default}`"
        yield ", ".join(f"`{text}`" for text in names), shown, parameter.help or ""


def _configuration() -> str:
    guide = "[Operations](../guides/operations.md#configuration) has the rules, and [commands](commands.md) what each means."
    parts = [f"# Configuration\n\nThe keys of a config file and the environment variables, written from the code. {guide}\n"]
    for name in (name for name, stage in cli.STAGES.items() if stage.configurable):
        command = cli.command_of(name)
        shown = zip(command.configured, _parameters(command), strict=False)  # what follows has no key: --config, --print-config
        keyed = ((key_of(parameter), names, default) for parameter, (names, default, _) in shown)
        rows = ((f"`{key}`", f"`{variable([name], key)}`", names, default) for key, names, default in keyed)
        parts.append(f"\n## [{name}]\n\n" + _table(("key", "variable", "argument or option", "default"), rows))
    return "".join(parts)


def _settings() -> str:
    rows = ((f"`{key}`", setting.default, setting.values, setting.meaning) for key, setting in OWN_PARAMETERS.items())
    return (
        "# Model settings\n\nWritten in a model's `config.pbtxt`, where Triton ignores them:\n\n```text\n"
        'parameters { key: "halfserve.latency_target_ms" value { string_value: "50" } }\n```\n\n'
        "The server refuses a key that it does not know, and names the nearest.\n\n"
    ) + _table(("key", "default", "values", "meaning"), rows)


def _metrics() -> str:
    with _server() as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    rows = [(f"`{family.name}`", family.type, family.documentation) for family in sorted(families, key=lambda f: f.name)]
    heading = "# Metrics\n\nThe metrics of a server with one model, which has a response cache, on its metrics port. "
    counters = (
        "The samples of a `halfserve_` counter end in `_total`. Summaries need `--metrics-config summary_latencies=true`.\n\n"
    )
    return heading + counters + _table(("name", "type", "meaning"), rows)


@contextmanager
def _server() -> Iterator[int]:
    """A server with one small model, for as long as the block; gives its metrics port."""
    with tempfile.TemporaryDirectory() as folder:
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in "xy")
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
        model = Path(folder, "relu", "1", "model.onnx")
        model.parent.mkdir(parents=True)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), model)
        Path(folder, "relu", "config.pbtxt").write_text("response_cache { enable: true }")
        ports = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]
        command = [sys.executable, "-m", "halfserve", "serve", folder, *ports, "--metrics-config", "summary_latencies=true"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            lines = iter(server.stdout or ())
            yield next(int(found[1]) for line in lines if (found := re.search(r"[Mm]etrics on .*:(\d+)", line)))
        finally:
            server.terminate()
            server.communicate(timeout=30)


def _statuses() -> str:
    rows = ((STATUS_NAMES[code], (inspect.getdoc(kind) or "").split("\n\n")[0]) for kind, code in CODES.items())
    rest = "Any other error is INTERNAL, and its text stays in the server's log."
    return f"# Statuses\n\nHow a failed call ends. {rest}\n\n" + _table(("gRPC status", "when"), rows)


def _names() -> str:
    parts = ["# Python API\n\nEverything here is imported from `halfserve`: `from halfserve import Client`.\n"]
    for prefix, title in STAGES.items():
        parts.append(f"\n## {title}\n")
        for name in halfserve.__all__:
            value = getattr(halfserve, name)
            if value.__module__.startswith(prefix):
                kind, options = ("autoclass", "   :members:\n") if inspect.isclass(value) else ("autofunction", "")
                parts.append(f"\n```{{eval-rst}}\n.. {kind}:: halfserve.{name}\n{options}```\n")
    return "".join(parts)
