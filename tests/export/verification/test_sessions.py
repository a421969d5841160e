from __future__ import annotations

import numpy as np
import onnx
import pytest

from export.errors import ExportError
from export.model_file import serialize
from export.verification.sessions import open_session, run_session


def test_outputs_come_by_name(model: onnx.ModelProto) -> None:
    outputs = run_session(open_session(serialize(model), "ORT_ENABLE_ALL"), {"x": np.ones((1, 1), np.float16)})
    assert outputs == {"y": np.float16(2)}


def test_a_model_that_is_refused_is_one_line(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ExportError, match=r"ONNX Runtime cannot open the model: .*NoSuchOperator"):
        open_session(serialize(model), "ORT_ENABLE_ALL")


def test_inputs_that_do_not_fit_are_one_line(model: onnx.ModelProto) -> None:
    session = open_session(serialize(model), "ORT_ENABLE_ALL")
    with pytest.raises(ExportError, match=r"ONNX Runtime fails on the samples: .*rank") as caught:
        run_session(session, {"x": np.zeros(3, np.float16)})
    assert "\n" not in str(caught.value)
