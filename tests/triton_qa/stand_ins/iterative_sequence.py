"""Stands in for Triton's backend `iterative_sequence`: counts INPUT down to 0, with a response and a new turn each time."""

from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # (Triton brings it)


class TritonPythonModel:
    """Counts each sequence down."""

    def initialize(self, args: dict[str, str]) -> None:
        """Begin without sequences."""
        self._left: dict[int, Any] = {}

    def execute(self, requests: list[Any]) -> None:
        """Send what is left of each request's count."""
        for request in requests:
            sequence, sender = request.correlation_id(), request.get_response_sender()
            given = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self._left[sequence] = given
            self._left[sequence] = self._left[sequence] - 1
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", self._left[sequence])])
            if self._left[sequence].flat[0] > 0:
                sender.send(response)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
