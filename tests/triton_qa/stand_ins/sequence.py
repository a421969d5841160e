"""Stands in for Triton's backend `sequence`: OUTPUT is the sum of the INPUTs of each sequence so far, by slot of the batch."""

import json
import time
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # (Triton brings it)


class TritonPythonModel:
    """Sums the inputs of each sequence."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the delay, in milliseconds."""
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self._delay = int(parameters.get("execute_delay_ms", {}).get("string_value", 0)) / 1000
        self._sums: dict[int, Any] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request with its sequence's sum."""
        time.sleep(self._delay)
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        key = request.correlation_id()
        if values["READY"].flat[0]:
            before = 0 if values["START"].flat[0] else self._sums.get(key, 0)
            self._sums[key] = before + values["INPUT"]
        given = self._sums.get(key, values["INPUT"])  # a slot that is not ready gets any answer
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", given.astype(values["INPUT"].dtype))])
