"""Lightning's Trainer with our plugin trains bit for bit as the plain loop does, resumes, and exchanges checkpoints."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from halfserve import GradScaler, Policy
from halfserve.amp_core.integrations.lightning import FabricPrecision, TrainerPrecision
from tests.amp_core.integrations import plain

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = plain.LIGHTNING
plain.silence_loggers()


class Task(pl.LightningModule):
    """The plain loop's task, with what can be seen after each batch."""

    def __init__(self, *, fused: bool = False, interval: str = "step") -> None:
        super().__init__()
        self.net = plain.Net()
        self.fused, self.interval = fused, interval
        self.skipped: list[int] = []
        self.overflowed: list[list[str]] = []
        self.norms: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return plain.loss_of(self.net, batch)

    def on_before_optimizer_step(self, _: Any) -> None:
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])))

    def on_train_batch_end(self, _: Any, __: Any, batch_idx: int) -> None:
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, TrainerPrecision) and plugin.scaler is not None and plugin.scaler.step_was_skipped:
            self.skipped.append(batch_idx)
            self.overflowed.append(plugin.scaler.overflowed_parameters(self.net))

    def configure_optimizers(self) -> Any:
        optimizer = plain.optimizer_of(self.net, fused=self.fused)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plain.scheduler_of(optimizer), "interval": self.interval}}


def trainer(plugin: Any, **settings: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "gradient_clip_val": plain.CLIP,
        "logger": False,
        "use_distributed_sampler": False,
    }
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(plugins=[plugin], **(defaults | quiet | settings))


def plugin_for_test(device: str = "cpu", **settings: Any) -> TrainerPrecision:
    return TrainerPrecision("16-mixed", device=device, scaler=plain.scaler_for_test(device), **settings)


def outcome(task: Task, used: pl.Trainer) -> plain.Result:
    return plain.result(task.net, used.precision_plugin.state_dict(), used.optimizers[0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@plain.devices
def test_it_trains_as_the_plain_loop(device: str, accumulate: int, fused: bool) -> None:
    task, plugin = Task(fused=fused), plugin_for_test(device, policy="cuda")
    used = trainer(plugin, accelerator=device, devices=1, accumulate_grad_batches=accumulate)
    used.fit(task, plain.batches())
    plain.assert_same(outcome(task, used), plain.plain_loop(policy="cuda", accumulate=accumulate, fused=fused, device=device))
    # Lightning counts attempts, whatever becomes of them.
    assert used.global_step == plain.BATCHES // accumulate


def test_it_tells_which_steps_were_skipped_because_of_what() -> None:
    task = Task()
    trainer(plugin_for_test()).fit(task, plain.batches())
    assert task.skipped == list(plain.OVERFLOWS)
    assert task.overflowed == [["first.weight", "first.bias", "last.weight", "last.bias"]] * len(plain.OVERFLOWS)


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_before_the_step_see_unscaled_gradients(fused: bool) -> None:
    task = Task(fused=fused)
    trainer(plugin_for_test()).fit(task, plain.batches())
    assert all(norm < 10.0 for index, norm in enumerate(task.norms) if index not in plain.OVERFLOWS)


def test_bfloat16_needs_no_scaler() -> None:
    plugin = TrainerPrecision("bf16-mixed", device="cpu", policy="cuda")
    task, used = Task(), trainer(plugin, limit_train_batches=plain.OVERFLOWS[0])
    used.fit(task, plain.batches())
    assert plugin.scaler is None
    assert task.net.dtypes["linear"] == torch.bfloat16
    state = used.precision_plugin.state_dict()
    assert state.keys() == {"policy", "record"}
    assert state["policy"] == "cuda"


@pytest.mark.parametrize(
    ("policy", "softmax"), [(None, torch.float16), ("cuda", torch.float32), ("native+fp32:linear", torch.float32)]
)
def test_the_policy_is_in_force_in_training_and_validation(policy: str | None, softmax: torch.dtype) -> None:
    class Validated(Task):
        def validation_step(self, batch: Any, _: int) -> None:
            plain.loss_of(self.net, batch)

    task = Validated()
    used = trainer(plugin_for_test(policy=policy), limit_val_batches=1)
    used.fit(task, plain.batches(), plain.batches())
    trained = dict(task.net.dtypes)
    used.validate(task, plain.batches(), verbose=False)
    assert trained == task.net.dtypes
    assert trained["softmax"] == softmax
    assert not torch.is_autocast_enabled("cpu")


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    half = plain.BATCHES // 2
    first = trainer(plugin_for_test(policy="cuda"), max_steps=half)
    first.fit(Task(), plain.batches())
    first.save_checkpoint(tmp_path / "half.ckpt")
    # Another scale at first and no policy: both come from the checkpoint.
    plugin = TrainerPrecision(
        "16-mixed", device="cpu", scaler=GradScaler("cpu", min_scale=2.0**10, max_scale=2.0**12, init_scale=2.0**12)
    )
    task, second = Task(), trainer(plugin, max_epochs=2)
    second.fit(task, plain.batches(range(half, plain.BATCHES)), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert plugin.policy == Policy.cuda()
    plain.assert_same(outcome(task, second), plain.plain_loop(policy="cuda"))


def test_a_given_policy_stays_and_the_other_is_named(tmp_path: Path) -> None:
    first = trainer(plugin_for_test(policy="cuda"), max_steps=2)
    first.fit(Task(), plain.batches())
    first.save_checkpoint(tmp_path / "some.ckpt")
    second = trainer(plugin_for_test(policy="cuda+fp32:linear"), max_steps=2)
    with pytest.warns(
        UserWarning, match=r"trained with the policy 'cuda'; training goes on with 'cuda\+fp32:linear', as given"
    ):
        second.fit(Task(), plain.batches(), ckpt_path=tmp_path / "some.ckpt", weights_only=True)


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_are_exchangeable_with_lightnings_own_plugin(tmp_path: Path, ours_first: bool) -> None:
    def lightnings() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=2))

    def ours() -> TrainerPrecision:
        return TrainerPrecision("16-mixed", device="cpu", scaler=GradScaler("cpu"))

    writer, reader = (ours(), lightnings()) if ours_first else (lightnings(), ours())
    used = trainer(writer, limit_train_batches=3)
    used.fit(Task(), plain.batches())
    used.save_checkpoint(tmp_path / "some.ckpt")
    trainer(reader, max_epochs=1).fit(Task(), plain.batches(), ckpt_path=tmp_path / "some.ckpt", weights_only=True)
    expected = writer.state_dict()
    scaling = {key: value for key, value in expected.items() if key not in {"policy", "record"}}
    assert {key: reader.state_dict()[key] for key in scaling} == scaling


def test_a_bfloat16_checkpoint_leaves_the_scaler_as_it_is() -> None:
    plugin = plugin_for_test()
    before = plugin.state_dict()
    plugin.load_state_dict(TrainerPrecision("bf16-mixed", device="cpu").state_dict())
    assert plugin.state_dict() == before


def test_a_scheduler_per_epoch_steps_whatever_the_last_batch_did() -> None:
    task, used = Task(interval="epoch"), trainer(plugin_for_test(), limit_train_batches=plain.OVERFLOWS[0] + 1, max_epochs=2)
    used.fit(task, plain.batches())
    assert task.skipped == [plain.OVERFLOWS[0]] * 2
    assert used.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**2)


def test_a_scheduler_waits_for_the_first_step_that_is_not_skipped() -> None:
    order = [plain.OVERFLOWS[0], plain.OVERFLOWS[1], 0]
    with pytest.warns(UserWarning, match=r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        trainer(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))).fit(Task(), plain.batches(order))
    used = trainer(plugin_for_test())
    used.fit(Task(), plain.batches(order))
    assert used.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9)


def test_a_scheduler_still_passes_for_what_it_is() -> None:
    task, used = Task(), trainer(plugin_for_test(), max_steps=1)
    used.fit(task, plain.batches())
    scheduler = task.lr_schedulers()
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert (scheduler.step_size, scheduler.state_dict()["last_epoch"]) == (1, 1)
    assert copy.deepcopy(scheduler).state_dict()["last_epoch"] == 1


class TwoOptimizers(pl.LightningModule):
    """Both backward passes before both steps; the first net's loss overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> None:
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        for net, factor in zip((self.first, self.second), (float("inf"), 1.0), strict=True):
            self.manual_backward(net(batch).sum() * factor)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.first, self.second)]


def test_of_two_optimizers_each_steps_with_its_own_gradients() -> None:
    task, plugin = TwoOptimizers(), plugin_for_test()
    before = copy.deepcopy(task.state_dict())
    ones: Any = torch.utils.data.DataLoader([torch.ones(2)], batch_size=1)  # type: ignore[arg-type]  # a list will do
    trainer(plugin, gradient_clip_val=None).fit(task, ones)
    assert torch.equal(task.first.weight, before["first.weight"])
    torch.testing.assert_close(before["second.weight"] - task.second.weight, torch.full((1, 2), 0.1))
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**10


def test_training_stops_when_no_scale_can_help() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**12, min_scale=2.0**12, on_min_scale="stop")
    used = trainer(TrainerPrecision("16-mixed", device="cpu", scaler=scaler))
    used.fit(Task(), plain.batches())
    assert used.global_step == plain.OVERFLOWS[0] + 1


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")  # asks whether that is on purpose: it is
def test_a_step_that_returns_nothing_is_no_step() -> None:
    class Idle(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    task, plugin = Idle(), plugin_for_test()
    trainer(plugin, limit_train_batches=3).fit(task, plain.batches())
    assert plugin.state_dict()["_growth_tracker"] == 0
    assert plugin.state_dict()["scale"] == 2.0**12


def test_lbfgs_is_refused_before_training() -> None:
    class Newton(Task):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.net.parameters())

    with pytest.raises(
        MisconfigurationException, match=r"LBFGS evaluates its loss several times .* use TrainerPrecision\('bf16-mixed'\)"
    ):
        trainer(plugin_for_test(), gradient_clip_val=None).fit(Newton(), plain.batches())
    trainer(TrainerPrecision("bf16-mixed", device="cpu"), max_steps=1).fit(Newton(), plain.batches())


def test_a_loss_on_another_device_is_refused() -> None:
    plugin = TrainerPrecision("bf16-mixed", device="meta") if torch.amp.is_autocast_available("meta") else None
    plugin = plugin or TrainerPrecision("bf16-mixed", device="mps")
    with pytest.raises(
        ValueError,
        match=r"the loss is on cpu, but the precision plugin is for \w+, so nothing was cast; make the plugin with device='cpu",
    ):
        trainer(plugin, max_steps=1).fit(Task(), plain.batches())


def test_lightning_refuses_precision_twice_and_the_wrong_plugin() -> None:
    with pytest.raises(ValueError, match=r"Received both `precision=16-mixed` and `plugins=.*TrainerPrecision.*Choose one"):
        trainer(plugin_for_test(), precision="16-mixed")
    with pytest.raises(MisconfigurationException, match="Found invalid type for plugin .*FabricPrecision"):
        trainer(FabricPrecision("16-mixed", device="cpu"))
