"""Which of torch's functions make a tensor out of nothing, and what stands in for each where the dtype must be inherited.

Only torch is imported: models import what imports this.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

# Float whatever their arguments are: each takes torch's default dtype when it is given none.
ALWAYS_FLOAT: frozenset[Callable[..., Any]] = frozenset({
    torch.zeros,
    torch.ones,
    torch.empty,
    torch.empty_strided,
    torch.eye,
    torch.rand,
    torch.randn,
    torch.logspace,
    torch.bartlett_window,
    torch.blackman_window,
    torch.hamming_window,
    torch.hann_window,
    torch.kaiser_window,
    torch.fft.fftfreq,
    torch.fft.rfftfreq,
})  # fmt: skip

# Float or not, as their arguments are.
BY_ARGUMENTS: frozenset[Callable[..., Any]] = frozenset({
    torch.arange,
    torch.range,
    torch.linspace,
    torch.full,
    torch.normal,
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    torch.scalar_tensor,
})  # fmt: skip

FACTORIES = ALWAYS_FLOAT | BY_ARGUMENTS

# The helper of export.inheritance.dtype_inheritance to write instead, by the factory's name.
HELPERS = {
    "zeros": "new_zeros(x, ...)",
    "ones": "new_ones(x, ...)",
    "empty": "new_empty(x, ...)",
    "full": "new_full(x, ...)",
    "eye": "new_eye(x, ...)",
    "arange": "new_arange(x, ...)",
    "range": "new_arange(x, ...)",
    "linspace": "new_linspace(x, ...)",
    "tensor": "new_tensor(x, ...)",
    "as_tensor": "new_tensor(x, ...)",
    "asarray": "new_tensor(x, ...)",
    "scalar_tensor": "new_tensor(x, ...)",
}

_OPERATIONS = (
    "abs", "add", "addcdiv", "addcmul", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bmm", "cos", "cosh",
    "deg2rad", "digamma", "div", "divide", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "expit", "hypot", "i0",
    "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logit", "logsumexp", "mul", "multiply", "outer", "pow",
    "rad2deg", "reciprocal", "rsqrt", "rsub", "sigmoid", "sin", "sinc", "sinh", "sqrt", "sub", "subtract", "tan", "tanh",
    "true_divide", "xlogy", "__add__", "__mul__", "__pow__", "__radd__", "__rdiv__", "__rmul__", "__rpow__", "__rsub__",
    "__rtruediv__", "__sub__", "__truediv__",
)  # fmt: skip

# Arithmetic that turns whole numbers into torch's default dtype: a quotient, a product with a float, a sine. Dynamo calls what
# is written with a sign by Python's own operator.
FROM_INTEGERS: frozenset[Callable[..., Any]] = frozenset(
    getattr(owner, name) for owner in (torch, torch.Tensor, torch.special) for name in _OPERATIONS if hasattr(owner, name)
) | {operator.add, operator.mul, operator.pow, operator.sub, operator.truediv}
