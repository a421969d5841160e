"""A hook reduces what was found, so that all ranks skip together: two real processes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

from amp_core import GradScaler
from tests.amp_core.scaling.iteration import iterate, parameter_with, ready

OVERFLOWS = {0: [False, True, False, False], 1: [False, False, False, True]}


def reduce_by_maximum(found: Tensor) -> None:
    distributed.all_reduce(found, distributed.ReduceOp.MAX)


MODES = {"reduced": (True, True), "reduced, a rank without gradients": (True, False), "not reduced": (False, True)}


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
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    distributed.barrier()  # a rank that leaves while the other still talks to it may bring gloo down
    os._exit(0)  # so may its own threads, as the group and then the interpreter end


def test_both_ranks_skip_where_one_overflows(tmp_path: Path) -> None:
    spawn(rank_main, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
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
