"""Lines that the example inputs do not reach, read for what would leak there."""

from __future__ import annotations

import ast
from types import CodeType

from export.inheritance.torch_factories import HELPERS
from export.leaks.constants import FP16_FIRST_INFINITE
from export.leaks.log import Log
from export.leaks.places import Place, Whereabouts
from export.leaks.regions import parsed
from export.weight_ledger import FP16_LARGEST_FLUSHED

# Without a dtype these are float32, whatever their arguments are.
FLOAT_FACTORIES = frozenset({"zeros", "ones", "empty", "eye", "rand", "randn", "linspace"})


def tell_unexecuted(whereabouts: Whereabouts, log: Log) -> None:
    """Log factories without dtype and constants that do not fit, in functions that ran, on lines of them that did not.

    Only the user's own files are read, not installed ones.
    """
    for code in whereabouts.seen:
        function = _function(code) if whereabouts.is_own(code.co_filename) else None
        if function is None:
            continue
        ran = whereabouts.lines_of(code.co_filename)
        for node in _own_nodes(function):
            symptom = _symptom(node)
            if symptom is not None and not ran.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                text, fix = symptom
                place = Place(code.co_filename, node.lineno)
                log.add("not_reached", "note", place, "", f"{text}; the inputs did not reach this line", fix)


def _function(code: CodeType) -> ast.AST | None:
    tree = parsed(code.co_filename)
    functions = [node for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, ast.FunctionDef)]
    starts = {line: node for node in functions for line in (node.lineno, *(d.lineno for d in node.decorator_list))}
    return starts.get(code.co_firstlineno)


def _own_nodes(function: ast.AST) -> list[ast.expr]:
    return [node for node in ast.walk(function) if isinstance(node, ast.expr)]


def _symptom(node: ast.expr) -> tuple[str, str] | None:
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
        name = node.func.attr
        if name in FLOAT_FACTORIES and not any(keyword.arg in ("dtype", "out", None) for keyword in node.keywords):
            return f"torch.{name} without dtype makes float32", HELPERS.get(name, "dtype=x.dtype")
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("masked_fill", "masked_fill_", "clamp", "clamp_min", "add"):
        number = next((value for value in map(_number, node.args) if value is not None and _unfit(value)), None)
        if number is not None:
            return f"{number:g} does not fit float16", "mask_value(x)" if abs(number) > 1 else "finfo(x).tiny"
    return None


def _number(node: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _unfit(number: float) -> bool:
    return FP16_FIRST_INFINITE <= abs(number) < float("inf") or 0 < abs(number) <= FP16_LARGEST_FLUSHED
