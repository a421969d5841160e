"""torch's own test cases for the CUDA lists, on CPU tensors.

The class is taken from torch's source by itself: the module around it needs torch's whole test harness.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# List name -> (namespace of the function, dtype the operation must run in).
_LISTS: dict[str, tuple[Any, torch.dtype]] = {
    "torch_expect_builtin_promote": (torch, torch.float32),
    "methods_expect_builtin_promote": (None, torch.float32),
    "torch_fp16": (torch, torch.float16),
    "torch_fp32": (torch, torch.float32),
    "torch_need_autocast_promote": (torch, torch.float32),
    "nn_fp16": (torch._C._nn, torch.float16),
    "nn_fp32": (torch._C._nn, torch.float32),
    "linalg_fp16": (vars(torch._C)["_linalg"], torch.float16),
    "methods_fp16": (None, torch.float16),
    "methods_fp32": (None, torch.float32),
}
# cuDNN's own have no CPU kernel; torch's case of einsum does not fit its equation, and torch's own run skips it.
_LEFT_OUT = {"cudnn_convolution", "cudnn_convolution_transpose", "einsum"}


@dataclass(frozen=True, kw_only=True)
class Case:
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    namespace: Any
    runs_in: torch.dtype
    returns: torch.dtype


def cases() -> list[Case]:
    lists = _autocast_test_lists()(torch.device("cpu"))
    return [
        _case(entry, *_LISTS[name], promotes=name.endswith("builtin_promote"))
        for name in _LISTS
        for entry in getattr(lists, name)
        if entry[0] not in _LEFT_OUT and _exists(entry[0], _LISTS[name][0])
    ]


def _exists(op: str, namespace: Any) -> bool:
    # Python 3 has no __div__; torch keeps it in its list.
    return hasattr(torch.Tensor, op) or (namespace is not None and hasattr(namespace, op))


def _case(entry: tuple[Any, ...], namespace: Any, runs_in: torch.dtype, *, promotes: bool) -> Case:
    op, *rest = entry
    kwargs = next((part for part in rest[1:] if isinstance(part, dict)), {})
    returns = rest[1] if promotes else runs_in
    return Case(op=op, args=tuple(rest[0]), kwargs=kwargs, namespace=namespace, runs_in=runs_in, returns=returns)


def _autocast_test_lists() -> Any:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "testing/_internal/autocast_test_lists.py").read_text(encoding="utf-8")
    wanted = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "AutocastTestLists")
    scope: dict[str, Any] = {"torch": torch, "TEST_WITH_ROCM": False}
    exec(compile(ast.Module([wanted], []), "autocast_test_lists", "exec"), scope)  # noqa: S102  (a class of the torch installed)
    return scope["AutocastTestLists"]
