"""timm and torchvision beside a torch that torchvision was not built against: models need its Python half alone."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# `make` installs both here: were they beside transformers, it would import torchvision, and fail without the operators.
FOLDER = Path(sys.prefix) / "without-dependencies"
IN_PROGRAMS = Path(__file__).parent / "torchvision_in_programs"  # on their PYTHONPATH, programs can import both
# The compiled half defines these, and the Python half registers their shapes on import.
OPERATORS = ("nms", "qnms")


@cache
def declared_operators() -> Any:
    """Declare the operators of the compiled half that does not load; they live as long as what is returned."""
    if find_spec("torchvision") is not None:
        return None  # a build for this torch
    from torch.library import Library  # noqa: PLC0415  (slow to import)

    if not (FOLDER / "torchvision").is_dir():
        raise FileNotFoundError(f"{FOLDER} holds no torchvision; run make dev")
    sys.path.append(str(FOLDER))
    make: Any = Library
    library = make("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def imported(name: str) -> ModuleType:
    """The package `timm`, or `torchvision` or a module of it.

    Raises:
        FileNotFoundError: They are not installed.
    """
    declared_operators()
    return import_module(name)
