from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from halfserve.export.cli.output import placement_lines, placement_table
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.placement.audit import CPU, Placement, audit_placement, find_islands
from tests.export.placement.half_models import half_model
from tests.export.stored_models import parse, sums, with_a_body, with_data_files
from tests.whole_words import printed

CUDA = "CUDAExecutionProvider"


@pytest.fixture(scope="module")
def placement() -> Placement:
    return audit_placement(half_model(), providers=[CPU], reasons={"exp": "its output overflows"})


def test_every_node_is_where_the_runtime_put_it(placement: Placement) -> None:
    assert placement.assigned == {
        CPU: {"MatMul": 1, "Tan": 1, "Cast": 2, "Exp": 1, "Sqrt": 1, "Reshape": 1, "GridSample": 1},
    }
    assert (placement.level, placement.crashes) == ("ORT_ENABLE_ALL", ())
    assert placement.runtime == onnxruntime.__version__


def test_casts_of_the_file_and_of_the_runtime_are_told_apart(placement: Placement) -> None:
    assert placement.casts_in_file == 2
    assert placement.casts_at_runtime is not None
    assert placement.casts_at_runtime > placement.casts_in_file, "the CPU has float16 kernels for none of these"
    assert placement.copies == 0


def test_it_travels_as_json(placement: Placement) -> None:
    content = placement.to_json()
    assert json.loads(json.dumps(content)) == content
    assert content["islands"][0]["reasons"] == ["its output overflows"]


def test_a_table_and_a_few_lines_for_people(placement: Placement) -> None:
    first, *rest = placement_lines(placement)
    assert first.startswith("placement 8 on CPU; casts 2 in the file, ")
    assert any("tan: ONNX Runtime 1.31.1 has no CUDA kernel for Tan of opset 7" in line for line in rest)
    text = printed(placement_table(placement), 200)
    assert "exp, sqrt" in text
    assert "its output overflows" in text


def test_a_model_with_data_files_is_opened_where_it_lies(tmp_path: Path) -> None:
    found = audit_placement(with_data_files(sums(), tmp_path / "m.onnx"), providers=[CPU])
    assert found.assigned == {CPU: {"Add": 4, "Mul": 1}}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.0.bin", "m.onnx"], "and nothing is left beside it"


def test_the_optimised_model_of_a_large_one_is_not_asked_for() -> None:
    found = audit_placement(half_model(), providers=[CPU], largest_optimized_bytes=100)
    assert found.assigned[CPU]["MatMul"] == 1
    assert (found.casts_at_runtime, found.copies, found.nodes_at_runtime) == (None, None, None)
    assert placement_lines(found)[0] == "placement 8 on CPU; casts 2 in the file; float32 islands 1"


def test_an_absent_provider_is_named() -> None:
    with pytest.raises(ExportError, match="this ONNX Runtime has no 'NoneExecutionProvider'; it has .*CPUExecutionProvider"):
        audit_placement(half_model(), providers=["NoneExecutionProvider"])


def test_what_the_runtime_refuses_is_one_line() -> None:
    model = half_model()
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    with pytest.raises(ExportError, match=r"ONNX Runtime .* cannot open the model: .*Type Error.*"):
        audit_placement(model, providers=[CPU])


def test_a_crash_is_recorded_and_the_next_level_is_tried(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    real = Path(audit_placement.__code__.co_filename).with_name("session_worker.py")
    worker.write_text(
        "import os, runpy, signal, sys\n"
        "if sys.argv[2] == 'ORT_ENABLE_ALL': os.kill(os.getpid(), signal.SIGSEGV)\n"
        f"runpy.run_path({str(real)!r}, run_name='__main__')\n"
    )
    found = audit_placement(sums(), providers=[CPU], worker=worker)
    assert (found.level, found.crashes) == ("ORT_ENABLE_EXTENDED", ("ORT_ENABLE_ALL: killed by SIGSEGV",))
    with pytest.raises(ExportError, match="crashes when it opens the model \\(ORT_ENABLE_ALL: killed by SIGSEGV\\)"):
        audit_placement(sums(), providers=[CPU], worker=worker, levels=["ORT_ENABLE_ALL"])


def test_the_libraries_of_cuda_are_looked_for_where_pip_puts_them(tmp_path: Path) -> None:
    if CUDA not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime is built without CUDA")
    worker, sought = tmp_path / "worker.py", tmp_path / "sought"
    real = Path(audit_placement.__code__.co_filename).with_name("session_worker.py")
    worker.write_text(
        "import pathlib, runpy\n"
        "from halfserve import nvidia_libraries\n"
        f"nvidia_libraries.load_nvidia_libraries = pathlib.Path({str(sought)!r}).touch\n"
        f"runpy.run_path({str(real)!r}, run_name='__main__')\n"
    )
    assert audit_placement(sums(), providers=[CPU], worker=worker).assigned.keys() == {CPU}
    assert not sought.exists()
    assert audit_placement(sums(), providers=[CUDA, CPU], worker=worker).nodes_at_runtime
    assert sought.exists()


@pytest.mark.gpu
def test_cuda_bounces_what_was_predicted() -> None:
    if CUDA not in onnxruntime.get_available_providers() or not Path("/dev/nvidia0").exists():
        pytest.skip("no CUDA device")
    found = audit_placement(half_model(), providers=[CUDA, CPU])
    assert {"Tan", "GridSample"} <= found.assigned[CPU].keys()
    assert found.assigned[CUDA]["MatMul"] == 1
    assert found.copies


def test_connected_float32_nodes_are_one_island() -> None:
    (island,) = find_islands(open_model(half_model()), {"sqrt": "kept", "exp": "kept", "tan": "not there"})
    assert island.nodes == ("exp", "sqrt")
    assert island.op_types == {"Exp": 1, "Sqrt": 1}
    assert island.reasons == ("kept",)


def test_casts_part_islands() -> None:
    model = half_model()
    between = [
        helper.make_node("Cast", ["d"], ["d16"], name="there", to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["d16"], ["d32"], name="back", to=TensorProto.FLOAT),
    ]
    model.graph.node[4].input[0] = "d32"
    nodes = [*model.graph.node[:4], *between, *model.graph.node[4:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert [island.nodes for island in find_islands(open_model(model))] == [("exp",), ("sqrt",)]


def test_a_float32_model_is_one_island_and_a_float16_one_has_none() -> None:
    (island,) = find_islands(open_model(sums()))
    assert len(island.nodes) == 5
    assert find_islands(open_model(sums(dtype=np.float16))) == ()


def test_bodies_have_islands_of_their_own() -> None:
    groups = [island.nodes for island in find_islands(open_model(with_a_body()))]
    assert sorted(groups) == [("if",), ("inner_add",), ("other",)]


def test_float32_scales_do_not_make_a_node_float32() -> None:
    text = "g (float16[1, 1, 2, 2] x) => (float16[1, 1, 4, 4] y) { [resize] y = Resize (x, , scales) }"
    model = parse(text, ir=10, scales=np.array([1.0, 1, 2, 2]))
    onnx.checker.check_model(model, full_check=True)
    assert find_islands(open_model(model)) == ()
