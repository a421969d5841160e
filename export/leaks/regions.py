"""What can be read from a file's text: where a region begins, where a name is assigned."""

from __future__ import annotations

import ast
import inspect
from functools import lru_cache
from pathlib import Path

from export.leaks.places import Place


def autocast_region(inside: Place) -> Place | None:
    """The `with torch.autocast(...)` that a line is in; None where there is none in this function."""
    tree = parsed(inside.path)
    regions = [
        node.lineno
        for node in ast.walk(tree or ast.Module([], []))
        if isinstance(node, ast.With)
        and node.lineno <= inside.line <= (node.end_lineno or node.lineno)
        and any("autocast" in ast.unparse(item.context_expr) for item in node.items)
    ]
    return Place(inside.path, max(regions)) if regions else None


def assigned_at(owner: type, name: str) -> Place | None:
    """Where a class assigns `self.NAME`, or registers the buffer or parameter NAME; None where it is not seen to."""
    for cls in owner.__mro__:
        if cls.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        try:
            path, (_, start) = inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)
        except (OSError, TypeError):
            continue  # made at run time, or in a console
        lines = [node.lineno for node in _statements(path, start) if _makes(node, name)]
        if lines:
            return Place(path, min(lines))
    return None


@lru_cache(maxsize=64)
def parsed(path: str) -> ast.Module | None:
    """A file's syntax tree; None where it cannot be read."""
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _statements(path: str, start: int) -> list[ast.stmt | ast.expr]:
    """The nodes of the class that begins at a line."""
    classes = [node for node in ast.walk(parsed(path) or ast.Module([], [])) if isinstance(node, ast.ClassDef)]
    body = next((node for node in classes if start in (node.lineno, *(d.lineno for d in node.decorator_list))), None)
    return [node for node in ast.walk(body or ast.Module([], [])) if isinstance(node, ast.stmt | ast.expr)]


def _makes(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return False  # a declaration makes nothing
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [leaf for target in targets for leaf in ast.walk(target)]
        return any(isinstance(leaf, ast.Attribute) and leaf.attr == name for leaf in names) or any(
            isinstance(leaf, ast.Name) and leaf.id == name for leaf in targets
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        registers = node.func.attr in ("register_buffer", "register_parameter")
        return registers and bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == name
    return False
