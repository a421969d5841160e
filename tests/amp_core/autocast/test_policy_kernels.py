"""The kernels of policies: casts, bans, gradients, recomputation."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from halfserve import Policy, autocast
from halfserve.amp_core.autocast import policy_kernels
from halfserve.amp_core.autocast.policy_state import NO_POLICIES, policies_in_force


def registrations() -> set[str]:
    return set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))


def test_torchs_own_kernels_stay_what_they_are() -> None:
    with autocast("cpu"):  # the repair of cat and stack, once per process
        before = registrations()
    with autocast("cpu", policy="cuda"), autocast("cpu", policy="native+low:cosh"):
        assert registrations() == before
    assert registrations() == before


def test_no_call_outside_of_a_policys_region_passes_through_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, dtype=torch.float16)
    with autocast("cpu", torch.float16, policy="native+fp32:erf"):
        assert x.erf().dtype is torch.float32

    def fail() -> None:
        raise AssertionError("a kernel was called")

    monkeypatch.setattr(policy_kernels, "policies_in_force", fail)
    x.erf()
    with torch.autocast("cpu", torch.float16):
        x.erf()
    with autocast("cpu", torch.float16):
        x.erf()
    with autocast("cpu", torch.float16, policy="native+fp32:erf"), pytest.raises(AssertionError, match="a kernel was called"):
        x.erf()


def test_more_policies_than_one_dtype_can_number() -> None:
    x = torch.ones(4, dtype=torch.float16)
    ops = ("exp", "log", "sin", "cos", "tan", "sinh", "cosh", "asin", "acos")
    for chosen in itertools.islice(itertools.chain.from_iterable(itertools.combinations(ops, n) for n in (1, 2, 3)), 100):
        with autocast("cpu", torch.float16, policy=Policy().fp32(*chosen)):
            assert {op for op in ops if getattr(x, op)().dtype is torch.float32} == set(chosen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_rule(dtype: torch.dtype) -> None:
    x = torch.ones(4, 4)
    policy = Policy().low("exp").fp32("matmul").widest("dot").ban("cosh")
    with autocast("cpu", dtype, policy=policy):
        assert x.exp().dtype is dtype
        assert (x.to(dtype) @ x.to(dtype)).dtype is torch.float32
        assert torch.dot(x[0].to(dtype), x[1]).dtype is torch.float32
        assert torch.dot(x[0].to(dtype), x[1].to(dtype)).dtype is dtype
        with pytest.raises(RuntimeError, match="cosh is unsafe to autocast and banned by this region's policy; leave it out"):
            x.cosh()
    assert x.cosh().dtype is torch.float32


def test_a_policy_reaches_operations_inside_composites() -> None:
    cell = nn.LSTMCell(4, 4)
    with autocast("cpu", torch.float16, policy="cuda"):
        hidden, state = cell(torch.ones(2, 4))
    assert hidden.dtype is state.dtype is torch.float16


def test_another_threads_region_without_a_policy_keeps_torchs_rules() -> None:
    x, weight = torch.ones(4, 4), torch.ones(4, 4)

    def natively() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.float16):
            einsum = torch.einsum("ij,jk->ik", x, weight)  # composite: its parts must still be cast
            return [einsum.dtype, x.half().softmax(0).dtype, (x @ weight).dtype, x.half().prod().dtype]

    expected = natively()
    with autocast("cpu", torch.float16, policy=Policy.cuda().low("prod").fp32("matmul")), ThreadPoolExecutor(1) as pool:
        assert pool.submit(natively).result() == expected
        assert (x @ weight).dtype is torch.float32


def test_regions_of_two_kinds_of_device_have_policies_of_their_own() -> None:
    x = torch.ones(4, dtype=torch.float16)
    with autocast("cpu", torch.float16, policy="native+fp32:erf"), autocast("mtia", torch.float16, policy="cuda"):
        assert (x.erf().dtype, x.exp().dtype) == (torch.float32, torch.float16)
        assert policies_in_force().of("mtia") == Policy.cuda()
        with autocast("cpu", policy="native"):
            assert x.erf().dtype is torch.float16
            assert policies_in_force().of("mtia") == Policy.cuda()


def test_vmap_takes_softmax_apart_and_the_policy_still_holds() -> None:
    x = torch.ones(3, 4, dtype=torch.float16)
    with autocast("cpu", torch.float16, policy="cuda"):
        assert torch.vmap(lambda row: row.softmax(0))(x).dtype is torch.float32
        assert torch.vmap(lambda row: row.log_softmax(0))(x).dtype is torch.float32


@pytest.fixture(scope="module")
def scale() -> Any:
    @torch.library.custom_op("halfserve_tests::scale", mutates_args=())
    def op(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * factor

    op.register_fake(lambda x, _: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=_keep_factor)
    return op


def _keep_factor(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factor = inputs[1]


@pytest.mark.parametrize(
    ("rule", "given", "expected"),
    [
        ("low", torch.float32, torch.float16),
        ("fp32", torch.float16, torch.float32),
        ("widest", torch.float16, torch.float32),
        ("native", torch.float16, torch.float16),
    ],
)
def test_a_custom_operation_takes_every_rule(scale: Any, rule: str, given: torch.dtype, expected: torch.dtype) -> None:
    x = torch.ones(4, dtype=given, requires_grad=True)
    factor = torch.full((4,), 2.0, dtype=torch.float32 if rule == "widest" else given)
    with autocast("cpu", torch.float16, policy=f"native+{rule}:halfserve_tests::scale"):
        y = scale(x, factor)
    torch.autograd.backward(y.sum())
    assert y.dtype is expected
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.tolist()) == (given, [2.0] * 4)


def test_a_custom_operation_may_be_banned(scale: Any) -> None:
    x = torch.ones(4)
    with (
        autocast("cpu", policy="native+ban:halfserve_tests::scale"),
        pytest.raises(RuntimeError, match="halfserve_tests::scale is unsafe to autocast and banned"),
    ):
        scale(x, x)


HALF = torch.float16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).softmax(-1)
        self.seen.append(y.dtype)
        return y * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("policy", [None, "cuda", "native+fp32:softmax,linear"])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_gradients_equal_those_without_checkpointing(use_reentrant: bool, policy: Any, backward_inside: bool) -> None:
    gradients, tag = [], torch.compiler.config.cache_key_tag
    for checkpointed in (False, True):
        torch.manual_seed(0)
        block, x = Block(), torch.randn(3, 4, requires_grad=True)
        with autocast("cpu", HALF, policy=policy):
            y = checkpoint(block, x, use_reentrant=use_reentrant) if checkpointed else block(x)
            if backward_inside:
                y.float().pow(2).sum().backward()
        if not backward_inside:
            y.float().pow(2).sum().backward()
        assert set(block.seen) == {torch.float32 if policy else HALF}
        assert policies_in_force() is NO_POLICIES
        assert torch.compiler.config.cache_key_tag == tag
        gradients.append((x.grad, block.linear.weight.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_another_policy_around_backward_does_not_leak_into_the_recomputation() -> None:
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    with autocast("cpu", HALF, policy="cuda"):
        y = checkpoint_sequential([block, Block()], 1, x, use_reentrant=True)  # type: ignore[no-untyped-call]
    with autocast("cpu", HALF, policy="native+fp32:linear"):
        y.sum().backward()
        assert str(policies_in_force().of("cpu")) == "native+fp32:linear"
    assert set(block.seen) == {torch.float32}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_a_policy_around_backward_does_not_leak_where_forward_had_none(region: Any, use_reentrant: bool) -> None:
    with autocast("cpu", HALF, policy="cuda"):
        pass
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    with region("cpu", HALF):
        y = checkpoint(block, x, use_reentrant=use_reentrant)
    with autocast("cpu", HALF, policy="cuda"):
        y.float().sum().backward()
        assert str(policies_in_force().of("cpu")) == "cuda"
    assert set(block.seen) == {HALF}


def test_a_function_that_raises_when_it_is_computed_again_leaves_no_policy_behind() -> None:
    calls: list[int] = []

    def once(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    with autocast("cpu", HALF, policy="cuda"):
        y = checkpoint(once, x, use_reentrant=True)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert policies_in_force() is NO_POLICIES
