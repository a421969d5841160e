"""Operations of a client: an exchange with its settings, declared once for the synchronous and the asyncio client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from halfserve.serve.client.channel_settings import (
    Headers,
)
from halfserve.serve.client.exchange import (
    Answer,
    Deadline,
    Exchange,
)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """Settings for the RPCs of one operation."""

    deadline: Deadline  # deadline of the whole operation
    headers: Headers  # gRPC metadata
    compression: Any  # compression as a grpc value; None for the channel's
    closing: bool = False  # whether the client is being closed, in which case other operations are refused


@dataclass(frozen=True)
class ClientOperation(Generic[Answer]):
    """An exchange with the client's retries applied, and the settings of its RPCs."""

    exchange: Exchange[Answer]
    settings: CallSettings


class SyncRunner(ABC):
    """Executes operations and returns their answers."""

    @abstractmethod
    def _run(self, prepare: Callable[[], ClientOperation[Answer]]) -> Answer: ...


class AsyncRunner(ABC):
    """Executes operations on an event loop."""

    @abstractmethod
    async def _run(self, prepare: Callable[[], ClientOperation[Answer]]) -> Answer: ...


class ClientMethod(Generic[P, R]):
    """A method that returns a `ClientOperation[R]`; called, it returns R on a SyncRunner and a coroutine on an AsyncRunner."""

    def __init__(self, prepare: Callable[Concatenate[Any, P], ClientOperation[R]]) -> None:
        self._prepare = prepare
        update_wrapper(self, prepare)

    @overload
    def __get__(self, runner: None, owner: type) -> Self: ...

    @overload
    def __get__(self, runner: SyncRunner, owner: type) -> Callable[P, R]: ...

    @overload
    def __get__(self, runner: AsyncRunner, owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...

    def __get__(self, runner: Any, owner: type) -> Any:
        return self if runner is None else MethodType(self, runner)

    def __call__(self, runner: Any, *arguments: P.args, **options: P.kwargs) -> Any:
        return runner._run(partial(self._prepare, runner, *arguments, **options))  # noqa: SLF001  (see SyncRunner)
