"""Metrics as a server would tell them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric

from halfserve import serve
from halfserve.serve.observability.metrics import MetricTexts

DECLARATION = re.compile(r".*figures\.(gauge|counter)$")


def declared_readings() -> list[tuple[str, str, str]]:
    """Kind, name and help text of every figure of the server that any package declares, from the sources."""
    found: dict[str, tuple[str, str, str]] = {}
    for path in sorted((Path(serve.__path__[0])).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (told := DECLARATION.match(ast.unparse(node.func))):
                name, text = (ast.literal_eval(argument) for argument in node.args[:2])
                assert found.setdefault(name, (told[1], name, text)) == (told[1], name, text), f"{name} is declared in two ways"
    return list(found.values())


def to_text(metrics: Iterable[Metric]) -> str:
    texts = MetricTexts()
    texts.add(metrics)
    return texts.joined().decode()
