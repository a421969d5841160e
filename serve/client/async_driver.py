"""Carries exchanges out over an asyncio channel."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import grpc

from serve.client.client_base import CLOSING_S, ClientBase, Sending
from serve.client.connection.cancellation import is_cancelled
from serve.client.connection.channel import method_path
from serve.client.errors import InferenceClientError
from serve.client.exchanges.calls import Answer, Call, Exchange, Pause
from serve.client.region_exchange import take_back

if TYPE_CHECKING:
    from types import TracebackType


class AsyncDriver(ClientBase):
    """The asyncio half of AsyncInferenceClient: the channel, and the loop that makes an exchange's calls."""

    _channel: Any = None
    _loop: asyncio.AbstractEventLoop | None = None

    @cached_property
    def _over(self) -> asyncio.Event:
        return asyncio.Event()  # for those that pause, all on the loop that the client belongs to

    async def close(self) -> None:
        """Close the connection; calls under way end as Cancelled. Closing twice is fine."""
        self._closed = True  # first: others would go on to register what is taken back here
        if self._loop is asyncio.get_running_loop():
            self._over.set()
        if self._shares and not self._taken_back and self._channel is not None:
            if self._loop is not None and self._loop.is_closed():  # nothing goes that way any more
                self._channel, self._loop = None, None
                self._rpcs.clear()
            await self._carry_out(take_back(self._state), replace(self._sending(CLOSING_S), closing=True), retry=False)
            self._taken_back = True
        if self._channel is not None and self._loop is asyncio.get_running_loop():
            await self._channel.close()  # with another loop nothing of it is left to be waited for

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _carry_out(self, exchange: Exchange[Answer], sending: Sending | None = None, *, retry: bool = True) -> Answer:
        sending = sending or self._sending()
        steps = self._patient(exchange, sending) if retry else exchange
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    await self._pause(step.seconds)
                    step = steps.send(None)
                    continue
                try:
                    answer = await self._ask(step, sending)
                except InferenceClientError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as finished:
            result: Answer = finished.value
            return result
        finally:
            steps.close()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    def _check_usable(self, *, closing: bool = False) -> None:
        super()._check_usable(closing=closing)
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise InferenceClientError(
                "this client has connected in another event loop, which it belongs to; make one in each asyncio.run",
                code="FAILED_PRECONDITION",
            )

    async def _ask(self, call: Call, sending: Sending) -> Any:
        self._check_usable(closing=sending.closing)
        rpc = self._rpcs.get(call.method) or self._new_rpc(call)
        timeout_s = sending.deadline.remaining_s(method=call.method, address=self.address)
        try:
            answer = await rpc(call.request, timeout=timeout_s, metadata=sending.headers, compression=sending.compression)
        except grpc.RpcError as error:
            raise self._failure(error, call.method, sending) from None
        except grpc.aio.UsageError as error:
            # What grpc says of a channel that another task has closed meanwhile.
            raise self._closed_meanwhile(error) from None
        except asyncio.CancelledError:
            # What it says to a call that was under way then.
            if not self._closed or is_cancelled():
                raise
            raise self._closed_meanwhile("it was under way") from None
        return self._whole(answer, call.method)

    def _new_rpc(self, call: Call) -> Any:
        rpc = self._open_channel().unary_unary(
            method_path(call.method), type(call.request).SerializeToString, call.answer.FromString
        )
        self._rpcs[call.method] = rpc
        return rpc

    def _open_channel(self) -> Any:
        # Not in the constructor: grpc.aio ties a channel to the loop that runs when it is made.
        if self._channel is None:
            self._channel = self._settings.open(grpc.aio)
        return self._channel
