"""torch's own test cases for its autocast lists, on tensors of any device.

The classes are taken from torch's source by themselves: the module around them needs torch's whole test harness, and importing
that freezes torch's global flags for the rest of the process.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_NN, _LINALG = torch._C._nn, vars(torch._C)["_linalg"]
_LOW, _FP32, _PROMOTES = "low", "fp32", "promotes"

# List name -> (namespace of the function, dtype the operation must run in).
_CUDA_LISTS: dict[str, tuple[Any, str]] = {
    "torch_expect_builtin_promote": (torch, _PROMOTES),
    "methods_expect_builtin_promote": (None, _PROMOTES),
    "torch_fp16": (torch, _LOW),
    "torch_fp32": (torch, _FP32),
    "torch_need_autocast_promote": (torch, _FP32),
    "nn_fp16": (_NN, _LOW),
    "nn_fp32": (_NN, _FP32),
    "linalg_fp16": (_LINALG, _LOW),
    "methods_fp16": (None, _LOW),
    "methods_fp32": (None, _FP32),
}
_CPU_LISTS: dict[str, tuple[Any, str]] = {
    "torch_expect_builtin_promote": (torch, _PROMOTES),
    "methods_expect_builtin_promote": (None, _PROMOTES),
    "torch_16": (torch, _LOW),
    "torch_fp32": (torch, _FP32),
    "torch_need_autocast_promote": (torch, _FP32),
    "nn_16": (_NN, _LOW),
    "nn_fp32": (_NN, _FP32),
}
# cuDNN's own have no CPU kernel; torch's case of einsum does not fit its equation, and torch's own run skips it.
_LEFT_OUT = {"cudnn_convolution", "cudnn_convolution_transpose", "einsum"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an operation.

    Attributes:
        op: Its name.
        args: Positional arguments.
        kwargs: Arguments by name.
        namespace: Where the function is; None if there is only a method.
        runs_in: The dtype its floating inputs must be cast to.
        returns: The dtype of a tensor that it returns.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    namespace: Any
    runs_in: torch.dtype
    returns: torch.dtype

    def functions(self) -> list[Callable[..., Any]]:
        """The operation as a function and as a method, as far as torch has them."""
        found = [getattr(self.namespace, self.op)] if self.namespace is not None and hasattr(self.namespace, self.op) else []
        method = getattr(Tensor, self.op, None)
        return [*found, method] if method is not None and isinstance(self.args[0], Tensor) else found

    def args_cast(self) -> Any:
        """The arguments as autocast must cast them."""
        return cast_floating(self.args, self.runs_in)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda value: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value, tree)


def assert_same(results: Any, expected: Any) -> None:
    """The same dtypes and the same values, bit for bit."""
    for result, wanted in zip(tree_leaves(results), tree_leaves(expected), strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
        else:
            assert result == wanted


@cache
def cuda_cases(device: str, low: torch.dtype) -> list[Case]:
    """The CUDA lists; the same cases in the same order for every device and dtype."""
    lists = _lists_class("AutocastTestLists")(torch.device(device))
    return [
        _case(entry[0], entry[1], entry[2:], _CUDA_LISTS[name], low)
        for name in _CUDA_LISTS
        for entry in getattr(lists, name)
        if entry[0] not in _LEFT_OUT and _exists(entry[0], _CUDA_LISTS[name][0])
    ]


@cache
def cpu_cases(low: torch.dtype) -> list[Case]:
    """The CPU lists, with low-precision inputs of the region's dtype."""
    lists = _lists_class("AutocastCPUTestLists")(torch.device("cpu"))
    return [
        _case(entry[0], *_arguments(name, entry, low), _CPU_LISTS[name], low)
        for name in _CPU_LISTS
        for entry in getattr(lists, name)
        if _exists(entry[0], _CPU_LISTS[name][0])
    ]


def _arguments(name: str, entry: tuple[Any, ...], low: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    if name.endswith("promote"):  # these come once with bfloat16 and once with float16 inputs
        return entry[1 if low is torch.bfloat16 else 2], entry[3:]
    is_low_input = name.endswith("fp32")
    return (cast_floating(entry[1], low) if is_low_input else entry[1]), entry[2:]


def _exists(op: str, namespace: Any) -> bool:
    # Python 3 has no __div__; torch keeps it in its list.
    return hasattr(Tensor, op) or (namespace is not None and hasattr(namespace, op))


def _case(op: str, args: Any, rest: tuple[Any, ...], kind: tuple[Any, str], low: torch.dtype) -> Case:
    namespace, runs = kind
    runs_in = low if runs == _LOW else torch.float32
    kwargs = next((part for part in rest if isinstance(part, dict)), {})
    returns = rest[0] if runs == _PROMOTES else runs_in
    return Case(op=op, args=tuple(args), kwargs=kwargs, namespace=namespace, runs_in=runs_in, returns=returns)


@cache
def _lists_class(name: str) -> Any:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "testing/_internal/autocast_test_lists.py").read_text(encoding="utf-8")
    wanted = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    scope: dict[str, Any] = {"torch": torch, "TEST_WITH_ROCM": False}
    exec(compile(ast.Module([wanted], []), "autocast_test_lists", "exec"), scope)  # noqa: S102  (a class of the torch installed)
    return scope[name]
