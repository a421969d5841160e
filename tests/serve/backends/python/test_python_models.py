from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from halfserve.serve.backends.python_child.triton_requests import InferenceRequest
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import Trust
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import Array
from tests.serve.backends.python.python_models import X_TO_Y, load, save_python_model, serving

# Answers a request with what its parameter "returned" evaluates to.
ANY_ANSWER = """
class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def answer(name, array):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)])

def failed(*error):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(*error))

def raised(error):
    raise error

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        return eval(json.loads(request.parameters())["returned"], globals(), {"x": request.inputs()[0].as_numpy()})
"""
DATATYPES = {"f4": "FP32", "O": "BYTES", "i4": "INT32", "?": "BOOL"}


def infer(client: InferenceServerClient, model: str, x: Array, *, datatype: str = "FP32", **more: object) -> Array:
    asked = InferInput("x", list(x.shape), datatype)
    asked.set_data_from_numpy(x)
    return np.asarray(client.infer(model, [asked], outputs=[InferRequestedOutput("y")], **more).as_numpy("y"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServerClient]:
    """A client of a server with the models "twice" and "wrong", which gives any answer."""
    root = tmp_path_factory.mktemp("models")
    save_python_model(root, "twice")
    save_python_model(root, "wrong", ANY_ANSWER)
    with serving(root) as server, InferenceServerClient(server.address) as client:
        yield client


def answered(client: InferenceServerClient, returned: str) -> Array:
    return infer(client, "wrong", np.ones(1, np.float32), parameters={"returned": returned}, client_timeout=60)


@pytest.mark.parametrize("elements", [0, 3, 1_000, 100_000, 1_000_000], ids="{} elements".format)
def test_tensors_of_any_size_reach_the_process_and_come_back(client: InferenceServerClient, elements: int) -> None:
    x = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
    for _ in range(3):  # shared memory is used again
        np.testing.assert_array_equal(infer(client, "twice", x), x * 2)
    metadata = client.get_model_metadata("twice")
    config = client.get_model_config("twice").config
    assert (metadata.platform, config.backend) == ("python", "python")


def test_small_requests_wake_no_thread_of_their_instance(tmp_path: Path) -> None:
    """The event loop sends them to the process and reads the answers; large ones are copied by the thread."""
    save_python_model(tmp_path, "twice")
    others = set(threading.enumerate())
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        (thread,) = [one for one in threading.enumerate() if one.name == "instance-0" and one not in others]
        small, large = np.ones(4, np.float32), np.ones(500_000, np.float32)

        def wakes(x: Array) -> bool:
            status = Path(f"/proc/self/task/{thread.native_id}/status")
            before = re.findall(r"_switches:\s+(\d+)", status.read_text())
            np.testing.assert_array_equal(infer(client, "twice", x), x * 2)
            return before != re.findall(r"_switches:\s+(\d+)", status.read_text())

        wakes(small)
        assert [wakes(x) for x in (small, small, small, large)] == [False, False, False, True]


def test_texts_bits_and_halves_keep_their_datatype(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())]) for request in requests]
    """
    examples = {
        "TYPE_STRING": ("BYTES", np.array([b"a", b"\x00\xff", b""], object)),
        "TYPE_BOOL": ("BOOL", np.array([True, False])),
        "TYPE_FP16": ("FP16", np.array([1.5, -np.inf], np.float16)),
        "TYPE_UINT64": ("UINT64", np.array([2**64 - 1], np.uint64)),
    }
    for name in examples:
        tensors = (f"{which} data_type: {name} dims: [ -1 ] }}" for which in ('input { name: "x"', 'output { name: "y"'))
        save_python_model(tmp_path, name, code, " ".join(tensors))
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        for name, (datatype, x) in examples.items():
            np.testing.assert_array_equal(infer(client, name, x, datatype=datatype), x)


def test_the_error_of_one_response_fails_only_its_request(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            x = requests[0].inputs()[0].as_numpy()
            if x[0] < 0:
                return [pb_utils.InferenceResponse(error=pb_utils.TritonError("below 0", pb_utils.TritonError.INVALID_ARG))]
            if x[0] == 0:
                raise ValueError("divided by nothing\\nsecond line")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", 1 / x)])]
    """
    save_python_model(tmp_path, "inverse", code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT\] below 0"):
            infer(client, "inverse", np.array([-1], np.float32))
        with pytest.raises(InferenceServerException, match=r"INTERNAL\] .*'inverse'.* ValueError: divided by nothing$"):
            infer(client, "inverse", np.array([0], np.float32))
        assert infer(client, "inverse", np.array([4], np.float32)) == [0.25]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("[]", r"'wrong'.* returned 0 responses, expected 1"),
        ("None", r"'wrong'.* returned NoneType, expected a list"),
        ("[3]", r"'wrong'.* returned a int among its responses, expected pb_utils.InferenceResponse"),
        ("[answer('z', x)]", r"model 'wrong' answered an output 'z', its configuration has 'y'"),
        (
            "[answer('y', np.array(['a'], object))]",
            r"output 'y' of model 'wrong' has dtype object, its configuration has TYPE_FP32",
        ),
        ("[answer('y', np.array([2**25 + 1]))]", r"output 'y' of model 'wrong' has int64 values .* which FP32 cannot hold"),
        ("[answer('y', x.astype(complex))]", r"'wrong'.* tensor 'y' has dtype complex128, which no datatype stands for"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_model_and_tensor(
    client: InferenceServerClient, returned: str, expected: str
) -> None:
    with pytest.raises(InferenceServerException, match=expected) as caught:
        answered(client, returned)
    assert "INTERNAL" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert client.is_model_ready("wrong")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("off", None), ("on", r"output 'y' of model 'wrong' has shape \[1, 1\], its configuration has \[-1\]")],
)
def test_an_output_of_another_shape_is_passed_on_unless_strict(
    tmp_path: Path, setting: str, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", requests[0].inputs()[0].as_numpy()[None])])]
    """
    strict = f'parameters {{ key: "halfserve.strict_outputs" value {{ string_value: "{setting}" }} }}'
    save_python_model(tmp_path, "wrong", code, X_TO_Y + strict)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        if expected is not None:
            with pytest.raises(InferenceServerException, match=expected):
                infer(client, "wrong", np.ones(1, np.float32))
            return
        for _ in range(2):
            assert infer(client, "wrong", np.ones(1, np.float32)).tolist() == [[1]]
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "'y' of model 'wrong' has shape [1, 1], its configuration has [-1]" in warning


@pytest.mark.parametrize(("setting", "expected"), [("off", None), ("on", r"'y' of model 'rows' .* expected 2 row\(s\)")])
def test_other_rows_than_the_request_has_pass_unless_strict(tmp_path: Path, setting: str, expected: str | None) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", requests[0].inputs()[0].as_numpy()[:1])])]
    """
    strict = f'parameters {{ key: "halfserve.strict_outputs" value {{ string_value: "{setting}" }} }}'
    save_python_model(tmp_path, "rows", code, f"max_batch_size: 4 {X_TO_Y}{strict}")
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        if expected is None:
            assert infer(client, "rows", np.ones((2, 2), np.float32)).shape == (1, 2)
            return
        with pytest.raises(InferenceServerException, match=expected):
            infer(client, "rows", np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    ("datatype", "given", "expected"),
    [("BOOL", "np.array([1], np.float16)", [True]), ("FP32", "np.array([1])", [1]), ("STRING", "np.array([])", [])],
)
def test_an_output_of_another_type_that_keeps_its_value_is_converted(
    tmp_path: Path, datatype: str, given: str, expected: list[object]
) -> None:
    code = f"""
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", {given})])]
    """
    save_python_model(tmp_path, "converts", code, X_TO_Y.replace('"y" data_type: TYPE_FP32', f'"y" data_type: TYPE_{datatype}'))
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "converts", np.ones(1, np.float32)).tolist() == expected


@pytest.mark.parametrize(
    ("code", "status"), [("UNKNOWN", "UNKNOWN"), ("CANCELLED", "CANCELLED"), ("UNSUPPORTED", "UNIMPLEMENTED")]
)
def test_the_code_of_an_error_is_its_status(client: InferenceServerClient, code: str, status: str) -> None:
    with pytest.raises(InferenceServerException, match=rf"StatusCode.{status}\] told"):
        answered(client, f"[failed('told', pb_utils.TritonError.{code})]")


@pytest.mark.parametrize("argument", ["inputs", "requested_output_names", "model_name"])
def test_a_call_needs_model_inputs_and_outputs(argument: str) -> None:
    given: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "m"}
    assert InferenceRequest(**given).model_name() == "m"
    for wrong in ({**given, argument: None}, {key: value for key, value in given.items() if key != argument}):
        with pytest.raises(TypeError, match=argument):
            InferenceRequest(**wrong)
    with pytest.raises(TypeError, match="correlation_id"):
        InferenceRequest(**given, correlation_id=None)  # type: ignore[arg-type]  # (that is the point)


def test_a_model_that_does_not_import_is_refused_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_python_model(tmp_path, "broken", "import no_such_package\n")
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path, Runtimes(trust=Trust(python_models=True)))
    assert str(caught.value) == f"{path}: cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"
    (trace,) = [vars(record)["trace"] for record in caplog.records]
    assert trace.startswith("Traceback")
    assert "import no_such_package" in trace


LONG = "'begins ' + 1_000_000 * 'x' + ' ends'"


@pytest.mark.parametrize("returned", [f"raised(ValueError({LONG}))", f"[failed({LONG})]"], ids=["raises", "answers"])
def test_of_a_models_long_error_the_middle_is_left_out(client: InferenceServerClient, returned: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        answered(client, returned)
    assert re.search(r"begins x+ \.\.\. \(99\d+ characters left out\) \.\.\. x+ ends$", str(caught.value)) is not None
    assert len(str(caught.value)) < 5_000


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (r"ValueError('a\ud800b')", "ValueError: a\\?b"),
        (r"pb_utils.TritonModelException('a\ud800b')", "a\\?b"),
        ("NoText()", "NoText"),
        ("BaseException('a')", "BaseException: a"),
        ("KeyboardInterrupt()", "KeyboardInterrupt"),
    ],
    ids=["half a character", "half a character of Triton's", "no text", "of the base class", "an interrupt"],
)
def test_whatever_a_model_raises_is_the_error_of_its_request(client: InferenceServerClient, error: str, told: str) -> None:
    with pytest.raises(InferenceServerException, match=rf"INTERNAL\] .*{told}$"):
        answered(client, f"raised({error})")
    assert answered(client, "[answer('y', x)]") == [1]


def test_a_long_error_of_a_model_that_does_not_load_is_cut(tmp_path: Path) -> None:
    save_python_model(tmp_path, "long", f"raise ValueError({LONG})")
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path, Runtimes(trust=Trust(python_models=True)))
    assert (
        re.search(r"ValueError: begins x+ \.\.\. \(99\d+ characters left out\) \.\.\. x+ ends$", str(caught.value)) is not None
    )
    assert len(str(caught.value)) < 5_000


def test_python_models_are_refused_where_they_are_not_trusted(tmp_path: Path) -> None:
    save_python_model(tmp_path, "twice", "open('/nowhere/was/run', 'w')")
    with pytest.raises(ModelLoadError, match=r"is a Python model, which runs any code .* --trust-python-models if you trust"):
        load(tmp_path, Runtimes())


def test_requests_share_an_execute_only_with_dynamic_batching(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.others_wait = os.path.join(args["model_repository"], "others_wait")

        def execute(self, requests):
            while not os.path.exists(self.others_wait):
                time.sleep(0.001)
            count = np.array([[len(requests)]], np.float32)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", count)]) for _ in requests]
    """
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'
    save_python_model(tmp_path, "alone", code, f"max_batch_size: 8 {tensors}")
    save_python_model(tmp_path, "together", code, f"max_batch_size: 8 dynamic_batching {{}} {tensors}")
    most = {}
    count = 20  # more than a batch that is executed and one behind it take
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client, ThreadPoolExecutor(count) as threads:
        for name in ("alone", "together"):
            calls = [threads.submit(infer, client, name, np.ones((1, 1), np.float32)) for _ in range(count)]
            batcher = server.call(lambda name=name: server.core.model(name).batcher)  # type: ignore[misc]  # (bound now)
            server.until(lambda batcher=batcher: batcher.waiting >= 4)  # type: ignore[misc]  # (see above)
            (tmp_path / name / "others_wait").touch()
            most[name] = max(float(call.result()[0, 0]) for call in calls)
    assert most["alone"] == 1
    assert most["together"] > 1


def test_what_a_request_says_of_itself_reaches_the_model(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.args = {key: args[key] for key in ("model_name", "model_version", "model_instance_kind")}
            self.dims = json.loads(args["model_config"])["input"][0]["dims"]

        def execute(self, requests):
            request, = requests
            told = {
                **self.args, "dims": self.dims, "id": request.request_id(), "correlation": request.correlation_id(),
                "flags": request.flags(), "parameters": json.loads(request.parameters()), "name": request.model_name(),
                "outputs": request.requested_output_names(), "cancelled": request.is_cancelled(),
            }
            answer = pb_utils.Tensor("y", np.array([json.dumps(told)], object))
            return [pb_utils.InferenceResponse([answer], parameters={"took": 3, "ok": True})]
    """
    config = 'input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "y" data_type: TYPE_STRING dims: [ 1 ] }'
    save_python_model(tmp_path, "says", code, config)
    x = InferInput("x", [2], "FP32")
    x.set_data_from_numpy(np.ones(2, np.float32))
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        result = client.infer("says", [x], request_id="seven", sequence_id=5, sequence_start=True, parameters={"lang": "en"})
    answer = result.as_numpy("y")
    assert answer is not None
    assert json.loads(answer[0]) == {
        "model_name": "says",
        "model_version": "1",
        "model_instance_kind": "CPU",
        "dims": [2],
        "id": "seven",
        "correlation": 5,
        "flags": 1,
        "parameters": {"lang": "en"},
        "name": "says",
        "outputs": ["y"],
        "cancelled": False,
    }
    parameters = result.get_response().parameters
    assert (parameters["took"].int64_param, parameters["ok"].bool_param) == (3, True)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ("{'of': 0.5}", "values to have type bool/int/str, found type <class 'float'> of 'of'"),
        ("{'of': None}", "values to have type bool/int/str, found type <class 'NoneType'> of 'of'"),
        ("{1: 'of'}", r"keys to have type str, found type <class 'int'> \(1\)"),
        ("[]", "to be a dict, got <class 'list'>"),
    ],
)
def test_parameters_of_responses_are_what_triton_takes(client: InferenceServerClient, parameters: str, text: str) -> None:
    with pytest.raises(InferenceServerException, match=f"Expect parameters {text}"):
        answered(client, f"[pb_utils.InferenceResponse([], parameters={parameters})]")


CRASHES = """
class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        if x[0] < 0:
            os._exit(3)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([os.getpid()], np.float32))])]
"""


def test_a_process_that_crashes_is_restarted_and_its_request_fails(tmp_path: Path) -> None:
    save_python_model(tmp_path, "crashes", CRASHES)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        before = infer(client, "crashes", np.ones(1, np.float32))
        with pytest.raises(InferenceServerException, match=r"UNAVAILABLE\] the model's process failed"):
            infer(client, "crashes", -np.ones(1, np.float32))
        after = infer(client, "crashes", np.ones(1, np.float32))
    assert before != after


def test_a_killed_process_loses_no_request(tmp_path: Path) -> None:
    save_python_model(tmp_path, "crashes", CRASHES)
    x = np.ones(1, np.float32)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client, ThreadPoolExecutor(8) as threads:
        pid = int(infer(client, "crashes", x)[0])
        calls = [threads.submit(infer, client, "crashes", x) for _ in range(50)]
        os.kill(pid, signal.SIGKILL)
        calls += [threads.submit(infer, client, "crashes", x) for _ in range(50)]
        pids = {int(call.result()[0]) for call in calls}
    assert pids - {pid}


def test_a_hanging_model_is_killed_after_max_compute_s(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            x = requests[0].inputs()[0].as_numpy()
            while x[0] < 0:
                pass
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([os.getpid()], np.float32))])]
    """
    limit = 'parameters { key: "halfserve.max_compute_s" value { string_value: "2" } }'
    from_x = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'
    save_python_model(tmp_path, "hangs", code, from_x + limit)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        pid = int(infer(client, "hangs", np.ones(1, np.float32))[0])
        with pytest.raises(InferenceServerException, match=r"UNAVAILABLE\].*did not answer within its 2 s"):
            infer(client, "hangs", -np.ones(1, np.float32))
        assert int(infer(client, "hangs", np.ones(1, np.float32))[0]) != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_forks_prints_and_nan_disturb_nobody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            print("seen by", "the log")
            if os.fork() == 0:
                return []  # the fork goes on in the model's place: it may not answer
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(2, np.nan, np.float32))])]
    """
    save_python_model(tmp_path, "odd", code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        for _ in range(3):
            assert np.isnan(infer(client, "odd", np.ones(1, np.float32))).all()
    out, error = capfd.readouterr()
    assert not out
    assert error.count("seen by the log") >= 3


def test_a_model_logs_to_the_servers_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            pb_utils.Logger.log_warn("getting old")
            pb_utils.Logger.log("and older", pb_utils.Logger.ERROR)

        def execute(self, requests):
            return []
    """
    save_python_model(tmp_path, "logs", code)
    with caplog.at_level(logging.INFO), serving(tmp_path):
        pass
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "old" in record.getMessage()]
    assert told == [("WARNING", "logs/1: getting old"), ("ERROR", "logs/1: and older")]


def test_a_model_without_inputs_and_outputs_is_served_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    save_python_model(tmp_path, "bare", code, config=None)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        for _ in range(2):
            assert not client.infer("bare", []).get_response().outputs
        with pytest.raises(InferenceServerException, match="input 'x' is not one of the model's"):
            infer(client, "bare", np.ones(1, np.float32))
    assert "the Python model model.py has no outputs; unless that is meant, declare" in caplog.text


def test_an_optional_input_may_be_left_out(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            given = {tensor.name(): tensor.as_numpy() for tensor in requests[0].inputs()}
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", given["x"] + given.get("more", 1))])]
    """
    more = 'input { name: "more" data_type: TYPE_FP32 dims: [ 1 ] optional: true }'
    save_python_model(tmp_path, "adds", code, X_TO_Y + more)
    x = np.array([2], np.float32)
    both = [InferInput(name, [1], "FP32") for name in ("x", "more")]
    for tensor in both:
        tensor.set_data_from_numpy(x)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        for _ in range(2):  # the second time from the request cache
            assert infer(client, "adds", x) == [3]
            assert client.infer("adds", both).as_numpy("y") == [4]
        with pytest.raises(InferenceServerException, match="missing input 'x'"):
            client.infer("adds", both[1:])


def test_a_model_finalizes_before_the_server_ends(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.folder = args["model_repository"]

        def execute(self, requests):
            return []

        def finalize(self):
            time.sleep(0.2)
            open(os.path.join(self.folder, "finalized"), "w").close()
    """
    save_python_model(tmp_path, "ends", code)
    with serving(tmp_path):
        assert not (tmp_path / "ends" / "finalized").exists()
    assert (tmp_path / "ends" / "finalized").exists()


def test_a_version_that_is_not_served_leaves_no_process(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            path = os.path.join(args["model_repository"], "pid")
            if os.path.exists(path):
                raise pb_utils.TritonModelException("one is enough")
            with open(path, "w") as file:
                file.write(str(os.getpid()))

        def execute(self, requests):
            return []
    """
    save_python_model(tmp_path, "two", code, X_TO_Y + "instance_group { count: 2 kind: KIND_CPU }")
    with pytest.raises(ModelLoadError, match=r"model.py: one is enough$"):
        load(tmp_path, Runtimes(trust=Trust(python_models=True)))
    try:
        ended = os.pidfd_open(int((tmp_path / "two" / "pid").read_text()))
    except ProcessLookupError:
        return
    assert select.select([ended], [], [], 20)[0], "it lives on"
    os.close(ended)
