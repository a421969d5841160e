"""Stands in for Triton's backend `dyna_sequence`, and for the model of its example clients: adds CORRID at the END."""

from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # (Triton brings it)


class TritonPythonModel:
    """Answers INPUT + START; a sequence whose correlation ID is a text gets the sum of its INPUTs."""

    def initialize(self, args: dict[str, str]) -> None:
        """Begin without sequences."""
        self._sums: dict[str, Any] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        sequence, starts, ends = request.correlation_id(), values["START"].flat[0], values["END"].flat[0]
        if isinstance(sequence, str):
            result = values["INPUT"] + (0 if starts else self._sums.get(sequence, 0))
        else:
            result = values["INPUT"] + starts
        if ends:
            result = result + int(sequence)
        self._sums[str(sequence)] = result
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", result.astype(values["INPUT"].dtype))])
