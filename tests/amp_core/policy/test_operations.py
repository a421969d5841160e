"""The operations' rules equal torch's own test cases for its autocast lists."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from halfserve import autocast

# The class is taken from torch's source by itself: the module around them needs torch's whole test harness, and
# importing that freezes torch's global flags for the rest of the process.

_NN, _LINALG = torch._C._nn, vars(torch._C)["_linalg"]
_LOW, _FP32, _PROMOTES = "low", "fp32", "promotes"

# List name -> (namespace of the function, dtype the operation must run in).
_LISTS: dict[str, tuple[Any, str]] = {
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
# cuDNN's own have no CPU kernel; torch's case of einsum does not fit its equation, and torch's own run skips it.
_LEFT_OUT = {"cudnn_convolution", "cudnn_convolution_transpose", "einsum"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an operation."""

    op: str  # its name
    args: tuple[Any, ...]  # positional arguments
    kwargs: dict[str, Any]  # arguments by name
    namespace: Any  # where the function is; None if there is only a method
    runs_in: torch.dtype  # the dtype its floating inputs must be cast to
    returns: torch.dtype  # the dtype of a tensor that it returns

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
    lists = _lists_class()(torch.device(device))
    return [
        _case(entry[0], entry[1], entry[2:], kind, low)
        for name, kind in _LISTS.items()
        for entry in getattr(lists, name)
        if entry[0] not in _LEFT_OUT and _exists(entry[0], kind[0])
    ]


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
def _lists_class() -> Any:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "testing/_internal/autocast_test_lists.py").read_text(encoding="utf-8")
    wanted = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "AutocastTestLists")
    scope: dict[str, Any] = {"torch": torch, "TEST_WITH_ROCM": False}
    exec(compile(ast.Module([wanted], []), "autocast_test_lists", "exec"), scope)  # noqa: S102  (a class of the torch installed)
    return scope["AutocastTestLists"]


IDS = [f"{index}-{case.op}" for index, case in enumerate(cuda_cases("cpu", torch.float16))]
on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
low_dtypes = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
# torch deprecates these two; they are in its lists all the same.
deprecated = pytest.mark.filterwarnings(
    "ignore:torch.chain_matmul is deprecated", "ignore:Using torch.cross without specifying the dim"
)


def check(case: Case, device: str, low: torch.dtype, policy: str | None) -> None:
    assert case.functions(), f"torch has no {case.op}"
    for function in case.functions():
        with autocast(device, low, policy=policy):
            results = function(*case.args, **case.kwargs)
        expected = function(*case.args_cast(), **case.kwargs)
        assert_same(results, expected)
        if isinstance(results, torch.Tensor):
            assert results.dtype is case.returns


@deprecated
@low_dtypes
@pytest.mark.parametrize("index", range(len(IDS)), ids=IDS)
def test_listed_operation_runs_in_the_listed_dtype(index: int, low: torch.dtype) -> None:
    check(cuda_cases("cpu", low)[index], "cpu", low, "cuda")


@deprecated
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@low_dtypes
@pytest.mark.parametrize("policy", [None, "cuda"])
def test_listed_operation_on_cuda(policy: str | None, low: torch.dtype, subtests: pytest.Subtests) -> None:
    for name, case in zip(IDS, cuda_cases("cuda", low), strict=True):
        with subtests.test(name):
            check(case, "cuda", low, policy)


@devices
@pytest.mark.parametrize("call", [torch.nn.functional.binary_cross_entropy, torch.nn.BCELoss()], ids=["function", "module"])
def test_banned_operation_raises_and_names_the_safe_one(call: Any, device: str) -> None:
    probabilities = torch.rand(8, 8, device=device)
    with autocast(device, torch.float16, policy="cuda"):
        with pytest.raises(RuntimeError, match="unsafe to autocast(.|\n)*binary_cross_entropy_with_logits"):
            call(probabilities, probabilities)
        with autocast(device, enabled=False):
            assert call(probabilities, probabilities).dtype is torch.float32


@devices
def test_einsum_whose_case_in_torch_is_broken_runs_low(device: str) -> None:
    a, b = torch.randn(2, 3, device=device), torch.randn(3, 4, device=device)
    with autocast(device, torch.float16, policy="cuda"):
        assert torch.einsum("ij,jk->ik", a, b).dtype is torch.float16


def test_every_case_that_a_cpu_can_run_is_here() -> None:
    # 121 cases (120 in torch 2.11, which has no rms_norm there), without two of cuDNN's own and the broken one; the banned
    # operation has its own test above.
    assert len(IDS) in {116, 117}
