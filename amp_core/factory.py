"""Code that users name as `MODULE:FACTORY`: import it, call it, and describe its exceptions in one line."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast


class FactoryError(ValueError):
    """A `MODULE:FACTORY` that cannot be parsed, imported, found or called."""


def load_factory(spec: str) -> Callable[..., Any]:
    """Import the FACTORY of a `MODULE:FACTORY`, looking in the working directory first.

    Args:
        spec: The factory's place, such as `halfserve.examples.digits.model:model` or `torch.nn.functional:cross_entropy`.

    Returns:
        The function or class called FACTORY in MODULE.

    Raises:
        FactoryError: In one line, with the nearest existing name.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise FactoryError(f"{spec!r} names no factory; expected MODULE:FACTORY, such as halfserve.examples.digits.model:model")
    module = _import(module_name, spec)
    factory = getattr(module, name, None)
    if factory is None:
        raise FactoryError(f"{spec!r}: the module {module_name} has no {name!r}{_nearest(name, _callables(module))}")
    if not callable(factory):
        raise FactoryError(f"{spec!r} is a {type(factory).__name__}, not a function or class that can be called")
    return cast("Callable[..., Any]", factory)


def call_factory(spec: str) -> Any:
    """Import a factory and call it without arguments.

    Raises:
        FactoryError: Also when the call raises; the original exception is its `__cause__`.
    """
    factory = load_factory(spec)
    try:
        return factory()
    except Exception as error:
        raise FactoryError(f"{spec!r} raised {one_line(error)} when called without arguments") from error


def _import(module_name: str, spec: str) -> ModuleType:
    _look_in_working_directory()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            hint = _file_hint(module_name) or _nearest(missing.rpartition(".")[2], _siblings(missing))
            place = f"in {Path.cwd()} or the installed packages"
            raise FactoryError(f"{spec!r}: there is no module {missing!r} {place}{hint}") from error
        raise FactoryError(f"{spec!r}: {module_name} needs the package {missing!r}, which is not installed") from error
    except Exception as error:
        raise FactoryError(f"{spec!r}: importing {module_name} raised {one_line(error)}") from error


def _look_in_working_directory() -> None:
    # Unlike `python -m`, an installed command does not have the working directory on its path.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()


def _siblings(module_name: str) -> list[str]:
    parent = module_name.rpartition(".")[0]
    if not parent:
        return [module.name for module in pkgutil.iter_modules([str(Path.cwd())])]
    spec = importlib.util.find_spec(parent)
    return [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations if spec else None)]


def _callables(module: ModuleType) -> list[str]:
    return [name for name, value in inspect.getmembers(module, callable) if not name.startswith("_")]


def _file_hint(module_name: str) -> str:
    if not module_name.endswith(".py"):
        return ""
    return f"; did you mean {module_name.removesuffix('.py')!r}? A module is named without .py"


def _nearest(name: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


# The standard library, installed packages (torch), and this package.
_NOT_THE_USERS = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")} | {Path(__file__).parent}


def place_of(error: BaseException) -> str:
    """Return the place in the user's own code that an exception came from, for the end of a message; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_hidden(frame.filename)]
    return f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _is_hidden(filename: str) -> bool:
    return filename.startswith("<") or not _NOT_THE_USERS.isdisjoint(Path(filename).parents)
