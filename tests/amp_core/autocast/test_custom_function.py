"""custom_fwd and custom_bwd: torch's meaning, and the policy of forward in backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import halfserve
from halfserve import autocast, custom_bwd, custom_fwd

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
CAST_INPUTS = pytest.mark.parametrize("cast_inputs", [None, FULL, HALF, BRAIN], ids=str)


class Seen:
    """What forward and backward found, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bool, torch.dtype, list[torch.dtype]]] = []

    def note(self, where: str, *tensors: Tensor) -> None:
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.events.append((where, enabled, dtype if enabled else FULL, [tensor.dtype for tensor in tensors]))


def make(amp: Any, cast_inputs: torch.dtype | None, seen: Seen) -> Callable[..., Tensor]:
    class Multiply(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)  # type: ignore[untyped-decorator]  # torch's or ours
        def forward(ctx: Any, a: Tensor, pair: tuple[Tensor, Any], *, scale: float = 2.0) -> Tensor:
            ctx.save_for_backward(a, pair[0])
            seen.note("forward", a, pair[0])
            return a @ pair[0] * scale

        @staticmethod
        @amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]  # torch's or ours
        def backward(ctx: Any, *gradients: Any) -> Any:
            a, b = ctx.saved_tensors
            result = gradients[0] @ b.T
            seen.note("backward", *gradients, result, a.T @ gradients[0])
            return result, None

    apply: Callable[..., Tensor] = Multiply.apply
    return apply


def run(amp: Any, cast_inputs: torch.dtype | None, regions: list[tuple[torch.dtype, bool]]) -> tuple[Any, ...]:
    """Forward in nested regions, backward outside of them and once more inside of another."""
    torch.default_generator.manual_seed(3)
    seen = Seen()
    function = make(amp, cast_inputs, seen)
    leaf, other = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3)

    def forward(rest: list[tuple[torch.dtype, bool]]) -> Tensor:
        if not rest:
            return function(leaf * 1, (other, "not a tensor"))
        with amp.autocast("cpu", dtype=rest[0][0], enabled=rest[0][1]):
            return forward(rest[1:])

    result = forward(regions)
    loss = result.float().square().sum()
    gradients = [*torch.autograd.grad(loss, leaf, retain_graph=True)]
    with amp.autocast("cpu", dtype=BRAIN):
        gradients += torch.autograd.grad(loss, leaf)
    return result, gradients, seen.events


@CAST_INPUTS
@pytest.mark.parametrize(
    "regions",
    [[], [(HALF, True)], [(BRAIN, True)], [(HALF, False)], [(HALF, True), (BRAIN, True)], [(HALF, True), (BRAIN, False)]],
    ids=["none", "half", "bfloat16", "off", "another inside", "off inside"],
)
def test_the_same_as_torchs(cast_inputs: torch.dtype | None, regions: list[tuple[torch.dtype, bool]]) -> None:
    result, gradients, events = run(halfserve, cast_inputs, regions)
    torchs, torchs_gradients, torchs_events = run(torch.amp, cast_inputs, regions)
    assert events == torchs_events
    assert [event[0] for event in events] == ["forward", "backward", "backward"]
    for found, wanted in zip([result, *gradients], [torchs, *torchs_gradients], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("wide", [torch.float64, torch.int64])
def test_cast_inputs_leaves_what_is_not_eligible(wide: torch.dtype) -> None:
    class Take(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=HALF)
        def forward(ctx: Any, x: Tensor, others: dict[str, Tensor], numbers: list[Any]) -> Tensor:
            assert [x.dtype, others["x"].dtype, numbers[0].dtype, numbers[1]] == [wide, HALF, HALF, 3]
            return others["x"]

    x = torch.ones(2)
    with autocast("cpu", BRAIN):
        assert Take.apply(x.to(wide), {"x": x}, [x, 3]).dtype is HALF  # type: ignore[no-untyped-call]  # torch's own


@pytest.mark.parametrize(
    ("around_forward", "around_backward", "softmax"),
    [(None, "cuda", HALF), ("native", "cuda", HALF), ("cuda", "native", FULL), ("cuda", None, FULL)],
)
def test_backward_has_the_policy_of_its_forward_only(around_forward: Any, around_backward: Any, softmax: torch.dtype) -> None:
    found: list[torch.dtype] = []

    class Note(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, *gradients: Any) -> Any:
            found.extend([gradients[0].half().softmax(0).dtype, (gradients[0] @ gradients[0]).dtype])
            return gradients[0]

    x = torch.ones(2, 2, requires_grad=True)
    with autocast("cpu", HALF, policy=around_forward):
        y: Tensor = Note.apply(x)  # type: ignore[no-untyped-call]  # torch's own
    with autocast("cpu", BRAIN, policy=around_backward):
        torch.autograd.backward(y.sum())
    assert found == [softmax, HALF]


def test_backward_in_another_thread_and_one_inside_the_other() -> None:
    start, seen = threading.Barrier(4, timeout=60), Seen()
    function = make(halfserve, None, seen)
    leaf, other = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with autocast("cpu", HALF, policy="cuda"):
        inner = function(leaf, (other, None))
        outer = function(inner, (other, None))

    def backward(_: int) -> tuple[Tensor, bool]:
        start.wait()
        return torch.autograd.grad(outer.float().sum(), leaf, retain_graph=True)[0], torch.is_autocast_enabled("cpu")

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(backward, range(4)))
    assert all(torch.equal(gradient, torch.full((2, 2), 4.0)) and not enabled for gradient, enabled in results)
    backwards = [event for event in seen.events if event[0] == "backward"]
    assert backwards == [("backward", True, HALF, [HALF, HALF, HALF])] * 8


@pytest.mark.parametrize(("forward_by", "backward_by"), [(torch.amp, halfserve), (halfserve, torch.amp)])
def test_one_decorator_of_torchs_and_one_of_ours(forward_by: Any, backward_by: Any) -> None:
    seen = Seen()

    class Amp:
        custom_fwd, custom_bwd = staticmethod(forward_by.custom_fwd), staticmethod(backward_by.custom_bwd)

    x = torch.ones(2, 2, requires_grad=True)
    with autocast("cpu", HALF):
        y = make(Amp, None, seen)(x, (torch.ones(2, 2), None))
    torch.autograd.backward(y.sum())
    assert seen.events[1][:3] == ("backward", True, HALF)


def test_backward_alone_says_what_is_missing() -> None:
    class Alone(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    x = torch.ones(2, requires_grad=True)
    y: Tensor = Alone.apply(x)  # type: ignore[no-untyped-call]  # torch's own
    with pytest.raises(RuntimeError, match="a backward with custom_bwd needs custom_fwd on its forward"):
        torch.autograd.backward(y.sum())
    assert x.grad is None


def test_they_keep_names_and_texts() -> None:
    def forward(ctx: Any) -> None:
        """Say nothing."""

    for decorated in (custom_fwd(forward, device_type="cpu"), custom_bwd(device_type="cpu")(forward)):
        assert (decorated.__name__, decorated.__doc__) == ("forward", "Say nothing.")
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        custom_fwd(forward, device_type=3)  # type: ignore[call-overload]
