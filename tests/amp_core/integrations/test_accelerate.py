"""accelerate with our precision trains bit for bit as the plain loop does, resumes, and exchanges states with its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, GradScalerKwargs
from torch import nn

from halfserve import GradScaler, Policy
from halfserve.amp_core.integrations.accelerate import HalfserveAccelerator
from tests.amp_core.integrations import plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

plain.silence_loggers()


@pytest.fixture(autouse=True)
def _fresh_process_state() -> Iterator[None]:
    """accelerate settles the precision once per process; each test is one."""
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator(mixed_precision: str | None = "fp16", *, device: str = "cpu", **settings: Any) -> HalfserveAccelerator:
    if mixed_precision == "fp16":
        settings.setdefault("scaler", plain.scaler_for_test(device))
    return HalfserveAccelerator(mixed_precision=mixed_precision, cpu=device == "cpu", **settings)


class Run:
    """A training under accelerate that can be saved and loaded between batches."""

    def __init__(self, used: Any, *, fused: bool = False) -> None:
        self.accelerator, self.net = used, plain.Net()
        self.raw = plain.optimizer_of(self.net, fused=fused)
        scheduler = plain.scheduler_of(self.raw)
        self.model, self.optimizer, self.scheduler = used.prepare(self.net, self.raw, scheduler)
        self.skipped: list[int] = []

    def train(self, order: range = range(plain.BATCHES)) -> plain.Result:
        used = self.accelerator
        for index, batch in zip(order, plain.batches(order), strict=True):
            with used.accumulate(self.model):
                used.backward(plain.loss_of(self.model, batch))
                if used.sync_gradients:
                    used.clip_grad_norm_(self.model.parameters(), plain.CLIP)
                self.optimizer.step()
                if used.sync_gradients and used.optimizer_step_was_skipped:
                    self.skipped.append(index)
                self.scheduler.step()
                self.optimizer.zero_grad()
        return plain.result(self.net, used.scaler.state_dict() if used.scaler else {}, self.raw)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@plain.devices
def test_it_trains_as_the_plain_loop(device: str, accumulate: int, fused: bool) -> None:
    run = Run(accelerator(device=device, policy="cuda", gradient_accumulation_steps=accumulate), fused=fused)
    plain.assert_same(run.train(), plain.plain_loop(policy="cuda", accumulate=accumulate, fused=fused, device=device))


@pytest.mark.parametrize("fused", [False, True])
def test_it_tells_which_steps_were_skipped_because_of_what(fused: bool) -> None:
    run = Run(accelerator(), fused=fused)
    run.train(range(plain.OVERFLOWS[0] + 1))
    assert run.accelerator.optimizer_step_was_skipped
    assert run.accelerator.scaler.overflowed_parameters(run.net) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    run.train(range(plain.OVERFLOWS[0] + 1, plain.BATCHES))
    assert run.skipped == list(plain.OVERFLOWS)


def test_bfloat16_needs_no_scaler() -> None:
    run = Run(accelerator("bf16", policy="cuda"))
    run.train(range(2))
    assert run.accelerator.scaler is None
    assert run.net.dtypes == {"input": torch.float32, "linear": torch.bfloat16, "softmax": torch.float32}


def test_without_mixed_precision_it_is_accelerate() -> None:
    run = Run(accelerator(None))
    run.train(range(2))
    assert run.accelerator.scaler is None
    assert run.net.dtypes["linear"] == torch.float32
    with run.accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("policy", "softmax"), [(None, torch.float16), ("cuda", torch.float32)])
def test_the_policy_is_in_force_in_forward_and_blocks(policy: str | None, softmax: torch.dtype) -> None:
    run = Run(accelerator(policy=policy))
    assert run.model(torch.ones(1, 4)).dtype == torch.float32
    assert run.net.dtypes == {"input": torch.float32, "linear": torch.float16, "softmax": softmax}
    with run.accelerator.autocast():
        assert torch.softmax(torch.ones(2, 2) @ torch.ones(2, 2), -1).dtype == softmax
    with run.accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_the_launchers_precision_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    used = HalfserveAccelerator(cpu=True, policy="cuda", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    assert used.mixed_precision == "fp16"
    assert used.scaler is not None
    assert used.scaler.get_scale() == 8.0
    forget()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ValueError, match="a policy or scaler needs mixed_precision='fp16' or 'bf16', got 'no'"):
        HalfserveAccelerator(cpu=True, policy="cuda")


def test_unwrapping_gives_the_model_back_as_it_was() -> None:
    run = Run(accelerator(policy="cuda"))
    unwrapped = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    unwrapped(torch.ones(1, 4))
    assert unwrapped is run.net
    assert unwrapped.dtypes["linear"] == torch.float32


def test_preparing_twice_wraps_once() -> None:
    run = Run(accelerator(policy="cuda"))
    forward = run.model.forward
    again, optimizer = run.accelerator.prepare(run.model, run.optimizer)
    assert (again.forward, optimizer) == (forward, run.optimizer)


def test_a_forward_that_is_no_method_is_wrapped_too() -> None:
    net = nn.Linear(2, 2)
    net.forward = partial(nn.functional.linear, weight=net.weight)  # type: ignore[method-assign]
    seen = []
    net.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    model = accelerator().prepare(net)
    assert model.forward(torch.ones(1, 2)).dtype == torch.float32
    assert not seen
    assert not torch.equal(
        model(torch.tensor([[1.0001, 1.0001]])), nn.functional.linear(torch.tensor([[1.0001, 1.0001]]), net.weight)
    )


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    half = plain.BATCHES // 2
    first = Run(accelerator(policy="cuda"))
    first.train(range(half))
    first.accelerator.save_state(tmp_path)
    forget()
    scaler = GradScaler("cpu", init_scale=2.0**12, min_scale=2.0**9, max_scale=2.0**12)
    second = Run(accelerator(policy=Policy.cuda(), scaler=scaler))
    second.accelerator.load_state(tmp_path)
    plain.assert_same(second.train(range(half, plain.BATCHES)), plain.plain_loop(policy="cuda"))


def test_states_are_exchangeable_with_accelerates_own(tmp_path: Path) -> None:
    ours = Run(accelerator(policy="cuda"))
    ours.train(range(4))
    ours.accelerator.save_state(tmp_path / "ours")
    forget()
    theirs = Accelerator(mixed_precision="fp16", cpu=True)
    theirs.scaler = torch.amp.GradScaler("cpu")  # which accelerate makes on CUDA alone
    run = Run(theirs)
    theirs.load_state(tmp_path / "ours")
    assert theirs.scaler.state_dict() == ours.accelerator.scaler.state_dict()
    theirs.save_state(tmp_path / "theirs")
    forget()
    back = Run(accelerator())
    back.accelerator.load_state(tmp_path / "theirs")
    assert back.accelerator.scaler.state_dict() == ours.accelerator.scaler.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(back.net.parameters(), run.net.parameters(), strict=True))


def test_a_state_of_another_policy_is_named(tmp_path: Path) -> None:
    Run(accelerator(policy="cuda")).accelerator.save_state(tmp_path)
    forget()
    run = Run(accelerator(policy="cuda+fp32:linear"))
    with pytest.warns(UserWarning, match=r"trained with the policy 'cuda'; training goes on with 'cuda\+fp32:linear'"):
        run.accelerator.load_state(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"policy": 3}', '{"policy": "cudo"}', '{"other": "cuda"}'])
def test_a_damaged_policy_file_is_named_and_nothing_is_loaded(tmp_path: Path, content: str) -> None:
    run = Run(accelerator())
    run.train(range(1))
    run.accelerator.save_state(tmp_path)
    (tmp_path / "halfserve_policy.json").write_text(content)
    run.train(range(1, 2))
    before = run.accelerator.scaler.state_dict()
    with pytest.raises(ValueError, match=r"cannot read the policy in .*halfserve_policy.json; delete the file"):
        run.accelerator.load_state(tmp_path)
    assert run.accelerator.scaler.state_dict() == before


def test_of_two_optimizers_each_steps_with_its_own_gradients() -> None:
    """Clipping unscales all of them, and each step asks for an update."""
    torch.manual_seed(0)
    used = accelerator()
    nets = [nn.Linear(2, 1) for _ in range(2)]
    before = [net.weight.detach().clone() for net in nets]
    pairs = [used.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    for (model, _), factor in zip(pairs, (float("inf"), 1.0), strict=True):
        used.backward(model(torch.ones(1, 2)).sum() * factor)
    for model, optimizer in pairs:
        used.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
    assert torch.equal(nets[0].weight, before[0])
    torch.testing.assert_close(before[1] - nets[1].weight, torch.full((1, 2), 0.1))
    assert [optimizer.step_was_skipped for _, optimizer in pairs] == [True, False]
    assert used.scaler is not None
    assert used.scaler.get_scale() == 2.0**10


def test_lbfgs_steps_with_a_closure_that_leaves_backward_to_the_scaler() -> None:
    used, net = accelerator(), nn.Linear(1, 1)
    model, optimizer = used.prepare(net, torch.optim.LBFGS(net.parameters(), max_iter=5))
    x = torch.linspace(-1, 1, 8)[:, None]

    def loss() -> torch.Tensor:
        distance: torch.Tensor = model(x) - 2 * x
        return distance.square().mean()

    before = loss().item()
    for _ in range(5):
        optimizer.step(loss)
    assert loss().item() < 0.01 * before
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: used.backward(loss()))


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"mixed_precision": "fp8"}, ValueError, "mixed_precision must be 'fp16', 'bf16' or 'no', got 'fp8'"),
        ({"mixed_precision": "no", "policy": "cuda"}, ValueError, "a policy or scaler needs mixed_precision='fp16' or 'bf16'"),
        ({"mixed_precision": "bf16", "scaler": GradScaler("cpu")}, ValueError, "'bf16' needs no scaler"),
        ({"mixed_precision": "fp16", "scaler": torch.amp.GradScaler("cpu")}, TypeError, "must be an amp_core.GradScaler"),
        ({"mixed_precision": "fp16", "policy": "cudo"}, ValueError, "unknown policy 'cudo' .did you mean 'cuda'"),
        ({"mixed_precision": "fp16", "policy": 3}, ValueError, "policy must be a Policy or its string form, .* got 3"),
        (
            {"mixed_precision": "fp16", "scaler": GradScaler("cpu"), "kwargs_handlers": [GradScalerKwargs()]},
            ValueError,
            "both a scaler and GradScalerKwargs; choose one",
        ),
    ],
)
def test_wrong_settings_are_refused_and_settle_nothing(settings: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        HalfserveAccelerator(cpu=True, **settings)
    assert AcceleratorState._shared_state == {}
    assert accelerator().mixed_precision == "fp16"


@pytest.mark.parametrize("mixed_precision", ["fp16", "bf16"])
def test_a_model_sharded_over_processes_is_refused(monkeypatch: pytest.MonkeyPatch, mixed_precision: str) -> None:
    monkeypatch.setattr(HalfserveAccelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ValueError, match="trains on one device or with DDP, not with FSDP; use accelerate's own"):
        HalfserveAccelerator(mixed_precision=mixed_precision, cpu=True)
