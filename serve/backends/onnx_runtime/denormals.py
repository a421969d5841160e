"""Keep a session's wish to flush subnormal numbers to zero from reaching other models.

ONNX Runtime carries out `session.set_denormal_as_zero` in the threads of the session's own pool. But what a process's first
session asks for it also does to the thread that opens it, and threads that start there later inherit that: the answers of one
model would depend on what another one, loaded before, asked for.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import onnxruntime as ort
from onnx import TensorProto, helper

logger = logging.getLogger(__name__)

KEY = "session.set_denormal_as_zero"


@functools.cache
def keep_to_own_threads() -> None:
    """Have the first session of this process be one that wishes nothing. Before any other session that does."""
    number = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "nothing", number[:1], number[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def warn_if_in_vain(session: ort.InferenceSession, path: Path) -> None:
    """Say so where a session that wishes it has no threads of its own to do it in."""
    if session.get_session_options().intra_op_num_threads == 1:
        logger.warning("%s: %s has no effect with one thread; set intra_op_thread_count to 2 or more", path, KEY)
