"""Carries exchanges out over a blocking channel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import grpc

from serve.client.client_base import CLOSING_S, ClientBase, Sending
from serve.client.connection.channel import method_path
from serve.client.errors import InferenceClientError
from serve.client.exchanges.calls import Answer, Call, Exchange, Pause
from serve.client.region_exchange import take_back

if TYPE_CHECKING:
    from types import TracebackType


class SyncDriver(ClientBase):
    """The blocking half of InferenceClient: the channel, and the loop that makes an exchange's calls."""

    _channel: Any = None

    def close(self) -> None:
        """Close the connection; calls under way end as Cancelled. Closing twice is fine."""
        self._closed = True  # first: others would go on to register what is taken back here
        self._ended.set()
        if self._shares and not self._taken_back and self._channel is not None:
            self._carry_out(take_back(self._state), replace(self._sending(CLOSING_S), closing=True), retry=False)
            self._taken_back = True
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _carry_out(self, exchange: Exchange[Answer], sending: Sending | None = None, *, retry: bool = True) -> Answer:
        sending = sending or self._sending()
        steps = self._patient(exchange, sending) if retry else exchange
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    self._ended.wait(step.seconds)  # shorter where another thread closes the client
                    step = steps.send(None)
                    continue
                try:
                    answer = self._ask(step, sending)
                except InferenceClientError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as finished:
            result: Answer = finished.value
            return result
        finally:
            steps.close()

    def _ask(self, call: Call, sending: Sending) -> Any:
        self._check_usable(closing=sending.closing)
        rpc = self._rpcs.get(call.method) or self._new_rpc(call)
        timeout_s = sending.deadline.remaining_s(method=call.method, address=self.address)
        try:
            answer = rpc(call.request, timeout=timeout_s, metadata=sending.headers, compression=sending.compression)
        except grpc.RpcError as error:
            raise self._failure(error, call.method, sending) from None
        except ValueError as error:
            # What grpc says of a channel that another thread has closed meanwhile.
            raise self._closed_meanwhile(error) from None
        return self._whole(answer, call.method)

    def _new_rpc(self, call: Call) -> Any:
        rpc = self._open_channel().unary_unary(
            method_path(call.method), type(call.request).SerializeToString, call.answer.FromString
        )
        self._rpcs[call.method] = rpc
        return rpc

    def _open_channel(self) -> Any:
        # Not in the constructor: a client that has not connected may be taken into a forked process.
        with self._opening:
            if self._channel is None:
                self._channel = self._settings.open(grpc)
                if self._closed:  # by another thread, which may have found nothing to close
                    self._channel.close()
            return self._channel
