"""A thousand random nestings over eight threads leave torch's autocast state exactly as found.

Each nesting is a tree of regions of every kind (ours and torch's, blocks and decorated functions, shared instances, generators
that are suspended and closed anywhere, exceptions thrown at any depth). Before each region the whole state is noted, inside it
the dtypes that operations really have are compared with a model, and after it the state must be what was noted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_core import Policy, autocast

THREADS, NESTINGS_PER_THREAD = 8, 125
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "ipu", "xla", "mtia", "privateuseone")
POLICIES: dict[str, tuple[Policy, dict[str, Any]]] = {
    "native": (Policy(), {}),
    "cuda": (Policy.cuda(), {"softmax": FULL}),
    "mm": (Policy().fp32("mm"), {"mm": FULL}),
    "exp": (Policy.cuda().low("exp"), {"softmax": FULL, "exp": "low"}),
}
# Entered from all threads at once, and within themselves.
SHARED = [("cuda", HALF, autocast("cpu", HALF, policy="cuda")), (None, BRAIN, autocast("cpu", BRAIN))]


class ThrownError(Exception):
    """Thrown by a random leaf, caught at a random depth."""


@dataclass(frozen=True)
class Model:
    """What must be in force for the CPU."""

    enabled: bool = False
    dtype: torch.dtype = BRAIN
    policy: str = "native"

    def dtypes(self) -> list[torch.dtype]:
        changes = POLICIES[self.policy][1] if self.enabled else {}
        changes = {op: self.dtype if dtype == "low" else dtype for op, dtype in changes.items()}
        low = self.dtype if self.enabled else FULL
        return [changes.get("mm", low), changes.get("softmax", HALF), changes.get("exp", FULL), low]


class Walk:
    """One thread's random nestings."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  (a schedule, not a secret)
        self.x, self.halves = torch.ones(2, 2), torch.ones(2, dtype=HALF)
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.weight.grad = torch.ones(2, 2)
        self.optimizer = torch.optim.SGD([self.weight], lr=2.0**-4)
        self.regions = 0

    def nest(self, model: Model, depth: int) -> None:
        """Check what is in force, then open some more regions, or throw."""
        self.check(model)
        if depth and self.random.random() < 0.08:
            raise ThrownError
        for _ in range(self.random.choice([1, 1, 2, 3]) if depth < 4 else 0):
            before = state()
            catches = not depth or self.random.random() < 0.5
            try:
                self.random.choice([self.block, self.block, self.torchs, self.function, self.generator, self.disabled])(
                    model, depth
                )
            except ThrownError:
                if not catches:
                    raise
            finally:
                assert state() == before
            self.check(model)

    def check(self, model: Model) -> None:
        dtypes = [
            torch.mm(self.x, self.x).dtype,
            self.halves.softmax(0).dtype,
            self.x.exp().dtype,
            functional.linear(self.x, self.weight).dtype,
        ]
        assert dtypes == model.dtypes()
        if self.random.random() < 0.3:
            self.optimizer.step()
            weight = self.weight.detach().to(model.dtypes()[3])
            assert torch.equal(functional.linear(self.x, self.weight), self.x.to(weight.dtype) @ weight.T)

    def region(self, model: Model) -> tuple[Model, Any]:
        if self.random.random() < 0.25:
            name, dtype, shared = self.random.choice(SHARED)
            return Model(True, dtype, name or model.policy), shared
        inner = Model(self.random.random() < 0.8, self.random.choice([HALF, BRAIN]), model.policy)
        cache_enabled = self.random.choice([True, False, None])
        name = self.random.choice([None, *POLICIES])
        policy: Any = None if name is None else self.random.choice([POLICIES[name][0], str(POLICIES[name][0])])
        made: Any = autocast("cpu", inner.dtype, inner.enabled, cache_enabled, policy)
        return replace(inner, policy=name or model.policy), made

    def block(self, model: Model, depth: int) -> None:
        inner, region = self.region(model)
        self.regions += 1
        with region:
            self.nest(inner, depth + 1)

    def torchs(self, model: Model, depth: int) -> None:
        # Of the dtype in force and without its cache: else the stale casts would be torch's own (defects 4 and 5).
        inner = replace(model, enabled=self.random.random() < 0.8)
        with torch.autocast("cpu", inner.dtype, inner.enabled, cache_enabled=False):
            self.nest(inner, depth + 1)

    def function(self, model: Model, depth: int) -> None:
        inner, region = self.region(model)
        self.regions += 1
        decorated: Callable[[Model, int], None] = region(self.nest)
        decorated(inner, depth + 1)

    def disabled(self, model: Model, depth: int) -> None:
        """A region of a device that is not there: torch warns, and keeps the state all the same."""
        self.regions += 1
        with autocast("cuda", self.random.choice([HALF, BRAIN]), policy=self.random.choice([None, "native", "cuda"])):
            self.nest(model, depth + 1)

    def generator(self, model: Model, depth: int) -> None:
        inner, region = self.region(model)
        self.regions += 1

        @region  # type: ignore[untyped-decorator]  # the instance, seen as Any
        def generate() -> Iterator[Tensor]:
            with suppress(ZeroDivisionError):
                self.nest(inner, depth + 1)
                yield self.x
            self.nest(inner, depth + 1)
            yield self.x

        suspended = generate()
        next(suspended)
        self.nest(model, depth + 1)
        end = self.random.choice(["exhaust", "throw", "close", "abandon"])
        if end == "exhaust":
            assert list(suspended)
        elif end == "throw":
            assert suspended.throw(ZeroDivisionError()) is self.x
        elif end == "close":
            suspended.close()


def state() -> list[Any]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    devices = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES]
    return [depth, torch.is_autocast_cache_enabled(), *devices]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_a_thousand_random_nestings_in_eight_threads_leave_the_state_as_found() -> None:
    before, seed = state(), random.getrandbits(32)  # pytest-randomly's own seed makes this one

    def run(thread: int) -> int:
        walk = Walk(seed + thread)
        for _ in range(NESTINGS_PER_THREAD):
            walk.nest(Model(), 0)
            assert state() == before
        return walk.regions

    with ThreadPoolExecutor(THREADS) as pool:
        regions = list(pool.map(run, range(THREADS)))
    assert sum(regions) > THREADS * NESTINGS_PER_THREAD
    assert state() == before
    with torch.autocast("cpu", HALF):  # nothing of any policy is left
        assert torch.ones(2, dtype=HALF).softmax(0).dtype is torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is HALF
