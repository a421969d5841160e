"""What an exported model answers, beside what the torch model answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import Tensor, nn

from halfserve.export.onnx_files.model_file import serialize
from halfserve.export.to_onnx.forward_call import named_tensors


def session(model: onnx.ModelProto | str) -> Any:
    """A session in this process: at the level at which ONNX Runtime 1.31 opens every float16 model."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    source = model if isinstance(model, str) else serialize(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def fed(opened: Any, inputs: Mapping[str, Any], *, half: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """The session's outputs by name; floating inputs are rounded where the model takes float16."""
    given = {place.name: inputs[place.name] for place in opened.get_inputs()}
    feeds = {name: (value.half() if half and value.is_floating_point() else value).numpy() for name, value in given.items()}
    names = [place.name for place in opened.get_outputs()]
    return dict(zip(names, opened.run(names, feeds), strict=True))


def difference(module: nn.Module, opened: Any, inputs: Mapping[str, Any], *, half: bool = False) -> float:
    """The largest difference of any output, in parts of that output's largest magnitude in float32."""
    with torch.no_grad():
        wanted = named_tensors(module(**inputs))
    found = fed(opened, inputs, half=half)
    assert list(found) == [name for name, _ in wanted]
    worst = 0.0
    for name, tensor in wanted:
        assert found[name].shape == tuple(tensor.shape), name
        error = np.abs(found[name].astype(np.float64) - tensor.double().numpy()).max()
        worst = float(np.maximum(worst, error / tensor.abs().max().item()))  # not max, which passes over NaN
    return worst


def halved(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with floating tensors in float16."""
    return {n: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in inputs.items()}
