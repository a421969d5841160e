"""Stands in for Triton's backend `identity`: OUTPUTn is INPUTn, after the delay that the parameters ask for."""

import json
import time
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # (Triton brings it)


class TritonPythonModel:
    """Answers each request with its inputs."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the delays, in milliseconds."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self._outputs = {output["name"] for output in config["output"]}
        self._delay = int(parameters.get("execute_delay_ms", 0)) / 1000
        if int(parameters.get("instance_wise_delay_multiplier", 0)):
            instance = int(args["model_instance_name"].rpartition("_")[2])
            self._delay *= max(1, instance * int(parameters["instance_wise_delay_multiplier"]))
        time.sleep(int(parameters.get("creation_delay_sec", 0)))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Copy each input to the output of its number."""
        if self._delay:
            time.sleep(self._delay)
        return [
            pb_utils.InferenceResponse([copy for copy in map(self._copy, request.inputs()) if copy]) for request in requests
        ]

    def _copy(self, tensor: Any) -> Any:
        name = tensor.name().replace("INPUT", "OUTPUT")
        return pb_utils.Tensor(name, tensor.as_numpy()) if name in self._outputs else None
