"""A hook reduces what was found, so that all ranks skip together: two real processes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from amp_core import GradScaler
from tests.amp_core.scaling.iteration import iterate, parameter_with, ready

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


def test_a_hook_that_cannot_be_called_is_refused() -> None:
    hook: Any = "max"
    with pytest.raises(ValueError, match="reduce_found_inf must be a function of a tensor, or None, got 'max'"):
        GradScaler("cpu", reduce_found_inf=hook)
