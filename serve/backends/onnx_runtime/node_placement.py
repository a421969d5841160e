"""Which of ONNX Runtime's providers computes how many of a model's nodes: a model on the GPU may leave some to the CPU."""

from __future__ import annotations

from collections import Counter

import onnxruntime as ort

# Costs nothing that could be measured: the runtime writes down what it decides anyway.
RECORD_ENTRY = ("session.record_ep_graph_assignment_info", "1")


def nodes_by_provider(session: ort.InferenceSession) -> str:
    """Such as "CUDAExecutionProvider=31, CPUExecutionProvider=2", most first; "" for a model without nodes.

    The session must have been opened with RECORD_ENTRY. Nodes are counted as they were before the runtime fused them.
    """
    counts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[str(part.ep_name)] += len(part.get_nodes())
    return ", ".join(f"{name}={count}" for name, count in counts.most_common())
