"""Stands in for Triton's backend `square`: a decoupled model that answers n with n responses, each of which holds n."""

import threading
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # (Triton brings it)


class TritonPythonModel:
    """Answers each request from a thread of its own."""

    def execute(self, requests: list[Any]) -> None:
        """Start a thread for each request."""
        for request in requests:
            count = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            threading.Thread(target=_answer, args=(request.get_response_sender(), count)).start()


def _answer(sender: Any, count: Any) -> None:
    for _ in range(int(count.flat[0])):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", count)]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
