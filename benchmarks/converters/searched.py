"""Our converter with its search for nodes that must stay float32, as `halfserve convert` does with samples."""

from __future__ import annotations

import onnx

from benchmarks.converters.synthetic_inputs import trials
from halfserve.export.certificate.budget import Budget
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.search.smallest_fp32_set import find_fp32_nodes

MAX_RUNS = 60


def ours_searched(model: bytes, keep_io: bool) -> bytes:
    """Convert so that the generated inputs of `synthetic_inputs` stay within the default budget, 1 % of an output's scale.

    Raises:
        ValueError: The float32 model accepts none of the generated inputs.
    """
    feeds = [trial.feeds for trial in trials(model)]
    if not feeds:
        raise ValueError("the float32 model takes none of the made-up inputs")
    source = onnx.load_from_string(model)
    found = find_fp32_nodes(source, feeds, budget=Budget(), keep_io_types=keep_io, adversarial=False, max_runs=MAX_RUNS)
    converted = convert_float_to_float16(source, keep_io_types=keep_io, node_block_list=found.node_block_list)
    return converted.SerializeToString(deterministic=True)
