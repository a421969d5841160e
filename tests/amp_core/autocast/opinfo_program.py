"""Compares autocast with torch's over every operation of torch's own database of operations; prints one JSON object.

A program of its own: importing the database freezes torch's global flags and changes hypothesis' settings in the process.
For each comparison, the object says how many calls were compared and what differed, by operation.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from halfserve import autocast

LOW = (torch.bfloat16, torch.float16)
# Nothing to compare: memory as it was found, and operations that only CUDA has.
LEFT_OUT = ("empty", "new_empty", "jiterator")
# AMP's documented lists, which Policy.cuda() promises on every device.
DOCUMENTED = {
    "low": "addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d linear matmul __rmatmul__ mm mv prelu",
    "fp32": "__pow__ __rdiv__ __rpow__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist "
    "cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 gelu group_norm hinge_embedding_loss kl_div l1_loss "
    "layer_norm log log_softmax log10 log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss "
    "nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax "
    "softmin softplus sum renorm tan triplet_margin_loss",
    "widest": "addcdiv addcmul atan2 bilinear cat cross dot equal index_put stack tensordot",
}
RULES = {name: rule for rule, names in DOCUMENTED.items() for name in names.split()}


@dataclass
class Comparison:
    compared: int = 0
    different: dict[str, str] = field(default_factory=dict)

    def add(self, op: Any, observed: Any, expected: Any, *, same: bool) -> None:
        self.compared += 1
        if not same:
            self.different.setdefault(op.full_name, f"{describe(observed)}, expected {describe(expected)}")


class Call:
    """One sample of an operation, to be called under several regimes."""

    def __init__(self, op: Any, sample: Any) -> None:
        self.op = op
        self.arguments = (sample.input, sample.args, sample.kwargs)

    def __call__(self, region: Any, change: Callable[[Any], Any] | None = None) -> Any:
        """The results in a region, or the error's type, with the arguments changed before."""
        torch.default_generator.manual_seed(0)  # torch.manual_seed formats a traceback for every absent accelerator
        try:
            first, args, kwargs = self.arguments if change is None else tree_map(change, self.arguments)
            with region:
                return tree_leaves(self.op(first, *args, **kwargs))
        except Exception as error:  # noqa: BLE001  (whatever torch raises, ours must raise too)
            return type(error)


def calls(dtype: torch.dtype, samples: int) -> Iterator[Call]:
    for op in op_db:
        if not op.name.startswith(LEFT_OUT) and _supports(op, dtype):
            torch.default_generator.manual_seed(0)
            # Not op.sample_inputs(), which inspects the whole stack for every sample.
            for sample in islice(op.sample_inputs_func(op, "cpu", dtype, requires_grad=False), samples):
                yield Call(op, sample)


def compare_with_torch() -> Comparison:
    """The default policy against torch.autocast on CPU tensors: dtypes and bits."""
    result = Comparison()
    for low in LOW:
        for dtype in (torch.float32, low):
            for call in calls(dtype, 2):
                expected = call(torch.autocast("cpu", low))
                observed = call(autocast("cpu", low))
                result.add(call.op, observed, expected, same=same(observed, expected))
    return result


def compare_with_rules() -> Comparison:
    """Policy.cuda() on CPU tensors against its rule for listed operations, torch.autocast for all others: dtypes and bits."""
    result = Comparison()
    for low in LOW:
        dtypes = {"low": low, "fp32": torch.float32}
        for call in (*calls(torch.float32, 1), *calls(low, 1)):
            rule = RULES.get(call.op.name.rpartition(".")[2])
            if rule is None:
                expected = call(torch.autocast("cpu", low))
            else:
                expected = call(autocast("cpu", enabled=False), partial(cast_to, dtype=dtypes.get(rule)))
            observed = call(autocast("cpu", low, policy="cuda"))
            result.add(call.op, observed, expected, same=same(observed, expected))
    return result


def compare_with_cuda() -> Comparison:
    """Policy.cuda() on CPU tensors against torch's own CUDA autocast on tensors that have a device and dtype but no memory."""
    result = Comparison()
    low, fakes = torch.float16, FakeTensorMode(allow_non_fake_inputs=True)
    torch.set_autocast_dtype("cuda", low)
    for call in (*calls(torch.float32, 1), *calls(low, 1)):
        torch.set_autocast_enabled("cuda", True)
        expected = call(fakes, lambda value: to_fake_cuda(value, fakes))
        torch.set_autocast_enabled("cuda", False)
        if isinstance(expected, list):  # some need a value or a CUDA driver to go on
            observed = call(autocast("cpu", low, policy="cuda"))
            result.add(call.op, observed, expected, same=describe(observed) == describe(expected))
    return result


def to_fake_cuda(value: Any, fakes: FakeTensorMode) -> Any:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        with fakes:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return "cuda" if isinstance(value, (str, torch.device)) and str(value) == "cpu" else value


def cast_to(value: Any, dtype: torch.dtype | None) -> Any:
    """An argument as a rule must cast it; the inputs of one operation here are all alike, so that None is `widest`."""
    is_eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return value.to(dtype) if is_eligible and dtype is not None else value


def _supports(op: Any, dtype: torch.dtype) -> bool:
    return dtype in op.supported_dtypes("cpu")


def same(observed: Any, expected: Any) -> bool:
    if describe(observed) != describe(expected):
        return False
    return isinstance(expected, type) or all(map(_same_value, observed, expected))


def _same_value(observed: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor):
        return bool(observed == expected or (observed != observed and expected != expected))  # noqa: PLR0124  (both NaN)
    if observed.shape != expected.shape or observed.layout is not expected.layout:
        return False
    return expected.numel() == 0 or torch.equal(_bits(observed), _bits(expected))


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def describe(results: Any) -> str:
    if isinstance(results, type):
        return results.__name__
    return " ".join(str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else "-" for leaf in results)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    comparisons = {"torch": compare_with_torch(), "rules": compare_with_rules(), "cuda": compare_with_cuda()}
    json.dump({name: vars(comparison) for name, comparison in comparisons.items()}, sys.stdout)
