from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from export.certificate.budget import Budget
from export.errors import ExportError
from export.files.model_file import open_model, serialize
from export.verification.children import WORKER, Children
from export.verification.comparison import Comparison
from export.verification.executions import LEVELS
from export.verification.feeds import make_feeds
from export.verification.interface import inputs_of
from export.verification.levels import Runtime, run_levels
from export.verification.verify import verify
from tests.export.verification.workers import misbehaving_worker

X = np.linspace(0, 1, 40, dtype=np.float32)[:, None]
ALL = "request['level'] == 'ORT_ENABLE_ALL'"


def levels(model: onnx.ModelProto, worker: Path = WORKER) -> Runtime:
    candidate = open_model(model)
    with Children(worker=worker) as children:
        feeds = make_feeds(inputs_of(model), X, 16)
        return run_levels(Comparison(model, candidate, children, feeds, []), children, Budget())


def test_a_sound_model_runs_at_the_highest_level_and_is_tried_at_all(model: onnx.ModelProto) -> None:
    runtime = levels(model)
    assert runtime.probe.level == "ORT_ENABLE_ALL"
    assert runtime.probe.crashes == ()
    assert [verdict.level for verdict in runtime.levels] == list(LEVELS)
    assert all(verdict.trouble is None and verdict.max_scaled_error == 0 for verdict in runtime.levels)


def test_a_crash_is_recorded_and_the_next_level_taken(model: onnx.ModelProto, tmp_path: Path) -> None:
    crashing = misbehaving_worker(tmp_path, f"if {ALL} and request['provider']: os.kill(os.getpid(), signal.SIGSEGV)")
    runtime = levels(model, crashing)
    assert runtime.probe.level == "ORT_ENABLE_EXTENDED"
    assert runtime.probe.crashes == ("ORT_ENABLE_ALL: killed by SIGSEGV",)
    assert len(runtime.answer.batches) == 3


def test_a_level_that_changes_answers_is_no_sound_one(model: onnx.ModelProto, tmp_path: Path) -> None:
    deed = "global wrong; wrong = len(asked) == 1; asked.append(1)"
    wrong = misbehaving_worker(tmp_path, deed, before="asked = []", on_load="if wrong: return 2 * load(file)")
    runtime = levels(model, wrong)
    assert runtime.probe.level == "ORT_ENABLE_EXTENDED"
    (trouble,) = runtime.probe.crashes
    assert trouble.startswith("ORT_ENABLE_ALL: over budget: output 'y': max error 1 of the output's scale 2")


def test_crashing_at_every_level_is_one_line(model: onnx.ModelProto, tmp_path: Path) -> None:
    crashing = misbehaving_worker(tmp_path, "os.abort()")
    with pytest.raises(ExportError, match=r"crashes when it opens the reference \(ORT_ENABLE_ALL: killed by SIGABRT; ORT_EN"):
        levels(model, crashing)


def test_a_candidate_alone_that_crashes_everywhere_is_one_line(model: onnx.ModelProto, tmp_path: Path) -> None:
    deed = f"if {str(tmp_path / 'half.onnx')!r} == request['model']: os.abort()"
    path = tmp_path / "half.onnx"
    path.write_bytes(serialize(model))
    with Children(worker=misbehaving_worker(tmp_path, deed)) as children:
        comparison = Comparison(model, open_model(path), children, make_feeds(inputs_of(model), X, 16), [])
        with pytest.raises(
            ExportError, match=r"crashes on the model \(ORT_ENABLE_ALL: killed by SIGABRT; .*try another release"
        ):
            run_levels(comparison, children, Budget())


CRASHING = """
<ir_version: 8, opset_import: ["": 17]>
g (float16[N,T,4] x) => (float16[T,N,5] y) { t = Transpose<perm=[1,0,2]>(x)  y = MatMul(t, w) }
"""


def test_a_model_that_crashes_onnx_runtime_1_31_is_verified_all_the_same() -> None:
    candidate = parser.parse_model(CRASHING)
    reference = parser.parse_model(CRASHING.replace("float16[", "float["))
    weight = np.random.default_rng(0).standard_normal((4, 5))
    candidate.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float16), "w"))
    reference.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), "w"))
    x = np.random.default_rng(1).standard_normal((3, 2, 4)).astype(np.float32)
    certificate = verify(reference, candidate, x, cuda=False)
    assert certificate.passed
    crashed = [f"{verdict.level}: {verdict.trouble}" for verdict in certificate.levels if verdict.trouble]
    assert list(certificate.probe.crashes) == crashed  # which release crashes where is its own affair
    assert all("killed by SIGSEGV" in text for text in crashed)
