from __future__ import annotations

import ast
import os
import select
import signal
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from halfserve.serve.backends import python_child
from halfserve.serve.backends.python import model_runners, python_backend
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import Trust
from halfserve.serve.engine.config.model_config import config_from_json
from halfserve.serve.engine.errors import InvalidArgumentError, ModelLoadError
from halfserve.serve.model_control.uploads import write_upload
from tests.serve.backends.python.python_models import HEAD, X_TO_Y, load, save_python_model, serving
from tests.serve.backends.python.test_decoupled_models import COUNTS, DECOUPLED, Stream
from tests.serve.backends.python.test_python_models import infer

ON_THREAD = 'parameters { key: "halfserve.python_isolation" value { string_value: "thread" } }'
CHILD = "halfserve.serve.backends.python_child"
TELLS_PID = """
class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        if x[0] < 0:
            raise SystemExit("enough")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([os.getpid()], np.float32))])]
"""
CALLS_OTHER = """
class TritonPythonModel:
    def execute(self, requests):
        call = pb_utils.InferenceRequest(model_name="pid", requested_output_names=["y"], inputs=requests[0].inputs())
        return [pb_utils.InferenceResponse(call.exec().output_tensors())]
"""


def environment(parameter: str) -> str:
    return f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{parameter}" }} }}'


def test_a_message_that_cannot_be_read_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It announces a shared memory file that does not come, as where the server may open no more files."""
    code = """
    from halfserve.serve.backends.python_child import server_access, wire

    class TritonPythonModel:
        def execute(self, requests):
            head = json.dumps({"k": "respond", "number": 0, "final": 1, "t": [["y", "FP32", [1], 0, 4]], "s": 1, "new": 1})
            channel = server_access.server()._send.__self__
            channel._socket.sendall(wire.PREFIX.pack(len(head), 0) + head.encode())
            time.sleep(600)
    """
    save_python_model(tmp_path, "garbled", code)
    with (
        serving(tmp_path) as server,
        InferenceServerClient(server.address) as client,
        pytest.raises(InferenceServerException, match=r"UNAVAILABLE\] the model's process failed"),
    ):
        infer(client, "garbled", np.ones(1, np.float32))
    # The request is tried once more.
    (text,) = {record.getMessage() for record in caplog.records if "message cannot be read" in record.getMessage()}
    assert text.endswith(": a shared memory file has not arrived: this process may open no more files (ulimit -n)")
    assert not any(record.exc_info for record in caplog.records)


def test_a_thread_runs_a_model_in_the_server(tmp_path: Path) -> None:
    save_python_model(tmp_path, "pid", TELLS_PID, X_TO_Y + ON_THREAD)
    save_python_model(tmp_path, "calls", CALLS_OTHER, X_TO_Y + ON_THREAD)
    save_python_model(tmp_path, "counts", COUNTS, DECOUPLED + ON_THREAD)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "pid", np.ones(1, np.float32)) == [os.getpid()]
        assert infer(client, "calls", np.ones(1, np.float32)) == [os.getpid()]
        with pytest.raises(InferenceServerException, match=r"INTERNAL\] .*'pid'.* SystemExit: enough"):
            infer(client, "pid", -np.ones(1, np.float32))
        stream = Stream(client)
        stream.ask("counts", 2, enable_empty_final_response=True)
        assert [stream.next()[1:] for _ in range(3)] == [(0, False), (1, False), (None, True)]
        client.stop_stream()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with numpy."""
    home = tmp_path_factory.mktemp("home") / "environment"
    venv.create(home, symlinks=True)
    packages = next(home.glob("lib/python*/site-packages"))
    (packages / "numpy.pth").write_text(str(Path(np.__file__).parent.parent))
    return home


TELLS_PREFIX = """
class TritonPythonModel:
    def execute(self, requests):
        is_there = sys.prefix == requests[0].inputs()[0].as_numpy()[0].decode()
        print(sys.prefix, file=sys.stderr)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([is_there]))])]
"""
TEXT_TO_BOOL = """
input { name: "x" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "y" data_type: TYPE_BOOL dims: [ 1 ] }
"""


def test_a_model_runs_in_its_own_environment(tmp_path: Path, home: Path) -> None:
    save_python_model(tmp_path, "prefix", TELLS_PREFIX, TEXT_TO_BOOL + environment(str(home)))
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "prefix", np.array([str(home).encode()], object), datatype="BYTES").all()


def test_an_archived_environment_is_unpacked(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = TEXT_TO_BOOL + environment("$$TRITON_MODEL_DIRECTORY/packed.tar.gz")
    save_python_model(tmp_path / "models", "prefix", TELLS_PREFIX, config)
    with tarfile.open(tmp_path / "models" / "prefix" / "packed.tar.gz", "w:gz") as archive:
        archive.add(home, ".")
    with serving(tmp_path / "models") as server, InferenceServerClient(server.address) as client:
        (unpacked,) = (tmp_path / "cache" / "halfserve" / "python-environments").iterdir()
        assert infer(client, "prefix", np.array([str(unpacked).encode()], object), datatype="BYTES").all()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (environment("nowhere"), "EXECUTION_ENV_PATH is 'nowhere', expected the folder of a venv or conda environment"),
        (environment("/usr") + ON_THREAD, "python_isolation is 'thread' and EXECUTION_ENV_PATH is set"),
        ('parameters { key: "halfserve.python_isolation" value { string_value: "none" } }', "expected one of 'process', 'thr"),
    ],
)
def test_a_wrong_environment_is_refused(tmp_path: Path, config: str, expected: str) -> None:
    save_python_model(tmp_path, "twice", config=X_TO_Y + config)
    with pytest.raises(ModelLoadError, match=expected):
        load(tmp_path, Runtimes(trust=Trust(python_models=True)))


def test_a_load_request_brings_neither_code_nor_an_interpreter(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'1/model.py' is Python code; expected an ONNX model"):
        write_upload(tmp_path, {"1/model.py": HEAD.encode()})
    with pytest.raises(InvalidArgumentError, match="sets 'EXECUTION_ENV_PATH', which names programs of the server"):
        config_from_json('{"backend": "python", "parameters": {"EXECUTION_ENV_PATH": {"string_value": "/x"}}}', tmp_path)


@pytest.mark.parametrize("step", ["request_message", "ChildProcess.begin"])
def test_a_request_that_cannot_be_sent_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise ValueError("it has no JSON")

    save_python_model(tmp_path, "twice")
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        x = np.ones(1, np.float32)
        with monkeypatch.context() as broken:
            if step == "request_message":
                broken.setattr(python_backend, step, fail)
            else:
                broken.setattr(model_runners.ChildProcess, "begin", fail)
                broken.setattr(model_runners.ChildProcess, "call", fail)
            with pytest.raises(InferenceServerException, match="the model failed on this request: it has no JSON"):
                infer(client, "twice", x)
        assert infer(client, "twice", x).tolist() == [2]


def test_the_processes_code_needs_numpy_alone() -> None:
    for path in Path(python_child.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in {*sys.stdlib_module_names, "numpy"} or name.startswith(CHILD), f"{path}: {name}"


# A daemon, as libraries start them: forked twice, in a session of its own, and closed to all that it has inherited.
MAKES_A_DAEMON = """
class TritonPythonModel:
    def initialize(self, args):
        pids = os.path.join(args["model_repository"], "pids")
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 1000)
            if os.fork() == 0:
                self.tell(pids)
                while True:
                    time.sleep(100)
            os._exit(0)
        os.wait()
        while not os.path.exists(pids) or not os.path.getsize(pids):
            time.sleep(0.001)
        self.tell(pids)
        threading.Thread(target=self.spin, daemon=True).start()

    def tell(self, pids):
        with open(pids, "a") as file:
            file.write(f"{os.getpid()} ")

    def spin(self):
        while True:
            pass

    def execute(self, requests):
        return []
"""


@contextmanager
def ending(root: Path) -> Iterator[int]:
    """Gives the process of the model, and asserts that it ends afterwards, and its daemon too."""
    daemon, model = map(int, (root / "daemon" / "pids").read_text().split())
    numbers = [os.pidfd_open(pid) for pid in (daemon, model)]
    try:
        assert not select.select(numbers, [], [], 0)[0], "it has not even lived"
        yield model
        for number in numbers:
            assert select.select([number], [], [], 20)[0], "it lives on"
    finally:
        for number in numbers:
            os.close(number)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "unloaded"])
def test_a_daemon_of_a_model_dies_with_its_model(tmp_path: Path, *, is_killed: bool) -> None:
    save_python_model(tmp_path, "daemon", MAKES_A_DAEMON)
    with ExitStack() as server:
        server.enter_context(serving(tmp_path))
        with ending(tmp_path) as model:
            if is_killed:
                os.kill(model, signal.SIGKILL)
            else:
                server.close()


def test_processes_die_with_a_server_that_is_killed(tmp_path: Path) -> None:
    save_python_model(tmp_path, "daemon", MAKES_A_DAEMON)
    command = [sys.executable, "-m", "halfserve", "serve", str(tmp_path), "--trust-python-models", "--no-http", "--grpc-port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("gRPC on"):
                break
        with ending(tmp_path):
            server.send_signal(signal.SIGKILL)
