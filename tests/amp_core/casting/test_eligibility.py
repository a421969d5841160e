"""What autocast may touch: floating tensors of the region's device, not float64, in out-of-place calls without dtype=."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_core import Policy, autocast

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LOW = pytest.mark.parametrize("low", [HALF, BRAIN], ids=str)
# mm is torch's own low operation; the others are what a policy adds.
POLICY = Policy().low("exp", "sum", "relu", "add", "embedding", "expm1").fp32("tanh", "prod").widest("dot", "cat")
ROUTES = pytest.mark.parametrize(
    "function",
    [lambda x: x @ x, torch.exp, torch.tanh, torch.relu],
    ids=["torch's own low", "a policy's low", "a policy's fp32", "an operation torch does not list"],
)


@pytest.fixture(params=[HALF, BRAIN], ids=str)
def low(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    with autocast("cpu", request.param, policy=POLICY):
        yield request.param


@ROUTES
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_wide_and_complex_tensors_keep_their_dtype(low: torch.dtype, function: Any, dtype: torch.dtype) -> None:
    if dtype.is_complex and function is torch.relu:
        function = torch.sum  # there is no complex relu
    assert function(torch.ones(2, 2, dtype=dtype)).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool])
def test_integers_and_booleans_are_as_without_autocast(low: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    assert x.sum().dtype is torch.int64
    assert x.exp().dtype is FULL  # torch's own promotion of integers
    assert torch.cat([x, x]).dtype is dtype


@ROUTES
def test_tensors_of_another_device_keep_their_dtype(low: torch.dtype, function: Callable[[Tensor], Tensor]) -> None:
    for dtype in (FULL, HALF, BRAIN):
        result = function(torch.ones(2, 2, dtype=dtype, device="meta"))
        assert (result.dtype, result.device.type) == (dtype, "meta")


def test_in_place_forms_keep_the_dtype_of_what_they_write_to(low: torch.dtype) -> None:
    x = torch.ones(2, 2)
    assert torch.exp(x).dtype is low
    assert x.clone().exp_().dtype is FULL
    assert functional.relu(x.clone(), inplace=True).dtype is FULL
    x += 1
    assert x.dtype is FULL
    half = torch.ones(2, dtype=low)
    assert half.tanh_().dtype is low


def test_out_forms_keep_the_dtype_of_what_they_write_to(low: torch.dtype) -> None:
    x, out = torch.ones(2, 2), torch.empty(2, 2)
    assert torch.exp(x, out=out) is out
    assert torch.mm(x, x, out=out) is out
    assert torch.sum(x, dim=0, out=torch.empty(2)).dtype is FULL


@pytest.mark.parametrize("wanted", [torch.float64, FULL, HALF, BRAIN], ids=str)
@pytest.mark.parametrize("given", [FULL, HALF, BRAIN], ids=str)
@pytest.mark.parametrize("policy", ["cuda", Policy().low("sum", "softmax", "cumsum"), "native"])
def test_an_explicit_dtype_wins(given: torch.dtype, wanted: torch.dtype, policy: Any) -> None:
    x = torch.rand(3, 3).to(given)
    calls: list[Callable[[], Tensor]] = [
        lambda: x.sum(dtype=wanted),
        lambda: torch.sum(x, 0, dtype=wanted),
        lambda: functional.softmax(x, -1, dtype=wanted),
        lambda: torch.softmax(x, -1, wanted),
        lambda: x.cumsum(0, dtype=wanted),
        lambda: x.prod(dtype=wanted),
    ]
    for call in calls:
        expected = call()
        with autocast("cpu", HALF, policy=policy):
            observed = call()
        assert observed.dtype is wanted
        assert torch.equal(observed, expected)


def test_tensors_in_lists_and_tuples_are_cast(low: torch.dtype) -> None:
    a, b = torch.ones(2, dtype=low), torch.ones(2)
    with autocast("cpu", low, policy=Policy().low("cat", "stack", "hstack").fp32("meshgrid")):
        assert torch.cat([a, b]).dtype is torch.stack((b, b)).dtype is torch.hstack([b, b]).dtype is low
        assert [tensor.dtype for tensor in torch.meshgrid([a, b], indexing="ij")] == [FULL, FULL]
    indices = (torch.tensor([1]),)
    with autocast("cpu", low, policy="cuda"):
        assert torch.index_put(a, indices, b[:1]).dtype is FULL  # integer indices beside floating values
        assert torch.index_put(a, indices, a[:1]).dtype is low


def test_a_missing_optional_tensor_stays_missing(low: torch.dtype) -> None:
    x = torch.ones(2, 4, dtype=low)
    with autocast("cpu", low, policy="cuda"):
        for norm in (nn.LayerNorm(4), nn.LayerNorm(4, elementwise_affine=False)):
            assert norm(x).dtype is FULL
        assert nn.Linear(4, 4, bias=False)(x).dtype is low


def test_numbers_and_tensors_without_dimensions(low: torch.dtype) -> None:
    x, scalar = torch.ones(2), torch.tensor(2.0)
    assert (x + 1).dtype is (x + scalar).dtype is torch.add(x, x, alpha=2).dtype is low
    assert scalar.exp().dtype is low
    with autocast("cpu", low, policy="cuda"):
        assert (x.to(low) ** 2).dtype is (2 ** x.to(low)).dtype is (1 / x.to(low)).dtype is FULL


def test_widest_takes_the_widest_of_the_eligible(low: torch.dtype) -> None:
    x = torch.ones(2)
    assert torch.dot(x.to(low), x.to(low)).dtype is low
    assert torch.dot(x.to(low), x).dtype is FULL
    assert torch.dot(x.double(), x.double()).dtype is torch.float64
    with pytest.raises(RuntimeError, match="same dtype"):  # torch's own refusal: float64 is never cast
        torch.dot(x.double(), x)


def test_sparse_tensors(low: torch.dtype) -> None:
    sparse = torch.eye(3).to_sparse()
    assert sparse.expm1().dtype is low
    assert sparse.expm1().layout is torch.sparse_coo
    expected = torch.autocast("cpu", low)(lambda: torch.sparse.mm(sparse, torch.ones(3, 3)))()
    with autocast("cpu", low):
        assert torch.equal(torch.sparse.mm(sparse, torch.ones(3, 3)), expected)


class Tagged(Tensor):
    """A subclass that keeps itself through every operation."""


class Watching(Tensor):
    seen: list[str]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch's own


@ROUTES
def test_subclasses_stay_themselves(low: torch.dtype, function: Callable[[Tensor], Tensor]) -> None:
    plain = function(torch.ones(2, 2))
    result = function(torch.ones(2, 2).as_subclass(Tagged))
    assert (type(result), result.dtype) == (Tagged, plain.dtype)


def test_subclasses_see_the_call_once_and_never_our_casts(low: torch.dtype) -> None:
    Watching.seen = []
    torch.exp(torch.ones(2).as_subclass(Watching))
    assert Watching.seen == ["exp"]


@ROUTES
@LOW
@pytest.mark.parametrize("policy", [POLICY, "cuda", None])
def test_gradients_flow_into_the_dtype_of_the_leaf(low: torch.dtype, function: Any, policy: Any) -> None:
    for dtype in (FULL, low):
        leaf = nn.Parameter(torch.ones(2, 2, dtype=dtype))
        with autocast("cpu", low, policy=policy):
            result = function(leaf)
        result.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype is dtype
        assert torch.isfinite(leaf.grad).all()


@LOW
def test_backward_runs_in_forwards_dtype(low: torch.dtype) -> None:
    dtypes: dict[str, torch.dtype] = {}
    x = torch.rand(3, 3, requires_grad=True)
    with autocast("cpu", low, policy="cuda"):
        product = x @ x
        probabilities = product.softmax(-1)
    for name, tensor in {"product": product, "probabilities": probabilities}.items():
        tensor.register_hook(lambda gradient, name=name: dtypes.update({name: gradient.dtype}))  # type: ignore[no-untyped-call]
    torch.autograd.backward(probabilities.square().sum())
    assert dtypes == {"product": low, "probabilities": FULL}
