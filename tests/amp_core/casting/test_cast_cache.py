"""Who has torch's cache of cast weights."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn

from amp_core import autocast


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_one_thread_at_a_time_caches() -> None:
    seen: list[bool] = []
    with autocast("cpu", torch.float16):
        assert torch.is_autocast_cache_enabled()
        in_a_thread(lambda: in_a_region(seen))
        assert torch.is_autocast_cache_enabled()
    in_a_thread(lambda: in_a_region(seen))
    assert seen == [False, True]


def in_a_region(seen: list[bool]) -> None:
    with autocast("cpu", torch.float16):
        seen.append(torch.is_autocast_cache_enabled())


def test_a_thread_that_ends_inside_a_region_does_not_keep_the_cache() -> None:
    def enter() -> None:
        autocast("cpu", torch.float16).__enter__()

    in_a_thread(enter)
    seen: list[bool] = []
    in_a_region(seen)
    assert seen == [True]


def test_a_region_of_torchs_finds_nothing_that_one_of_ours_has_left() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    with autocast("cpu", torch.bfloat16):
        layer(x)
    layer.weight.data.mul_(2)  # of which nobody tells
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), x.bfloat16() @ layer.weight.bfloat16().T)
