"""The reference transport: grpcio's asyncio server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from grpc._cython import cygrpc

from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError, UnsupportedError
from halfserve.serve.protocol.inference import InferenceEntry
from halfserve.serve.protocol.inference_stream import ENDS_WITH_ERROR, InferenceStream
from halfserve.serve.protocol.messages import parse
from halfserve.serve.protocol.rpc import Rpc, RpcCall, layered
from halfserve.serve.protocol.service import INFER_PATH, INFER_STREAM_PATH, Service
from halfserve.serve.protocol.status import status_of
from halfserve.serve.security.client_limits import network_of
from halfserve.serve.security.gate import AccessGrant, Gate
from halfserve.serve.security.private_socket import private_files
from halfserve.serve.security.security import PortSecurity
from halfserve.serve.transports.grpc_framing import cut_details
from halfserve.serve.transports.listening import Address, BindError, address_of, close, listen

logger = logging.getLogger(__name__)

OPTION = "--grpc-port"
MAX_MESSAGE_BYTES = 2**31 - 1
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 1024),  # as TransportLimits.max_streams
    ("grpc.so_reuseport", 0),  # otherwise two servers could share the port and split its calls
]
MAX_UNANSWERED = 256  # requests of one stream before reading pauses
CODES = {code.value[0]: code for code in grpc.StatusCode}
Context = Any  # grpc.aio.ServicerContext; grpcio ships no types


class GrpcioServer:
    def __init__(self, service: Service, host: str, port: int, *, guard: PortSecurity | None = None) -> None:
        self._service = service
        self._guard = guard or PortSecurity()
        self._host, self._port = host, port
        self._server: Any = None

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            BindError: the address is in use, not this machine's, or not allowed.
        """
        logging.getLogger(cygrpc.__name__).addFilter(_is_no_lost_call)
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((_Methods(self._service, self._guard.gate),))
        try:
            port = self._listen()
        except RuntimeError:
            raise BindError(
                f"cannot listen on {address_of(self._host, self._port)}; choose another {OPTION} (0 finds a free one) or --host"
            ) from None
        await self._server.start()
        return port

    async def give_notice(self) -> None:
        """Nothing: grpcio sends GOAWAY only when it stops."""

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait up to `grace_s` seconds for those in flight, then close."""
        await self._server.stop(grace_s)

    def _listen(self) -> int:
        path, tls = self._guard.socket, self._guard.tls
        if path is not None:
            with private_files():  # grpcio makes the socket
                self._server.add_insecure_port(f"unix:{path}")
            return 0
        close(listen(Address(self._host, self._port, OPTION)))  # for the reason of a failure, which grpcio does not report
        address = address_of(self._host, self._port)
        if tls is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, tls.grpc_credentials()))


def _is_no_lost_call(record: logging.LogRecord) -> bool:
    """Leave out the stack traces that grpcio logs for answers to clients that have gone, or whose deadline has passed."""
    return record.exc_info is None or not isinstance(record.exc_info[1], cygrpc.ExecuteBatchError)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio ships no types
    """Finds the handler of each call. It is made per call, because the peer is known only inside the call."""

    def __init__(self, service: Service, gate: Gate | None) -> None:
        self._service, self._gate = service, gate
        self._rpcs = service.rpcs if gate is None else {path: layered(rpc, gate.layer) for path, rpc in service.rpcs.items()}

    def service(self, handler_call_details: Any) -> Any:
        path, grant = handler_call_details.method, None
        if self._gate is not None:
            try:
                grant = self._gate.admit_call(self._rpcs, path, _headers(handler_call_details.invocation_metadata))
            except InferenceError as error:
                return grpc.stream_stream_rpc_method_handler(_refused(error))
        service = self._service if grant is None else grant.service(self._service)
        if path == INFER_PATH:
            return grpc.unary_unary_rpc_method_handler(_infer(service, grant))
        if path == INFER_STREAM_PATH:
            return grpc.stream_stream_rpc_method_handler(_infer_stream(service, grant))
        rpc = self._rpcs.get(path)
        if rpc is None:
            return grpc.stream_stream_rpc_method_handler(_unsupported(path))
        return grpc.stream_stream_rpc_method_handler(partial(_stream if rpc.is_stream else _answer, rpc, service, grant))


async def _answer(
    rpc: Rpc, service: Service, grant: AccessGrant | None, messages: AsyncIterator[bytes], context: Context
) -> None:
    """Answer the sole message once the client has ended its side; grpcio's own unary calls do not wait for that."""
    try:
        message = await _sole(messages)
        response = await rpc.method(parse(rpc.request, message), _call(service, grant, context))
        await context.write(response.SerializeToString())
    except Exception as error:  # noqa: BLE001  (any failure ends the call with a status)
        await _abort(context, error)


async def _sole(messages: AsyncIterator[bytes]) -> bytes:
    sole: bytes | None = None
    async for message in messages:
        if sole is not None:
            raise InvalidArgumentError("a second message came, expected one; this method is no stream")
        sole = message
    if sole is None:
        raise InvalidArgumentError("the call ended without a message, expected one")
    return sole


async def _stream(
    rpc: Rpc, service: Service, grant: AccessGrant | None, messages: AsyncIterator[bytes], context: Context
) -> None:
    async def send(response: Message) -> None:
        await context.write(response.SerializeToString())

    try:
        requests = (parse(rpc.request, data) async for data in messages)
        await rpc.method(requests, replace(_call(service, grant, context), send=send))
    except Exception as error:  # noqa: BLE001  (see above)
        await _abort(context, error)


def _call(service: Service, grant: AccessGrant | None, context: Context) -> RpcCall:
    headers = dict(_headers(context.invocation_metadata()))
    return RpcCall(server=service, peer=_peer(context), headers=headers, grant=grant)


def _infer(service: Service, given: AccessGrant | None) -> Callable[[bytes, Context], Awaitable[bytes]]:
    async def handle(data: bytes, context: Context) -> bytes:
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def reply(result: bytes | InferenceError) -> None:
            if answered.done():
                return  # cancelled in this loop iteration
            if isinstance(result, InferenceError):
                answered.set_exception(result)
            else:
                answered.set_result(result)

        inference = _inference(service, given, context)
        try:
            cancel = inference.infer(data, context.time_remaining(), reply)
            try:
                return await answered
            except asyncio.CancelledError:
                cancel()
                inference.gone(data)
                raise
        except Exception as error:  # noqa: BLE001  (see above)
            inference.failed(data, error)
            await _abort(context, error)

    return handle


def _inference(service: Service, grant: AccessGrant | None, context: Context) -> InferenceEntry:
    call = _call(service, grant, context)
    if grant is None:
        return service.inference_of(call.peer, call.headers, "", partial(network_of, call.peer))
    return grant.inference_of(service, call)


def _peer(context: Context) -> str:
    return unquote(context.peer()).partition(":")[2]


def _headers(metadata: Any) -> list[tuple[bytes, bytes]]:
    return [
        (name.encode(), value if isinstance(value, bytes) else str(value).encode("utf-8", "replace"))
        for name, value in metadata or ()
    ]


def _infer_stream(
    service: Service, given: AccessGrant | None
) -> Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]:
    async def handle(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        answers = _StreamAnswers()
        room = asyncio.Semaphore(MAX_UNANSWERED)
        fails = ENDS_WITH_ERROR in _headers(context.invocation_metadata())
        stream = InferenceStream(_inference(service, given, context), answers, ends_with_error=fails)

        async def receive() -> None:
            async for data in messages:
                await room.acquire()
                stream.receive(data, context.time_remaining())
            answers.queue.put_nowait(None)

        receiving = asyncio.create_task(receive())
        ended = False
        try:
            while not ended or stream or not answers.queue.empty():
                answer = await answers.queue.get()
                if answer is None:
                    ended = True
                elif isinstance(answer, Exception):
                    await _abort(context, answer)
                elif callable(answer):
                    answer()
                else:
                    room.release()
                    if answer:
                        yield answer
        finally:
            receiving.cancel()
            stream.cancel()

    return handle


class _StreamAnswers:
    """The client of a streaming call, with what it has not been sent yet.

    Attributes:
        queue: responses, errors that end the call, functions to call once the client has taken the responses before them, b""
            for a request that has ended without a message, and None after the last request.
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | Callable[[], None] | None] = asyncio.Queue()

    def send(self, response: bytes) -> None:
        self.queue.put_nowait(response)

    def when_read(self, then: Callable[[], None]) -> None:
        self.queue.put_nowait(then)

    def request_ended(self) -> None:
        self.queue.put_nowait(b"")

    def fail(self, error: Exception) -> None:
        self.queue.put_nowait(error)


def _unsupported(method: str) -> Callable[[Any, Context], AsyncIterator[bytes]]:
    return _refused(UnsupportedError(f"{method} is not served here; server reflection lists what is"))


def _refused(error: InferenceError) -> Callable[[Any, Context], AsyncIterator[bytes]]:
    async def handle(_: Any, context: Context) -> AsyncIterator[bytes]:
        await _abort(context, error)
        yield b""  # type: ignore[unreachable]  # makes this a stream; abort has raised

    return handle


async def _abort(context: Context, error: Exception) -> NoReturn:
    status = status_of(error)
    if not isinstance(error, InferenceError):
        logger.error("a call failed", exc_info=error)
    await context.abort(CODES[status.code], cut_details(status.details), trailing_metadata=status.trailers)
    raise AssertionError  # abort has raised; this tells the type checker
