"""What autocast and GradScaler cost beside torch's own, in microseconds on the CPU.

    python benchmarks/casting.py

Small tensors, so that the bookkeeping is what is measured; the variants take turns, and medians are printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Timer

from amp_core import GradScaler, autocast

ROUNDS, GRADIENTS = 7, 100
SECONDS = 0.1
REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": lambda: torch.autocast("cpu", torch.float16),
    "native policy": lambda: autocast("cpu", torch.float16),
    'policy="cuda"': lambda: autocast("cpu", torch.float16, policy="cuda"),
}


def measured(variants: dict[str, Callable[[], Any]], region: Callable[[str], AbstractContextManager[Any]]) -> dict[str, float]:
    """Median microseconds of each variant over the rounds, measured in turn, each inside its region."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, work in variants.items():
            with region(name):
                times[name].append(Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=SECONDS).median)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def operators() -> dict[str, dict[str, float]]:
    """One call inside a region: an operator that both cast, one that only the policy casts, one that nobody does."""
    x = torch.randn(8, 8)
    calls: dict[str, Callable[[], Any]] = {"mm": lambda: torch.mm(x, x), "softmax": lambda: x.softmax(0), "add": lambda: x + x}
    return {f"{name}, 8x8": measured(dict.fromkeys(REGIONS, call), lambda n: REGIONS[n]()) for name, call in calls.items()}


def entering() -> dict[str, float]:
    """Entering and leaving an outermost region."""

    def enter(make: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
        def work() -> None:
            with make():
                pass

        return work

    return measured({name: enter(make) for name, make in REGIONS.items()}, lambda _: nullcontext())


def scaling() -> dict[str, float]:
    """unscale_, step and update of an SGD optimizer with many small gradients."""

    def iteration(scaler: Any) -> Callable[[], None]:
        parameters = [torch.nn.Parameter(torch.zeros(8)) for _ in range(GRADIENTS)]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        scaler.scale(torch.zeros(()))
        for parameter in parameters:
            parameter.grad = torch.zeros(8)

        def work() -> None:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

        return work

    variants = {"torch": iteration(torch.amp.GradScaler("cpu")), "native policy": iteration(GradScaler("cpu"))}
    return measured(variants, lambda _: nullcontext())


def main() -> None:
    """Measure everything and print one table."""
    torch.set_num_threads(1)
    table = Table("microseconds", *REGIONS)
    rows = {**operators(), "enter and leave a region": entering(), f"scaler, {GRADIENTS} gradients": scaling()}
    for name, figures in rows.items():
        table.add_row(name, *(f"{figures[v]:.1f}" if v in figures else "" for v in REGIONS))
    Console().print(table)


if __name__ == "__main__":
    main()
