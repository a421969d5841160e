"""Does with a model.py what the server asks for, in the model's process or in the server's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfserve.serve.backends.python_child.model_host import ModelHost, failed
from halfserve.serve.backends.python_child.server_access import ServerAccess
from halfserve.serve.backends.python_child.triton_errors import phrases
from halfserve.serve.backends.python_child.triton_requests import InferenceRequest
from halfserve.serve.backends.python_child.triton_tensors import Tensor
from halfserve.serve.backends.python_child.wire import WireTensor


class ModelServer:
    """One copy of a model. Used by one thread at a time."""

    def __init__(self, access: ServerAccess) -> None:
        self._access = access
        self._host: ModelHost | None = None

    def do(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> tuple[dict[str, Any], list[WireTensor]]:
        """Do what a message asks for: complete, load, execute or finalize.

        Returns:
            The reply's header and tensors.

        Raises:
            ModelFailedError: the model.py failed.
        """
        if header["k"] == "execute" and self._host is not None:
            return self._execute(self._host, header["requests"], tensors)
        if header["k"] == "finalize":
            if self._host is not None:
                self._host.finalize()
            return {}, []
        self._host = ModelHost(Path(header["path"]))
        if header["k"] == "complete":
            return {"config": self._host.completed(header["config"])}, []
        phrases.update(header.get("phrases", {}))
        self._host.initialize(header["arguments"], is_decoupled=header["decoupled"])
        self._access.on_check = self._host.readiness
        return {"checks_readiness": self._host.checks_readiness}, []

    def _execute(
        self, host: ModelHost, messages: Sequence[Mapping[str, Any]], tensors: list[WireTensor]
    ) -> tuple[dict[str, Any], list[WireTensor]]:
        received, at = [], 0
        for message in messages:
            end = at + message["n"]
            inputs = [Tensor.from_wire(tensor) for tensor in tensors[at:end]]
            received.append(InferenceRequest.received(self._access, message, inputs, is_decoupled=host.is_decoupled))
            at = end
        responses = host.execute(received)
        outputs: list[WireTensor] = []
        try:
            for response in responses:
                if response is not None and not response.has_error():
                    outputs += [tensor.to_wire() for tensor in response.output_tensors()]
        except (TypeError, UnicodeError, ValueError) as error:  # elements that are no bytes
            raise failed("execute", error) from error
        if any(request.is_rescheduled for request in received):
            self._access.call("sync", {}, [])  # so that responses which they have sent come before this reply
        replies = [
            response.to_message() if response is not None else {"rescheduled": 1} if request.is_rescheduled else None
            for request, response in zip(received, responses, strict=True)
        ]
        return {"responses": replies}, outputs
