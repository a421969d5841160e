"""Convolutions on a CUDA device: the sessions for different batch sizes, and the weights that these share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto

from halfserve.serve.backends.onnx_runtime.onnx_file import nodes_below, open_onnx, take_in

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
# Types that NumPy can hand to the runtime.
DTYPES: dict[int, np.dtype[Any]] = {TensorProto.FLOAT: np.dtype(np.float32), TensorProto.FLOAT16: np.dtype(np.float16)}
MAX_SESSIONS = 4  # most sessions of one copy of a model: each has its own memory for intermediate results
WEIGHT = 1  # place of the weight among a convolution's inputs


def has_convolutions(model: ModelProto) -> bool:
    """Return whether cuDNN computes nodes of a model by a plan for one shape."""
    nodes = nodes_below(model.graph.node, *(function.node for function in model.functions))
    return any(node.op_type in CONVOLUTIONS for node in nodes)


def few(sizes: Sequence[int]) -> list[int]:
    """Return at most MAX_SESSIONS of these rising sizes: the smallest, for a lone request, and the ones nearest to halves of
    the largest, so that at most about half of a large batch is padding.
    """
    found = {sizes[0]}
    for wanted in (sizes[-1] >> halvings for halvings in range(len(sizes))):
        if len(found) < MAX_SESSIONS:
            found.add(min(sizes, key=lambda size: (abs(size - wanted), -size)))
    return sorted(found)


def on_device(path: Path, device_id: int) -> dict[str, ort.OrtValue]:
    """Copy the weights of convolutions to a CUDA device; returns them by name, for `SessionOptions.add_initializer`.

    The other weights are left to each session, because a node on the CPU might read them.

    Raises:
        ModelLoadError: the file cannot be read.
    """
    with open_onnx(path) as opened:
        if opened.data_files:
            take_in(opened.model, path)
        opened.take_in()
        names = _only_of_convolutions(opened.model.graph.node)
        weights = [tensor for tensor in opened.model.graph.initializer if tensor.name in names]
        arrays = {tensor.name: _array(tensor) for tensor in weights}
    return {name: _on_device(array, device_id) for name, array in arrays.items() if array is not None}


def _only_of_convolutions(nodes: Iterable[NodeProto]) -> frozenset[str]:
    """Return the names of weights that only convolutions outside subgraphs take, as their weights."""
    main, uses = list(nodes), Counter[str]()
    for node in nodes_below(main):
        uses.update(node.input)
    taken = Counter(node.input[WEIGHT] for node in main if node.op_type in CONVOLUTIONS and len(node.input) > WEIGHT)
    return frozenset(name for name, times in taken.items() if times == uses[name])


def _array(tensor: TensorProto) -> np.ndarray[Any, Any] | None:
    """Return a weight's values; None if its type is not shared, or if the file holds it in another form than bytes."""
    dtype = DTYPES.get(tensor.data_type)
    if dtype is None or len(tensor.raw_data) != math.prod(tensor.dims) * dtype.itemsize:
        return None
    return np.frombuffer(tensor.raw_data, dtype).reshape(tuple(tensor.dims))


def _on_device(array: np.ndarray[Any, Any], device_id: int) -> ort.OrtValue:
    # A session takes no memory that the runtime has allocated itself, so that the value is passed on by DLPack.
    return ort.OrtValue.from_dlpack(ort.OrtValue.ortvalue_from_numpy(array, "cuda", device_id))
