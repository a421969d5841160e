"""What `@autocast(...)` may stand above, and that the decorated thing behaves as before."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfserve import autocast
from tests.amp_core.autocast.conftest import product

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


class Methods:
    @autocast("cpu", HALF)
    def method(self) -> tuple[Any, torch.dtype]:
        return self, product()

    @classmethod
    @autocast("cpu", HALF)
    def of_class(cls) -> tuple[Any, torch.dtype]:
        return cls, product()

    @autocast("cpu", HALF)
    @classmethod
    def of_class_above(cls) -> tuple[Any, torch.dtype]:
        return cls, product()

    @staticmethod
    @autocast("cpu", HALF)
    def static() -> torch.dtype:
        return product()

    @autocast("cpu", HALF)
    @staticmethod
    def static_above() -> torch.dtype:
        return product()

    @property
    @autocast("cpu", HALF)
    def value(self) -> torch.dtype:
        return product()


def test_every_kind_of_method() -> None:
    instance = Methods()
    assert instance.method() == (instance, HALF)
    for owner in (Methods, instance):
        assert owner.of_class() == owner.of_class_above() == (Methods, HALF)
        assert owner.static() is owner.static_above() is HALF
    assert instance.value is HALF


def test_what_introspection_sees_is_the_function_itself() -> None:
    def function(a: int, *, b: str = "b") -> str:
        """Say both."""
        return f"{a}{b}"

    decorated = autocast("cpu", HALF)(function)
    assert decorated(1, b="c") == "1c"
    assert inspect.signature(decorated) == inspect.signature(function)
    names = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")
    assert [getattr(decorated, name) for name in names] == [getattr(function, name) for name in names]
    assert inspect.unwrap(decorated) is function


def test_each_kind_of_function_is_still_of_its_kind() -> None:
    async def coroutine() -> None: ...
    async def asynchronous() -> AsyncIterator[int]:
        yield 1

    def generator() -> Iterator[int]:
        yield 1

    region = autocast("cpu", HALF)
    assert inspect.iscoroutinefunction(region(coroutine))
    assert inspect.isasyncgenfunction(region(asynchronous))
    assert inspect.isgeneratorfunction(region(generator))


def test_callables_that_are_no_functions() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    region = autocast("cpu", HALF)
    assert region(layer)(x).dtype is HALF
    assert region(functools.partial(layer, x))().dtype is HALF
    assert region(torch.mm)(x, x.T).dtype is HALF
    assert region(lambda: product())() is HALF  # noqa: PLW0108  (a lambda is what is tested)


def test_a_decorated_module_can_be_copied_and_pickled() -> None:
    layer = Decorated()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301  (our own bytes)
        assert twin(torch.ones(1, 2)).dtype is HALF


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    @autocast("cpu", HALF)
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def test_generators_that_are_interleaved_keep_their_own_regions() -> None:
    def source(region: Any) -> Generator[torch.dtype, None, str]:
        @region  # type: ignore[untyped-decorator]  # several kinds of region
        def generate() -> Generator[torch.dtype, None, str]:
            yield product()
            yield torch.ones(2, dtype=HALF).softmax(0).dtype
            return "end"

        made: Generator[torch.dtype, None, str] = generate()
        return made

    a, b = source(autocast("cpu", HALF)), source(autocast("cpu", BRAIN, policy="cuda"))
    assert [next(a), product(), next(b), next(a), product(), next(b)] == [HALF, FULL, BRAIN, HALF, FULL, FULL]
    for generator in (a, b):
        with pytest.raises(StopIteration, match="end"):
            next(generator)


def test_a_generator_that_ignores_its_closing_is_told_so_and_that_raises_at_its_end_is_heard() -> None:
    @autocast("cpu", HALF)
    def stubborn() -> Iterator[torch.dtype]:
        try:
            yield product()
        except GeneratorExit:
            yield product()

    @autocast("cpu", HALF)
    def failing() -> Iterator[torch.dtype]:
        try:
            yield product()
        finally:
            raise KeyError("at the end")

    generator = stubborn()
    next(generator)
    with pytest.raises(RuntimeError, match="generator ignored GeneratorExit"):
        generator.close()  # type: ignore[attr-defined]
    generator = failing()
    next(generator)
    with pytest.raises(KeyError, match="at the end"):
        generator.close()  # type: ignore[attr-defined]


def test_a_generator_may_go_on_in_another_thread() -> None:
    @autocast("cpu", HALF)
    def generate() -> Iterator[torch.dtype]:
        for _ in range(4):
            yield product()

    generator = generate()
    with ThreadPoolExecutor(1) as pool:
        seen = [next(generator), pool.submit(next, generator).result(), next(generator)]
        assert pool.submit(product).result() is FULL
    assert seen == [HALF] * 3


def test_an_asynchronous_generator_takes_values_exceptions_and_its_end() -> None:
    events: list[Any] = []

    @autocast("cpu", HALF)
    async def generate() -> AsyncGenerator[torch.dtype, str]:
        try:
            events.append((yield product()))
            try:
                yield product()
            except KeyError:
                await asyncio.sleep(0)
                yield product()
        finally:
            await asyncio.sleep(0)
            events.append(product())

    async def consume() -> list[torch.dtype]:
        assert [(dtype, product()) async for dtype in generate()] == [(HALF, FULL)] * 2
        generator = generate()
        seen = [await anext(generator), await generator.asend("sent"), await generator.athrow(KeyError()), product()]
        await generator.aclose()
        return seen

    assert asyncio.run(consume()) == [HALF, HALF, HALF, FULL]
    assert events == [None, HALF, "sent", HALF]


def test_a_cancelled_coroutine_leaves_its_region() -> None:
    inside: list[torch.dtype] = []

    @autocast("cpu", HALF)
    async def waits_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            inside.append(product())

    async def cancel() -> torch.dtype:
        task = asyncio.ensure_future(waits_for_ever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return product()

    assert asyncio.run(cancel()) is FULL
    assert inside == [HALF]
