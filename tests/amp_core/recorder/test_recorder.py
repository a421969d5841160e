"""Recorder: which steps it records, compiled models, states, and that it changes no number."""

from __future__ import annotations

import gc
import json
import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo.utils import counters
from torch._higher_order_ops import map as map_rows
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from halfserve import GradScaler, autocast
from halfserve.amp_core.recorder import Record, Recorder
from tests.amp_core.recorder.recording import Block, ops, the


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_it_records_step_1_and_every_nth_after_it() -> None:
    model = Block()
    recorder = Recorder(model, every=3)
    for step in range(1, 9):
        with recorder.step(step):
            assert bool(hooks_of(model)) == (step in {1, 4, 7})
            assert bool(_get_current_dispatch_mode_stack()) == (step in {1, 4, 7})
            model(torch.ones(2, 4)).sum().backward()
    assert recorder.record().steps == 3
    assert the(recorder.record(), "tanh").calls == 3


@pytest.mark.parametrize(
    ("every", "step", "scale", "message"),
    [
        *((every, 1, 1.0, f"every is {every}; expected a number of steps from 1") for every in (0, -5)),
        (1, 0, 1.0, "step is 0; expected the number of a step, counted from 1"),
        *((1, 2, scale, "the loss is multiplied with: a positive finite number") for scale in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_numbers_that_are_no_step_or_scale_are_refused(every: int, step: int, scale: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recorder(Block(), every=every).step(step, scale=scale)


def test_steps_do_not_nest() -> None:
    recorder = Recorder(Block(), every=1)
    with recorder.step(1):
        inner = recorder.step(2)
        with pytest.raises(RuntimeError, match="recording a step already; leave its"):
            inner.__enter__()
    with recorder.step(2):
        pass
    assert recorder.record().steps == 2


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    model = Block()
    recorder = Recorder(model, every=1)

    def fail() -> None:
        with recorder.step(1):
            model(torch.ones(2, 4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert hooks_of(model) == 0
    assert not _get_current_dispatch_mode_stack()
    with recorder.step(2):
        model(torch.ones(2, 4))
    assert the(recorder.record(), "tanh").calls == 2


def test_gradients_are_given_with_the_scale_and_without() -> None:
    model = nn.Linear(1, 1, bias=False)
    recorder = Recorder(model, every=1)
    for step, scale in ((1, 1024.0), (2, 4.0)):
        with recorder.step(step, scale=scale):
            (model(torch.ones(1, 1)).sum() * scale).backward()
    found = the(recorder.record(), "mm", direction="backward")
    assert (found.magnitudes.smallest, found.magnitudes.largest) == (4.0, 1024.0)
    assert (found.unscaled_smallest, found.unscaled_largest) == (1.0, 1.0)
    assert found.calls == 2


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, attention and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.teacher = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(requires_grad=False)
        self.block, self.head = Block(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 1, 6, 6) in, (batch, 3) out."""
        x = functional.relu(self.norm(self.convolution(x)), inplace=True).flatten(2).transpose(1, 2)
        x = self.attention(x)
        with torch.no_grad():
            taught = self.teacher(x)
        x = checkpoint(self.block, x, use_reentrant=False) + 0.1 * taught
        return self.head(functional.dropout(x.mean(1), 0.1))  # type: ignore[no-any-return]


REGIONS: dict[str, Any] = {
    "float32": nullcontext,
    "torch bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: autocast("cpu", torch.float16),
    "cuda policy": lambda: autocast("cpu", torch.float16, policy="cuda"),
    "odd policy": lambda: autocast("cpu", torch.bfloat16, policy="native+fp32:addmm,abs,where,amin+low:add,mul"),
}


def trained(region: Any, every: int | None) -> tuple[list[float], dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=128.0)
    recorder = Recorder(model, every=every) if every else None
    losses = []
    for step in range(1, 5):
        recording: AbstractContextManager[None] = nullcontext()
        if recorder:
            recording = recorder.step(step, scale=scaler.get_scale())
        with recording:
            with region():
                loss = functional.cross_entropy(model(torch.randn(4, 1, 6, 6)), torch.tensor([0, 1, 2, 0]))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    if recorder:
        assert len(recorder.record().entries) > 50
    return losses, model.state_dict(), torch.get_rng_state()


@pytest.mark.parametrize("region", REGIONS)
def test_no_bit_of_a_training_changes(region: str) -> None:
    plain, recorded = trained(REGIONS[region], None), trained(REGIONS[region], 2)
    assert plain[0] == recorded[0]
    assert all(torch.equal(tensor, recorded[1][name]) for name, tensor in plain[1].items())
    assert torch.equal(plain[2], recorded[2])


def test_no_tensor_is_kept_alive() -> None:
    model = Block()
    recorder = Recorder(model)
    kept: list[weakref.ref[Tensor]] = []
    with recorder.step(1):
        x = model(torch.ones(2, 4))
        kept.append(weakref.ref(x))
        del x
        gc.collect()
        assert kept[0]() is None


def test_it_goes_on_from_an_earlier_record() -> None:
    model = Block().requires_grad_(requires_grad=False)  # else the next run would find gradients to add to

    def run(recorder: Recorder, steps: range) -> None:
        for step in steps:
            with recorder.step(step, scale=float(step)):
                (model(torch.full((2, 4), float(step), requires_grad=True)).sum() * step).backward()

    whole, first, second = (Recorder(model, every=2) for _ in range(3))
    run(whole, range(1, 9))
    run(first, range(1, 4))
    second.load_dict(json.loads(json.dumps(first.to_dict())))
    run(second, range(4, 9))
    assert json.dumps(second.to_dict()) == json.dumps(whole.to_dict())
    assert second.to_dict() == second.to_dict()


def test_the_scalers_own_scale_is_none_of_the_models_numbers() -> None:
    model, scaler = nn.Linear(3, 1), GradScaler("cpu", init_scale=2.0**17)
    recorder = Recorder(model)
    with recorder.step(1, scale=scaler.get_scale()):
        scaler.scale(model(torch.rand(2, 3)).mean()).backward()  # the first loss, for which the scale becomes a tensor
    assert "aten.mul.Tensor" in {entry.op for entry in recorder.record().entries}
    assert "aten.full.default" not in {entry.op for entry in recorder.record().entries}


def test_what_is_no_record_changes_nothing() -> None:
    recorder = Recorder(Block())
    with recorder.step(1):
        torch.ones(2).exp()
    before = recorder.to_dict()
    with pytest.raises(ValueError, match="not a record: expected a dict whose 'format' is 'halfserve.record'"):
        recorder.load_dict({"entries": []})
    assert recorder.to_dict() == before
    assert Record.from_dict(before) == recorder.record()


def test_two_recorders_at_once() -> None:
    model = Block()
    one, two = Recorder(model), Recorder(model.linear)
    with one.step(1), two.step(1):
        model(torch.ones(2, 4)).sum().backward()
    assert the(one.record(), "addmm").module == "linear"
    assert the(two.record(), "addmm").module == "."
    assert the(two.record(), "tanh").module == ""


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_count_as_their_parent() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.append(torch.jit.script(nn.Linear(4, 4)))
    recorder = Recorder(model)
    with recorder.step(1):
        model(torch.ones(2, 4)).sum().backward()
    assert {entry.module for entry in recorder.record().entries if entry.op == "aten.addmm.default"} == {"0", "."}


def test_the_model_within_ddp() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(Block(), nn.Linear(4, 2))
        parallel = nn.parallel.DistributedDataParallel(model)
        recorder = Recorder(model)
        with recorder.step(1):
            parallel(torch.ones(2, 4)).sum().backward()
        # The group must not end with it: torch would wait for the group's threads with Python's lock in its hand.
        del parallel
    finally:
        torch.distributed.destroy_process_group()
    record = recorder.record()
    assert the(record, "tanh_backward").module == "0"
    assert the(record, "addmm", module="0.linear").calls == 1
    assert all(entry.op.startswith("aten.") for entry in record.entries)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reentrant", [True, False])
def test_on_cuda_backward_is_put_down_to_its_modules(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block(), Block()).cuda()
    recorder = Recorder(model, every=1)
    for step in (1, 2):
        with recorder.step(step), autocast("cuda"):
            x = checkpoint(model[1], model[0](torch.ones(2, 4, device="cuda")), use_reentrant=reentrant)
            model[2](x).sum().backward()
    found = {entry.module: entry for entry in recorder.record().entries if entry.op == "aten.tanh_backward.default"}
    assert set(found) == {"1", "2"}
    assert {entry.dtype for entry in found.values()} == {"float16"}
    assert all(entry.calls == 2 for entry in found.values())


X = torch.ones(2, 4)


@pytest.fixture
def _nothing_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.usefixtures("_nothing_compiled")
def test_a_recorded_step_looks_into_it_and_leaves_it_compiled(warm: bool) -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 1))
    forward = compiled(lambda x: model(x).sum())
    if warm:
        forward(X).backward()  # type: ignore[no-untyped-call]
    recorder = Recorder(model)
    with recorder.step(1):
        forward(X).backward()  # type: ignore[no-untyped-call]
    assert ops(recorder.record(), "0", "forward") == ["tanh", "add"]
    assert ops(recorder.record(), "0", "backward") == ["tanh_backward"]
    assert counters["stats"]["unique_graphs"] == int(warm)
    for step in (2, 3):
        with recorder.step(step):
            forward(X).backward()  # type: ignore[no-untyped-call]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("_nothing_compiled")
def test_a_compiled_model_is_warned_of_once_and_has_its_own_paths() -> None:
    model = torch.compile(nn.Sequential(Block(), nn.Linear(4, 1)), backend="aot_eager")
    recorder = Recorder(model, every=1)  # type: ignore[arg-type]
    with (
        pytest.warns(UserWarning, match="compiled code cannot be looked into: recorded steps run it uncompiled"),
        recorder.step(1),
    ):
        model(X).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with recorder.step(2):
            model(X).sum().backward()
    assert {entry.module for entry in recorder.record().entries} == {"", "0", "0.linear", "1"}


@pytest.mark.usefixtures("_nothing_compiled")
def test_a_part_that_is_compiled_keeps_its_path() -> None:
    block: Any = torch.compile(Block(), backend="aot_eager")
    model = nn.Sequential(block, nn.Linear(4, 1))
    recorder = Recorder(model)
    with pytest.warns(UserWarning, match="the model is compiled"), recorder.step(1):
        model(X).sum().backward()
    assert {entry.module for entry in recorder.record().entries} == {"", "0", "0.linear", "1"}


class TakesFunctions(nn.Module):
    """Uses weights in functions that torch captures by itself, whether anything is compiled or not."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.operation = nn.Linear(4, 4), nn.Linear(4, 4), operation

    def forward(self, x: Tensor) -> Tensor:
        if self.operation == "cond":
            taken = torch.cond(x.sum() > 0, self.inner, lambda x: 2 * self.inner(x), (x,))
        else:
            taken = map_rows(lambda row, *_: 2 * self.inner(row), x)
        total: Tensor = (taken + self.outer(x)).square().sum()
        return total


@pytest.mark.parametrize("operation", ["cond", "map"])
@pytest.mark.usefixtures("_nothing_compiled")
def test_weights_in_functions_that_operations_take_keep_their_gradients(operation: str) -> None:
    gradients = []
    for turn in (1, 2):  # only the first is recorded
        torch._dynamo.reset()
        model = TakesFunctions(operation)
        recorder = Recorder(model, every=2)
        with recorder.step(turn):
            model(X).backward()
        assert model.inner.weight.grad is not None
        gradients.append(model.inner.weight.grad)
        assert {entry.module for entry in recorder.record().entries} >= ({"outer"} if turn == 1 else set())
    assert torch.equal(*gradients)
