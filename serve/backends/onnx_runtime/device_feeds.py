"""Inputs of a session that lie on its device already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import onnxruntime as ort

from halfserve.serve.engine.execution.device_inputs import DeviceRows
from halfserve.serve.engine.tensors import Array

Feed: TypeAlias = Array | DeviceRows


def run_session(session: ort.InferenceSession, wanted: Sequence[str], feeds: Mapping[str, Feed], options: Any) -> list[Array]:
    """Compute outputs, which are copied to the host.

    Raises:
        DeviceReadError: an input on the device cannot be read.
        Exception: any exception of the runtime.
    """
    if not any(isinstance(feed, DeviceRows) for feed in feeds.values()):
        arrays: Any = session.run(wanted, feeds, options)
        return list(arrays)
    binding = session.io_binding()
    for name, feed in feeds.items():
        if not isinstance(feed, DeviceRows):
            binding.bind_cpu_input(name, feed)
            continue
        value = ort.OrtValue.ortvalue_from_shape_and_type(list(feed.shape), feed.dtype, "cuda", feed.device_id)
        feed.copy_to(value.data_ptr())
        binding.bind_ortvalue_input(name, value)
    for name in wanted:
        binding.bind_output(name)
    session.run_with_iobinding(binding, options)
    return list(binding.copy_outputs_to_cpu())
