"""FabricPrecision, and the settings that both Lightning plugins check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

from halfserve import GradScaler, Policy
from halfserve.amp_core.integrations.lightning import FabricPrecision, TrainerPrecision
from tests.amp_core.integrations import plain

pytestmark = plain.LIGHTNING
plain.silence_loggers()


def plugin_for_test(device: str = "cpu", **settings: Any) -> FabricPrecision:
    return FabricPrecision("16-mixed", device=device, scaler=plain.scaler_for_test(device), **settings)


class Run:
    """A training under Fabric that can be saved and loaded between batches."""

    def __init__(self, plugin: Any, *, fused: bool = False, device: str = "cpu") -> None:
        self.plugin, self.net = plugin, plain.Net()
        self.fabric = Fabric(accelerator=device, devices=1, plugins=[plugin])
        self.raw = plain.optimizer_of(self.net, fused=fused)
        self.scheduler = plain.scheduler_of(self.raw)
        self.model, self.optimizer = self.fabric.setup(self.net, self.raw)

    def train(
        self, order: range = range(plain.BATCHES), *, accumulate: int = 1, clip_value: float | None = None
    ) -> plain.Result:
        for index, batch in zip(order, plain.batches(order), strict=True):
            self.fabric.backward(plain.loss_of(self.model, batch) / accumulate)
            if (index + 1) % accumulate:
                continue
            if clip_value is not None:
                self.fabric.clip_gradients(self.model, self.optimizer, clip_val=clip_value)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=plain.CLIP, error_if_nonfinite=False)
            self.optimizer.step()
            if not (self.plugin.scaler and self.plugin.scaler.step_was_skipped):
                self.scheduler.step()
            self.optimizer.zero_grad()
        return plain.result(self.net, self.plugin.state_dict(), self.raw)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "precision": self.plugin}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@plain.devices
def test_it_trains_as_the_plain_loop(device: str, accumulate: int, fused: bool) -> None:
    run = Run(plugin_for_test(device, policy="cuda"), fused=fused, device=device)
    plain.assert_same(
        run.train(accumulate=accumulate), plain.plain_loop(policy="cuda", accumulate=accumulate, fused=fused, device=device)
    )


def test_gradients_may_be_clipped_twice() -> None:
    # By value first, at one that no gradient reaches but the infinite ones.
    plain.assert_same(Run(plugin_for_test()).train(clip_value=1e6), plain.plain_loop())


def test_bfloat16_needs_no_scaler() -> None:
    run = Run(FabricPrecision("bf16-mixed", device="cpu", policy="cuda"))
    run.train(range(2))
    assert run.plugin.scaler is None
    assert run.net.dtypes == {"input": torch.float32, "linear": torch.bfloat16, "softmax": torch.float32}
    assert run.plugin.state_dict() == {"policy": "cuda"}


@pytest.mark.parametrize(("policy", "softmax"), [(None, torch.float16), ("cuda", torch.float32)])
def test_the_policy_is_in_force_in_forward_and_blocks(policy: str | None, softmax: torch.dtype) -> None:
    run = Run(plugin_for_test(policy=policy))
    output = run.model(torch.ones(1, 4))
    assert run.net.dtypes == {"input": torch.float32, "linear": torch.float16, "softmax": softmax}
    assert output.dtype == torch.float32
    with run.fabric.autocast():
        assert torch.softmax(torch.ones(2, 2) @ torch.ones(2, 2), -1).dtype == softmax
    assert not torch.is_autocast_enabled("cpu")


def test_inputs_beyond_halfs_range_reach_the_model() -> None:
    class Logarithm(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"low": torch.log(x).half(), "rest": [x.double(), x.long()]}

    output = Run(plugin_for_test()).fabric.setup(Logarithm())(torch.tensor([1e6]))
    assert [x.dtype for x in (output["low"], *output["rest"])] == [torch.float32, torch.float64, torch.int64]
    torch.testing.assert_close(output["low"], torch.tensor([13.8155]), rtol=1e-3, atol=0)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    half = plain.BATCHES // 2
    first = Run(plugin_for_test(policy="cuda"))
    first.train(range(half))
    first.fabric.save(tmp_path / "half.ckpt", first.state())
    scaler = GradScaler("cpu", init_scale=2.0**12, min_scale=2.0**9, max_scale=2.0**12)
    second = Run(FabricPrecision("16-mixed", device="cpu", scaler=scaler))
    second.fabric.load(tmp_path / "half.ckpt", second.state())
    assert second.plugin.policy == Policy.cuda()
    plain.assert_same(second.train(range(half, plain.BATCHES)), plain.plain_loop(policy="cuda"))


@pytest.mark.parametrize("ours_first", [True, False])
def test_states_are_exchangeable_with_lightnings_own_plugin(ours_first: bool) -> None:
    ours, theirs = (
        plugin_for_test(policy="cuda"),
        MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10)),
    )
    writer, reader = (ours, theirs) if ours_first else (theirs, ours)
    reader.load_state_dict(writer.state_dict())
    assert theirs.state_dict() == {key: value for key, value in ours.state_dict().items() if key != "policy"}
    assert ours.policy == Policy.cuda()


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ({"scale": 4.0}, RuntimeError, "The source state dict lacks _growth_tracker, backoff_factor, growth_factor"),
        ({"policy": "cudo"}, ValueError, "unknown policy 'cudo'"),
    ],
)
def test_a_broken_state_changes_nothing(state: Any, error: type[Exception], text: str) -> None:
    plugin = plugin_for_test()
    before = plugin.state_dict()
    with pytest.raises(error, match=text):
        plugin.load_state_dict(before | state if "policy" in state else state)
    assert plugin.state_dict() == before


def test_of_two_optimizers_each_steps_with_its_own_gradients() -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(2, 1) for _ in range(2)]
    plugin = plugin_for_test()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    before = [net.weight.detach().clone() for net in nets]
    pairs = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    for (model, _), factor in zip(pairs, (float("inf"), 1.0), strict=True):
        fabric.backward(model(torch.ones(1, 2)).sum() * factor)
    for _, optimizer in pairs:
        optimizer.step()
    assert torch.equal(nets[0].weight, before[0])
    torch.testing.assert_close(before[1] - nets[1].weight, torch.full((1, 2), 0.1))
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**10


def test_a_closure_is_refused() -> None:
    run = Run(plugin_for_test())
    with pytest.raises(
        TypeError, match=r"a closure, which LBFGS needs, .* or call fabric.backward\(loss\) before a step without"
    ):
        run.optimizer.step(lambda: torch.zeros(()))
    newton: Any = run.fabric.setup_optimizers(torch.optim.LBFGS(run.net.parameters()))
    with pytest.raises(TypeError, match=r"use FabricPrecision\('bf16-mixed'\)"):
        newton.step(lambda: torch.zeros(()))


def test_a_loss_on_another_device_is_refused() -> None:
    run = Run(FabricPrecision("bf16-mixed", device="mps"))
    with pytest.raises(ValueError, match="the loss is on cpu, but the precision plugin is for mps, so nothing was cast"):
        run.fabric.backward(torch.ones((), requires_grad=True))


def test_precision_twice_and_the_trainers_plugin_are_refused() -> None:
    with pytest.raises(ValueError, match="Received both `precision=16-mixed` and `plugins="):
        Fabric(accelerator="cpu", precision="16-mixed", plugins=[plugin_for_test()])
    run = Fabric(accelerator="cpu", devices=1, plugins=[TrainerPrecision("16-mixed", device="cpu")])
    with pytest.raises(Exception, match="TrainerPrecision is for lightning's Trainer; give Fabric a FabricPrecision"):
        run.backward(torch.ones((), requires_grad=True))


@pytest.mark.parametrize("plugin", [TrainerPrecision, FabricPrecision])
@pytest.mark.parametrize(
    ("precision", "settings", "error", "text"),
    [
        ("fp16", {}, ValueError, "precision must be '16-mixed' or 'bf16-mixed', got 'fp16'"),
        ("bf16-mixed", {"scaler": GradScaler("cpu")}, ValueError, "'bf16-mixed' needs no scaler: bfloat16 has float32's range"),
        (
            "16-mixed",
            {"scaler": torch.amp.GradScaler("cpu")},
            TypeError,
            "must be an amp_core.GradScaler, got a torch.amp.grad_scaler",
        ),
        ("16-mixed", {"policy": "cudo"}, ValueError, "unknown policy 'cudo' .did you mean 'cuda'"),
        ("16-mixed", {"policy": 3}, ValueError, "policy must be a Policy or its string form, .* got 3"),
        ("16-mixed", {"device": "cuda:0"}, ValueError, "device_type must be the name of a kind of device"),
    ],
)
def test_wrong_settings_are_refused(plugin: Any, precision: str, settings: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plugin(precision, **settings)
