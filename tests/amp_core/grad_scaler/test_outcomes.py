"""The history of the scale, overflows at the smallest scale, and flags reduced over ranks."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from halfserve import GradScaler
from halfserve.amp_core.grad_scaler.optimizers import FOUND
from halfserve.amp_core.grad_scaler.outcomes import ScaleHistory, ScaleRecord, StepOutcomes
from tests.amp_core.grad_scaler.iteration import backward, iterate, model_and_optimizer, parameter_with, ready, train_step


@pytest.mark.parametrize("fused", [False, True])
def test_it_tells_scale_and_skips_with_names(fused: bool) -> None:
    model, optimizer = model_and_optimizer(fused=fused, named=True)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for overflow_in in (None, "1.bias", None):
        train_step(scaler, model, optimizer, overflow_in)
    assert scaler.history == [
        ScaleRecord(step=1, scale=8.0, skipped=False),
        ScaleRecord(step=2, scale=16.0, skipped=True, overflowed=("1.bias",)),
        ScaleRecord(step=3, scale=8.0, skipped=False),
    ]


def test_setting_the_scale_is_an_iteration_too() -> None:
    _, optimizer = parameter_with([math.inf])
    scaler = ready(init_scale=8.0)
    scaler.step(optimizer)
    scaler.update(4.0)
    scaler.update(2.0)
    assert [(record.scale, record.skipped) for record in scaler.history] == [(8.0, True), (4.0, False)]


@pytest.mark.parametrize(("size", "kept"), [(0, []), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_it_keeps_the_last_iterations(size: int, kept: list[int]) -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(history_size=size)
    for _ in range(5):
        iterate(scaler, optimizer, parameter, 1.0)
    assert [record.step for record in scaler.history] == kept


def test_what_only_the_device_knows_is_read_when_asked_for() -> None:
    # Tensors in place of numbers, as a fused optimizer on an accelerator leaves them.
    history, _, optimizer = ScaleHistory(4), *parameter_with([1.0])

    class OnDevice(StepOutcomes):
        pass

    for found in (1.0, 0.0):
        outcomes = OnDevice()
        outcome = outcomes.note(optimizer, {FOUND: {}}, look_now=False)
        outcome.state[FOUND] = {torch.device("meta"): torch.zeros((), device="meta")}
        history.add(torch.tensor(4.0), outcomes.of_this_iteration(), torch.tensor(found))
    assert history.records() == [ScaleRecord(step=1, scale=4.0, skipped=True), ScaleRecord(step=2, scale=4.0, skipped=False)]
    assert history.records() == history.records()


MESSAGE = (
    "The gradients of group 0, parameter 0 are not finite even at the smallest scale, 4: no scale can help. "
    "Look for NaN in the data and the loss; try bfloat16, a lower learning rate, "
    "or an autocast policy that keeps the overflowing operations in float32"
)
EXACTLY = f"^{re.escape(MESSAGE)}$"
SMALL: dict[str, Any] = {"init_scale": 8.0, "min_scale": 4.0, "growth_interval": 1}


@pytest.mark.parametrize("fused", [False, True])
def test_it_warns_once_until_the_scale_has_grown_again(fused: bool) -> None:
    parameter, optimizer = parameter_with([0.0], fused=fused)
    scaler = ready(**SMALL)
    iterate(scaler, optimizer, parameter, math.inf)  # from 8 to 4
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=EXACTLY):
            iterate(scaler, optimizer, parameter, math.inf)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            iterate(scaler, optimizer, parameter, math.inf)
            iterate(scaler, optimizer, parameter, 1.0)  # from 4 to 8
            iterate(scaler, optimizer, parameter, math.inf)
    assert not scaler.should_stop


def test_the_warning_points_at_the_users_line() -> None:
    _, optimizer = parameter_with([math.inf])
    scaler = ready(init_scale=4.0, min_scale=4.0)
    scaler.step(optimizer)
    with pytest.warns(RuntimeWarning) as told:
        scaler.update()
    assert told[0].filename == __file__


def test_it_raises_with_the_iteration_ended() -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(**SMALL | {"init_scale": 4.0}, on_min_scale="raise")
    with pytest.raises(FloatingPointError, match=EXACTLY):
        iterate(scaler, optimizer, parameter, math.nan)
    assert scaler.step_was_skipped
    assert scaler.get_scale() == 4.0
    iterate(scaler, optimizer, parameter, 1.0)
    assert (scaler.step_was_skipped, scaler.get_scale()) == (False, 8.0)


def test_it_sets_a_flag_that_stays() -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(**SMALL, on_min_scale="stop")
    seen = []
    for gradient in (math.inf, math.inf, 1.0):
        iterate(scaler, optimizer, parameter, gradient)
        seen.append(scaler.should_stop)
    assert seen == [False, True, True]


def test_the_parameters_of_every_optimizer_are_named() -> None:
    scaler = ready(init_scale=1.0, min_scale=1.0, on_min_scale="raise")
    for overflow_in in ("1.weight", None, "0.bias"):
        model, optimizer = model_and_optimizer(named=True)
        backward(scaler, model, overflow_in=overflow_in)
        scaler.step(optimizer)
    with pytest.raises(FloatingPointError, match=r"The gradients of 1\.weight, 0\.bias are not finite"):
        scaler.update()


def test_many_parameters_are_counted_not_listed() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), math.nan)
    scaler = ready(init_scale=1.0, min_scale=1.0, on_min_scale="raise")
    scaler.step(torch.optim.SGD([(f"p{i}", p) for i, p in enumerate(parameters)], lr=1.0))
    with pytest.raises(FloatingPointError, match="The gradients of p0, p1, p2 and 2 more are not finite"):
        scaler.update()


OVERFLOWS = {0: [False, True, False, False], 1: [False, False, False, True]}


def reduce_by_maximum(found: Tensor) -> None:
    distributed.all_reduce(found, distributed.ReduceOp.MAX)


MODES = {"reduced": (True, True), "reduced, a rank without gradients": (True, False), "not reduced": (False, True)}


def guarded_step_in_shards(rank: int) -> list[Any]:
    """Half of the weight is rank 1's, and only that half would become infinite."""
    layer: Any = nn.Linear(2, 2, bias=False)
    fully_shard(layer)
    optimizer = torch.optim.SGD(layer.named_parameters(), lr=1e38)
    scaler = ready(guard_parameters=True)
    layer(torch.ones(1, 2)).sum().backward()
    layer.weight.grad.to_local().fill_(2.0**20 * rank)
    with pytest.warns(RuntimeWarning, match="made weight non-finite"):
        scaler.step(optimizer)
    scaler.update()
    return [scaler.step_was_skipped, scaler.overflowed_parameters()]


def rank_main(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    seen: dict[str, list[Any]] = {}
    for mode, (reduce, both_have_gradients) in MODES.items():
        seen[mode] = []
        for fused in (False, True):
            parameter, optimizer = parameter_with([0.0], fused=fused)
            scaler = GradScaler("cpu", reduce_found_inf=reduce_by_maximum if reduce else None)
            scaler.scale(torch.ones(()))
            for overflows in OVERFLOWS[rank]:
                before = parameter.item()
                has_gradient = both_have_gradients or rank == 0
                parameter.grad = torch.full((1,), math.inf if overflows else 2.0**16) if has_gradient else None
                scaler.step(optimizer)
                scaler.update()
                seen[mode].append([scaler.step_was_skipped, scaler.get_scale(), parameter.item() != before])
    seen["shards"] = guarded_step_in_shards(rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    distributed.barrier()  # a rank that leaves while the other still talks to it may bring gloo down
    os._exit(0)  # so may its own threads, as the group and then the interpreter end


@pytest.mark.long
def test_both_ranks_skip_where_one_overflows_and_undo_where_one_breaks(tmp_path: Path) -> None:
    spawn(rank_main, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [ranks[0]["shards"], ranks[1]["shards"]] == [[True, ["weight"]]] * 2
    for mode, (reduce, both_have_gradients) in MODES.items():
        one, other = ranks[0][mode], ranks[1][mode]
        if not reduce:
            assert [skipped for skipped, _, _ in one] == OVERFLOWS[0] * 2
            assert [skipped for skipped, _, _ in other] == OVERFLOWS[1] * 2
            continue
        skips = [a or (b and both_have_gradients) for a, b in zip(OVERFLOWS[0], OVERFLOWS[1], strict=True)] * 2
        assert [skipped for skipped, _, _ in one] == [skipped for skipped, _, _ in other] == skips, mode
        assert [scale for _, scale, _ in one] == [scale for _, scale, _ in other], mode
        assert [moved for _, _, moved in one] == [not skipped for skipped in skips], mode
        assert [moved for _, _, moved in other] == [not skipped and both_have_gradients for skipped in skips], mode


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("explicitly", [False, True])
def test_the_hook_sees_each_check_once_and_decides(fused: bool, explicitly: bool) -> None:
    seen: list[float] = []

    def someone_else_overflowed(found: Tensor) -> None:
        seen.append(found.item())
        found.fill_(1.0)

    parameter, optimizer = parameter_with([1.0], fused=fused)
    scaler = ready(reduce_found_inf=someone_else_overflowed)
    if explicitly:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert seen == [0.0]
    assert (scaler.step_was_skipped, parameter.item(), scaler.get_scale()) == (True, 0.0, 2.0**15)
    assert scaler.overflowed_parameters() == []  # none of its own


@pytest.mark.parametrize("with_closure", [False, True])
def test_the_hook_sees_a_guarded_step_too_and_has_it_undone(with_closure: bool) -> None:
    seen: list[float] = []

    def another_one_broke_a_parameter(found: Tensor) -> None:
        seen.append(found.item())
        found.fill_(float(len(seen) == 2))

    parameter, optimizer = parameter_with([1.0])
    scaler = ready(reduce_found_inf=another_one_broke_a_parameter, guard_parameters=True)
    with pytest.warns(RuntimeWarning, match="made parameters of another process non-finite"):
        scaler.step(optimizer, *([parameter.sum] if with_closure else []))
    scaler.update()
    assert seen == [0.0, 0.0]
    assert (scaler.step_was_skipped, parameter.item(), scaler.get_scale()) == (True, 0.0, 2.0**16)
    assert scaler.overflowed_parameters() == []  # none of its own


def test_what_a_framework_reduces_between_unscaling_and_stepping_counts() -> None:
    parameter, optimizer = parameter_with([1.0])
    scaler = ready()
    scaler.unscale_(optimizer)
    for found in scaler._found_inf_per_device(optimizer).values():
        found.fill_(1.0)
    scaler.step(optimizer)
    assert (scaler.step_was_skipped, parameter.item()) == (True, 0.0)
    scaler.update()
    iterate(scaler, optimizer, parameter, 1.0)
    assert not scaler.step_was_skipped


def test_what_a_framework_checks_by_itself_counts() -> None:
    parameter, optimizer = parameter_with([math.inf])
    scaler = ready()
    one, zero = torch.ones(()), torch.zeros(())
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = scaler._unscale_grads_(optimizer, one, zero, allow_fp16=False)
    state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
    scaler.step(optimizer)
    assert (scaler.step_was_skipped, parameter.item()) == (True, 0.0)
