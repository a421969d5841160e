"""What made a model, and from what: entries of its metadata."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import onnx
import onnx_ir
import torch
from torch import nn

from amp_core.policy import Policy


def provenance(
    module: nn.Module, model: onnx_ir.Model, limits: Mapping[str, tuple[int, int | None]], policy: Policy | str | None
) -> dict[str, str]:
    """The metadata of an exported model.

    Args:
        module: The torch model.
        model: What became of it.
        limits: The sizes that may vary, by name: smallest and largest.
        policy: The autocast policy of the training run.

    Returns:
        Versions of this package, torch and onnx; the opset; the class; the hash of its source; the sizes; the policy.
    """
    entries = {
        "halfserve.version": _version("halfserve"),
        "halfserve.torch": torch.__version__,
        "halfserve.onnx": onnx.__version__,
        "halfserve.opset": str(model.opset_imports[""]),
        "halfserve.source": _name(type(module)),
        "halfserve.source_sha256": source_hash(module),
        "halfserve.dimensions": json.dumps(limits, sort_keys=True),
    }
    return entries if policy is None else {**entries, "halfserve.policy": str(policy)}


def source_hash(module: nn.Module) -> str:
    """SHA-256 in hexadecimal over the source text of the classes of all modules in a model.

    Of torch's own classes only the names count: their text goes with torch's version, which has its own entry. So does a class
    whose source is not to be found (typed in at a prompt).
    """
    classes = {_name(type(part)): type(part) for part in module.modules()}
    texts = [f"{name}\n{'' if name.startswith('torch.') else _source(classes[name])}\n" for name in sorted(classes)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
