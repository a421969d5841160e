"""Requests of a running model.py to other models: it has them computed, asks whether they are ready, loads and unloads them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.request_parameters import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START, TIMEOUT
from halfserve.serve.backends.python.process_messages import code_of, from_wire, to_wire
from halfserve.serve.backends.python_child.wire import WireTensor
from halfserve.serve.engine.errors import BackendError, InferenceError, ModelLoadError, NotFoundError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_calls import ModelCall, ModelCalls, RunningCall
from halfserve.serve.engine.requests import CallingExecution, Parameter, RemarkedAnswer
from halfserve.serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)

Reply = Callable[[dict[str, Any], Sequence[WireTensor]], None]


class CopyCalls:
    """The requests of one copy of a model to other models. They begin on one thread; their replies come on others.

    Attributes:
        caller: the execution in progress, which makes the calls; None between two.
        is_loading: whether the copy is being loaded, so that a load that it asks for delays its own.
    """

    def __init__(self, connected: Callable[[], ModelCalls], label: str, reply: Reply) -> None:
        """Make the calls of one copy. `connected`: returns the way to other models; `reply`: sends a reply to the copy."""
        self.caller: CallingExecution | None = None
        self.is_loading = False
        self._connected = connected
        self._label = label
        self._reply = reply
        self._running: dict[int, tuple[RunningCall, _Replying]] = {}

    def stop(self) -> None:
        """Cancel all calls, because the copy has gone."""
        for running, _ in list(self._running.values()):
            running.cancel()
        self._running.clear()

    def abandon(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        """Cancel a call whose replies the model wants no longer."""
        running = self._running.pop(header["call"], None)
        if running is not None:
            running[0].cancel()

    def cancel(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        """Ask the called model to end its work, and reply once it can see that."""
        self._on_loop(header["call"], self._cancel(header["of"]))

    def read(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        """Let the called model go on, because the model has taken one of its responses."""
        running = self._running.get(header["call"])
        if running is not None:
            self._connected().soon(running[1].read)

    def is_ready(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        """Reply whether a model takes requests."""
        self._on_loop(header["call"], self._ready(header["model"], header["version"]))

    def load_model(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """Load or reload a model, and reply once it serves."""
        caller = self._label.rpartition("/")[0] if self.is_loading else None
        files = {tensor.name: tensor.data.tobytes() for tensor in tensors}
        self._on_loop(header["call"], self._load(header["model"], header["config"], files, caller))

    def unload_model(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        """Begin to unload a model."""
        self._on_loop(header["call"], self._unload(header["model"]))

    def infer(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """Have another model compute a request of this one."""
        number = header["call"]
        call = ModelCall(
            model=header["model"],
            version="" if header["version"] < 0 else str(header["version"]),
            inputs={tensor.name: from_wire(tensor) for tensor in tensors},
            datatypes={tensor.name: tensor.datatype for tensor in tensors},
            outputs=header["outputs"],
            many=header["decoupled"],
            request_id=header["id"],
            parameters=_parameters(header),
            timeout_s=header["timeout"] / 1e6 or None,
            caller=self.caller,
        )
        replying = _Replying(self, self._reply, number)
        self._running[number] = self._connected().start(call, replying), replying

    def ended(self, number: int) -> None:
        """Forget a call that has its answer."""
        self._running.pop(number, None)

    def _on_loop(self, number: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """Reply with what a coroutine on the event loop returns."""

        async def run() -> None:
            try:
                reply = await work
            except (InferenceError, ModelLoadError) as error:
                reply = {"error": code_of(error)}
            except Exception as error:
                logger.exception("%s: the server cannot do what the model asks for", self._label, extra={"model": self._label})
                reply = {"error": code_of(BackendError(f"the server failed: {type(error).__name__}"))}
            self._reply({"call": number, **reply}, [])

        try:
            loop = self._connected().loop
        except InferenceError:
            work.close()
            raise
        asyncio.run_coroutine_threadsafe(run(), loop)

    async def _cancel(self, number: int) -> dict[str, Any]:
        running = self._running.get(number)
        if running is not None:
            running[0].withdraw()
        return {}

    async def _ready(self, model: str, version: str) -> dict[str, Any]:
        try:
            return {"ready": await self._connected().core.says_ready(model, version)}
        except NotFoundError:
            return {"ready": False}

    async def _load(self, model: str, config: str, files: Mapping[str, bytes], caller: str | None) -> dict[str, Any]:
        await self._connected().core.load(model, config or None, files, caller=caller)
        return {}

    async def _unload(self, model: str) -> dict[str, Any]:
        core = self._connected().core
        try:
            core.versions(model)
        except NotFoundError:
            if core.knows(model):
                return {}  # it is unloaded already
            raise
        # In the background, as Triton does: the model may unload itself, which waits for this very request.
        core.wait_for(asyncio.get_running_loop().create_task(_unloaded(core.unload(model), model)))
        return {}


async def _unloaded(work: Coroutine[Any, Any, None], model: str) -> None:
    try:
        await work
    except InferenceError as error:
        logger.warning("model %r cannot be unloaded: %s", model, error)


class _Replying:
    """Sends the responses of one call to the copy that made it."""

    def __init__(self, calls: CopyCalls, reply: Reply, number: int) -> None:
        self._calls = calls
        self._reply = reply
        self._number = number
        self._unread: deque[Callable[[], None]] = deque()  # for each response that the copy has not taken

    def respond(self, model: Model, outputs: Tensors | InferenceError, *, final: bool, read: Callable[[], None]) -> None:
        """See CallListener."""
        if not final:
            self._unread.append(read)
        self._send(model, outputs, final=final)

    def read(self) -> None:
        """Let the called model go on, because the copy has taken the oldest response. On the event loop."""
        if self._unread:
            self._unread.popleft()()

    def done(self, model: Model | None, result: Tensors | InferenceError) -> None:
        """See CallListener."""
        self._calls.ended(self._number)
        self._send(model, result, final=True)

    def _send(self, model: Model | None, result: Tensors | InferenceError, *, final: bool) -> None:
        header: dict[str, Any] = {"call": self._number, "final": final}
        tensors: list[WireTensor] = []
        if isinstance(result, InferenceError):
            header["error"] = code_of(result)
        elif model is not None:
            for name, array in result.items():
                spec = model.outputs[name]
                tensors.append(to_wire(name, BY_WIRE[spec.datatype.wire], spec.to_client(array)))
            if isinstance(result, RemarkedAnswer):
                header["p"] = dict(result.parameters)
        self._reply(header, tensors)


def _parameters(header: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of a call, with those of a sequence as clients send them."""
    parameters: dict[str, Parameter] = dict(header["p"])
    if header["correlation"]:
        parameters[SEQUENCE_ID] = header["correlation"]
        parameters[SEQUENCE_START] = bool(header["flags"] & 1)
        parameters[SEQUENCE_END] = bool(header["flags"] & 2)
    if header["timeout"]:
        parameters[TIMEOUT] = header["timeout"]
    return parameters
