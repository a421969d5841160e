"""What a server of a cluster has counted, also of models that it serves no more."""

from __future__ import annotations

import asyncio
from pathlib import Path

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.fleet.member.counter_file import SUFFIX
from halfserve.serve.fleet.member.kept_counters import LastingCounters, left_counters
from halfserve.serve.fleet.member.member_counters import MemberCounters
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.fleet.member.test_counter_file import count

NAME = "server"


def batches(counters: MemberCounters) -> dict[str, int]:
    return {one.name: one.execution_count for one in counters.statistics.model_stats}


def sample(counters: MemberCounters, name: str) -> float:
    return sum(one.value for metric in counters.metrics for one in metric.samples if one.name == name)


def ledgers(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob(f"*{SUFFIX}")}


def test_counters_go_on_when_a_model_is_replaced_and_are_exact_however_the_server_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        core = InferenceCore([])
        counters = LastingCounters(tmp_path, NAME, core)
        core.on_change(counters.keeper.follow)

        async def check(expected: int) -> None:
            assert batches(await counters.counters()) == batches(left_counters(tmp_path, NAME)) == {"held": expected}

        old, new = held_model(HeldBackend()), held_model(HeldBackend())
        core.replace("held", [old])
        count(old, "batch", 3, 1000)
        await check(1)
        (leaving,) = core.replace("held", [new])
        count(old, "batch", 3, 1000)  # it still answers what it has accepted
        count(new, "batch", 3, 1000)
        await check(3)
        both = ledgers(tmp_path)
        await leaving
        await check(3)
        assert len(ledgers(tmp_path)) == 1
        for path, data in both.items():  # killed before the old one was removed
            path.write_bytes(data)
        await check(3)
        assert counters.sums()["held"].requests == 9
        await counters.keeper.write()
        count(new, "batch", 3, 1000)
        await check(4)
        left = left_counters(tmp_path, NAME)
        assert (sample(left, "nv_inference_exec_count"), sample(left, "halfserve_batch_rows_count")) == (4, 3)

    asyncio.run(scene())


def test_a_folder_without_files_has_no_counters(tmp_path: Path) -> None:
    assert batches(left_counters(tmp_path, NAME)) == {}
