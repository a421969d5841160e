from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from export.errors import ExportError
from export.files.model_file import serialize
from export.verification.children import CPU, CUDA, WORKER, Children
from tests.export.verification.workers import misbehaving_worker

ALL, EXTENDED = "ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED"
X = np.array([[1.0], [2.0]], np.float32)


@pytest.fixture
def file(model: onnx.ModelProto, tmp_path: Path) -> Path:
    path = tmp_path / "doubling.onnx"
    path.write_bytes(serialize(model))
    return path


def test_batches_come_back_in_order_and_one_that_fails_stops_no_other(file: Path) -> None:
    with Children() as children:
        answer = children.run(file, children.stage([{"x": X}, {"x": np.ones((2, 9))}, {"x": 3 * X}]), level=ALL)
    assert (answer.trouble, answer.providers) == (None, (CPU,))
    first, second, third = answer.batches
    values = [batch[0] for batch in (first, third) if not isinstance(batch, str)]
    assert [value.dtype for value in values if isinstance(value, np.ndarray)] == [np.float16, np.float16]
    assert [value.tolist() for value in values if isinstance(value, np.ndarray)] == [[[2], [4]], [[6], [12]]]
    assert "invalid dimensions for input: x" in str(second)


def test_the_libraries_of_cuda_are_looked_for_where_pip_puts_them(tmp_path: Path, file: Path) -> None:
    sought = tmp_path / "sought"
    before = f"import onnxruntime, pathlib\nonnxruntime.preload_dlls = pathlib.Path({str(sought)!r}).touch"
    with Children(worker=misbehaving_worker(tmp_path, "pass", before=before)) as children:
        assert children.run(file, [], level=ALL).trouble is None
        assert not sought.exists()
        children.run(file, [], level=ALL, provider=CUDA)
    assert sought.exists()


def test_a_refusal_is_one_line(tmp_path: Path, model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "NoSuchOperator"
    (tmp_path / "bad.onnx").write_bytes(serialize(model))
    with Children() as children:
        answer = children.run(tmp_path / "bad.onnx", [], level=ALL)
    assert "NoSuchOperator" in str(answer.refusal)
    assert "\n" not in str(answer.trouble)


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os.abort()", "killed by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (out of memory?)"),
        ("sys.exit('libcuda is missing')", "ended with exit status 1: libcuda is missing"),
    ],
)
def test_a_crash_is_an_answer_and_the_next_model_runs(file: Path, tmp_path: Path, deed: str, words: str) -> None:
    worker = misbehaving_worker(tmp_path, f"if request['level'] == '{ALL}': {deed}")
    with Children(worker=worker) as children:
        batches = children.stage([{"x": X}])
        assert children.run(file, batches, level=ALL).crash == words
        assert children.run(file, batches, level=EXTENDED).trouble is None
        assert children.run(file, batches, level=ALL).crash == words


def test_what_was_done_before_a_crash_is_kept(file: Path, tmp_path: Path) -> None:
    deed = "if '1-0.npy' in str(request['batches'][1:]): request['batches'][1]['x'] = 'boom'"
    worker = misbehaving_worker(tmp_path, deed, on_load="if file == 'boom': os.abort()")
    with Children(worker=worker) as children:
        answer = children.run(file, children.stage([{"x": X}, {"x": X}]), level=ALL)
    assert answer.crash == "killed by SIGABRT"
    assert len(answer.batches) == 1


def test_a_hang_ends_and_leaves_no_process(file: Path, tmp_path: Path) -> None:
    worker = misbehaving_worker(tmp_path, "print(os.getpid(), file=open(sys.argv[0] + '.pid', 'w')); threading.Event().wait()")
    with Children(worker=worker, silence_seconds=2) as children:
        assert children.run(file, [], level=ALL).crash == "no answer within 2 s"
        pid = int(Path(f"{worker}.pid").read_text())
        assert not Path(f"/proc/{pid}").exists() or sys.platform != "linux"


def test_damage_done_by_one_model_is_not_held_against_the_next(file: Path, tmp_path: Path) -> None:
    worker = misbehaving_worker(tmp_path, "served.append(1)\n    if len(served) == 2: os.abort()", before="served = []")
    with Children(worker=worker) as children:
        assert [children.run(file, [], level=ALL).crash for _ in range(3)] == [None, None, None]


def test_files_are_gone_in_the_end_whatever_happened(file: Path) -> None:
    folders: list[Path] = []

    def fails() -> None:
        with Children() as children:
            folders.append(children.new_folder())
            children.run(file, children.stage([{"x": X}]), level=ALL)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not folders[0].parent.exists()


def test_a_worker_whose_parent_is_killed_cleans_up_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "left.npy").touch()
    command = [sys.executable, "-P", str(WORKER), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=60) == 0
    assert not folder.exists()


def test_the_worker_and_verification_do_not_load_torch() -> None:
    program = f"import sys, runpy, export.verification.verify; runpy.run_path({str(WORKER)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_samples_that_cannot_be_written_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with Children() as children, pytest.raises(ExportError, match="cannot write the samples to .*: No space left on device"):
        children.stage([{"x": X}])
