from __future__ import annotations

import numpy as np
import onnx
import pytest

from export.errors import ExportError
from export.to_onnx.export_onnx import serialize
from export.verification.sessions import PROBE, Probe, open_session, probe, run_session

CRASH_AT_ALL = "import os, signal, sys\nif sys.argv[2] == 'ORT_ENABLE_ALL': os.kill(os.getpid(), signal.SIGSEGV)\n"


def test_a_sound_model_opens_at_the_first_level(model: onnx.ModelProto) -> None:
    assert probe(serialize(model)) == Probe(level="ORT_ENABLE_ALL")


def test_a_crash_is_recorded_and_the_next_level_taken(model: onnx.ModelProto) -> None:
    found = probe(serialize(model), program=CRASH_AT_ALL + PROBE)
    assert found == Probe(level="ORT_ENABLE_EXTENDED", crashes=("ORT_ENABLE_ALL: killed by SIGSEGV",))


def test_crashing_at_every_level_is_a_verdict(model: onnx.ModelProto) -> None:
    with pytest.raises(ExportError, match=r"crashes when it opens the model \(ORT_ENABLE_ALL: killed by SIGSEGV\)"):
        probe(serialize(model), levels=("ORT_ENABLE_ALL",), program=CRASH_AT_ALL)


def test_a_model_that_is_refused_is_no_crash(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ExportError, match=r"ONNX Runtime cannot open the model: .*NoSuchOperator"):
        probe(serialize(model))
    with pytest.raises(ExportError, match=r"ONNX Runtime cannot open the model: .*NoSuchOperator"):
        open_session(serialize(model), "ORT_ENABLE_ALL")


def test_inputs_that_do_not_fit_are_one_line(model: onnx.ModelProto) -> None:
    session = open_session(serialize(model), "ORT_ENABLE_ALL")
    with pytest.raises(ExportError, match=r"ONNX Runtime fails on the samples: .*rank") as caught:
        run_session(session, {"x": np.zeros(3, np.float16)})
    assert "\n" not in str(caught.value)
