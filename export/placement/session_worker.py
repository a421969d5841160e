"""Opens a model in ONNX Runtime and prints its placement. A program of its own, as some models crash the runtime.

Arguments: the model file, the optimisation level, providers separated by commas, a file for the optimised model or nothing.
It prints one JSON object, `{"assigned": {provider: {op_type: nodes}}, "providers": [...], "version": ...}`; or, with exit
code 1, the reason for which the runtime refuses the model.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import onnxruntime

CUDA = "CUDAExecutionProvider"


def main(model: str, level: str, providers: str, optimized: str) -> None:
    """Open the model, write the optimised one if asked to, print the assignment."""
    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    entries = {"session.record_ep_graph_assignment_info": "1"}
    if optimized:
        options.optimized_model_filepath = optimized
        entries["session.optimized_model_external_initializers_file_name"] = f"{Path(optimized).stem}.bin"
        entries["session.optimized_model_external_initializers_min_size_in_bytes"] = "1024"
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if CUDA in providers:
        from halfserve.nvidia_libraries import load_nvidia_libraries  # noqa: PLC0415  (the CPU needs nothing of the package)

        load_nvidia_libraries()
    try:
        session = onnxruntime.InferenceSession(model, options, providers=providers.split(","))
    except Exception as error:  # noqa: BLE001  (the runtime's exceptions have no common class of their own)
        sys.exit((str(error).strip() or type(error).__name__).splitlines()[0])
    assigned: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        assigned.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    sys.stdout.write(
        json.dumps({"assigned": assigned, "providers": session.get_providers(), "version": onnxruntime.__version__})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
