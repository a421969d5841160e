"""Stands in for Triton's backend `repeat`: sends each element of IN after its DELAY, and waits WAIT before it returns (ms)."""

import json
import threading
import time
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # (Triton brings it)


class TritonPythonModel:
    """Answers each request from a thread of its own where the model is decoupled."""

    def initialize(self, args: dict[str, str]) -> None:
        """See whether the model is decoupled."""
        config = json.loads(args["model_config"])
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._outputs = {output["name"] for output in config["output"]}

    def execute(self, requests: list[Any]) -> None:
        """Send the responses, and return when the last request allows it."""
        wait = 0
        for request in requests:
            values = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
            wait = int(values["WAIT"][0]) if "WAIT" in values else 0
            sender = request.get_response_sender()
            if "DELAY" in values and len(values["DELAY"]) != len(values["IN"]):
                shapes = f"[{len(values['IN'])}] and [{len(values['DELAY'])}]"
                error = pb_utils.TritonError(
                    f"expected IN and DELAY shape to match, got {shapes}", pb_utils.TritonError.INVALID_ARG
                )
                sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            if self._is_decoupled:
                threading.Thread(target=self._send, args=(sender, values)).start()
            else:
                self._send(sender, values)
        time.sleep(wait / 1000)

    def _send(self, sender: Any, values: dict[str, Any]) -> None:
        count = len(values["IN"])
        for index in range(count):
            time.sleep(int(values["DELAY"][index]) / 1000 if "DELAY" in values else 0)
            tensors = [pb_utils.Tensor("OUT", values["IN"][index : index + 1])]
            if "IDX" in self._outputs:
                tensors.append(pb_utils.Tensor("IDX", values["IN"][:1].astype("uint32") * 0 + index))
            is_last = not self._is_decoupled and index == count - 1
            sender.send(
                pb_utils.InferenceResponse(tensors), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
            )
        if self._is_decoupled or not count:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
