"""A region around each call of a function, and around each stretch between the pauses of one that can pause.

A generator or coroutine that is suspended must leave its region: what runs meanwhile in the thread is somebody else's code.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
    from contextlib import AbstractContextManager

    MakeRegion = Callable[[], AbstractContextManager[Any]]

Function = TypeVar("Function", bound="Callable[..., Any]")


def decorate(function: Function, make_region: MakeRegion) -> Function:
    """Wrap a function, method, generator, coroutine or asynchronous generator function.

    Args:
        function: What to wrap.
        make_region: Makes a new region; called for each stretch of code that runs in one, so calls may nest and overlap.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return cast("Function", type(function)(decorate(function.__func__, make_region)))
    if inspect.isasyncgenfunction(function):
        wrapper: Any = _asynchronous_generator(function, make_region)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(function, make_region)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(function, make_region)
    else:
        wrapper = _plain(function, make_region)
    return cast("Function", functools.wraps(function)(wrapper))


def _plain(function: Callable[..., Any], make_region: MakeRegion) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with make_region():
            return function(*args, **kwargs)

    return wrapper


def _generator(function: Callable[..., Generator[Any, Any, Any]], make_region: MakeRegion) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _drive(function(*args, **kwargs), make_region))

    return wrapper


def _coroutine(function: Callable[..., Coroutine[Any, Any, Any]], make_region: MakeRegion) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await _await_in_regions(function(*args, **kwargs), make_region)

    return wrapper


def _asynchronous_generator(function: Callable[..., AsyncGenerator[Any, Any]], make_region: MakeRegion) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        resume = generator.asend(None)
        try:
            while True:
                item = await _await_in_regions(resume, make_region)
                try:
                    resume = generator.asend((yield item))
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001  (whatever is thrown in is the generator's to handle)
                    resume = generator.athrow(error)
        except StopAsyncIteration:
            return
        finally:
            await _await_in_regions(generator.aclose(), make_region)

    return wrapper


@types.coroutine
def _await_in_regions(awaitable: Any, make_region: MakeRegion) -> Generator[Any, Any, Any]:
    return (yield from _drive(awaitable, make_region))


def _drive(generator: Any, make_region: MakeRegion) -> Generator[Any, Any, Any]:
    resume, argument = generator.send, None
    while True:
        try:
            with make_region():
                item = resume(argument)
        except StopIteration as stop:
            return stop.value
        try:
            resume, argument = generator.send, (yield item)
        except GeneratorExit:
            with make_region():
                generator.close()
            raise
        except BaseException as error:  # noqa: BLE001  (whatever is thrown in is the generator's to handle)
            resume, argument = generator.throw, error
