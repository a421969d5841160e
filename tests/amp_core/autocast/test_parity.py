"""Casts, dtypes and nestings equal torch.autocast's, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfserve import Policy, autocast

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


# Each nesting is a tree of regions of every kind (ours and torch's, blocks and decorated functions, shared instances,
# generators that are suspended and closed anywhere, exceptions thrown at any depth). Before each region the whole state is
# noted, inside it the dtypes that operations really have are compared with a model, and after it the state must be what was
# noted.

THREADS = 8
DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "ipu", "xla", "mtia", "privateuseone")
POLICIES: dict[str, tuple[Policy, dict[str, Any]]] = {
    "native": (Policy(), {}),
    "cuda": (Policy.cuda(), {"softmax": FULL}),
    "mm": (Policy().fp32("mm"), {"mm": FULL}),
    "exp": (Policy.cuda().low("exp"), {"softmax": FULL, "exp": "low"}),
}
# Entered from all threads at once, and within themselves.
SHARED = [("cuda", HALF, autocast("cpu", HALF, policy="cuda")), (None, BRAIN, autocast("cpu", BRAIN))]


class ThrownError(Exception):
    """Thrown by a random leaf, caught at a random depth."""


@dataclass(frozen=True)
class Model:
    """What must be in force for the CPU."""

    enabled: bool = False
    dtype: torch.dtype = BRAIN
    policy: str = "native"

    def dtypes(self) -> list[torch.dtype]:
        changes = POLICIES[self.policy][1] if self.enabled else {}
        changes = {op: self.dtype if dtype == "low" else dtype for op, dtype in changes.items()}
        low = self.dtype if self.enabled else FULL
        return [changes.get("mm", low), changes.get("softmax", HALF), changes.get("exp", FULL), low]


class Walk:
    """One thread's random nestings."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  (a schedule, not a secret)
        self.x, self.halves = torch.ones(2, 2), torch.ones(2, dtype=HALF)
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.weight.grad = torch.ones(2, 2)
        self.optimizer = torch.optim.SGD([self.weight], lr=2.0**-4)
        self.regions = 0

    def nest(self, model: Model, depth: int) -> None:
        """Check what is in force, then open some more regions, or throw."""
        self.check(model)
        if depth and self.random.random() < 0.08:
            raise ThrownError
        for _ in range(self.random.choice([1, 1, 2, 3]) if depth < 4 else 0):
            before = state()
            catches = not depth or self.random.random() < 0.5
            try:
                self.random.choice([self.block, self.block, self.torchs, self.function, self.generator, self.disabled])(
                    model, depth
                )
            except ThrownError:
                if not catches:
                    raise
            finally:
                assert state() == before
            self.check(model)

    def check(self, model: Model) -> None:
        dtypes = [
            torch.mm(self.x, self.x).dtype,
            self.halves.softmax(0).dtype,
            self.x.exp().dtype,
            functional.linear(self.x, self.weight).dtype,
        ]
        assert dtypes == model.dtypes()
        if self.random.random() < 0.3:
            self.optimizer.step()
            weight = self.weight.detach().to(model.dtypes()[3])
            assert torch.equal(functional.linear(self.x, self.weight), self.x.to(weight.dtype) @ weight.T)

    def region(self, model: Model) -> tuple[Model, Any]:
        if self.random.random() < 0.25:
            name, dtype, shared = self.random.choice(SHARED)
            return Model(True, dtype, name or model.policy), shared
        inner = Model(self.random.random() < 0.8, self.random.choice([HALF, BRAIN]), model.policy)
        cache_enabled = self.random.choice([True, False, None])
        name = self.random.choice([None, *POLICIES])
        policy: Any = None if name is None else self.random.choice([POLICIES[name][0], str(POLICIES[name][0])])
        made: Any = autocast("cpu", inner.dtype, inner.enabled, cache_enabled, policy)
        return replace(inner, policy=name or model.policy), made

    def block(self, model: Model, depth: int) -> None:
        inner, region = self.region(model)
        self.regions += 1
        with region:
            self.nest(inner, depth + 1)

    def torchs(self, model: Model, depth: int) -> None:
        # Of the dtype in force and without its cache: else the stale casts would be torch's own (defects 4 and 5).
        inner = replace(model, enabled=self.random.random() < 0.8)
        with torch.autocast("cpu", inner.dtype, inner.enabled, cache_enabled=False):
            self.nest(inner, depth + 1)

    def function(self, model: Model, depth: int) -> None:
        inner, region = self.region(model)
        self.regions += 1
        decorated: Callable[[Model, int], None] = region(self.nest)
        decorated(inner, depth + 1)

    def disabled(self, model: Model, depth: int) -> None:
        """A region of a device that is not there: torch warns, and keeps the state all the same."""
        self.regions += 1
        with autocast("cuda", self.random.choice([HALF, BRAIN]), policy=self.random.choice([None, "native", "cuda"])):
            self.nest(model, depth + 1)

    def generator(self, model: Model, depth: int) -> None:
        inner, region = self.region(model)
        self.regions += 1

        @region  # type: ignore[untyped-decorator]  # the instance, seen as Any
        def generate() -> Iterator[Tensor]:
            with suppress(ZeroDivisionError):
                self.nest(inner, depth + 1)
                yield self.x
            self.nest(inner, depth + 1)
            yield self.x

        suspended = generate()
        next(suspended)
        self.nest(model, depth + 1)
        end = self.random.choice(["exhaust", "throw", "close", "abandon"])
        if end == "exhaust":
            assert list(suspended)
        elif end == "throw":
            assert suspended.throw(ZeroDivisionError()) is self.x
        elif end == "close":
            suspended.close()


def state() -> list[Any]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    devices = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES]
    return [depth, torch.is_autocast_cache_enabled(), *devices]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("nestings", [10, pytest.param(125, marks=pytest.mark.long)])
def test_random_nestings_in_eight_threads_leave_the_state_as_found(nestings: int) -> None:
    before, seed = state(), random.getrandbits(32)  # pytest-randomly's own seed makes this one

    def run(thread: int) -> int:
        walk = Walk(seed + thread)
        for _ in range(nestings):
            walk.nest(Model(), 0)
            assert state() == before
        return walk.regions

    with ThreadPoolExecutor(THREADS) as pool:
        regions = list(pool.map(run, range(THREADS)))
    assert sum(regions) > THREADS * nestings
    assert state() == before
    with torch.autocast("cpu", HALF):  # nothing of any policy is left
        assert torch.ones(2, dtype=HALF).softmax(0).dtype is torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is HALF
