"""What overflows on a GPU is caught without one; with one, the simulation and the GPU agree."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from export.certificate.certificate import BudgetExceeded
from export.files.model_file import serialize
from export.verification.executions import gpu_is_there
from export.verification.metrics import Array
from export.verification.simulate import round_every_node
from export.verification.verify import verify
from tests.export.sessions import open_session, run_session
from tests.export.verification.overflowing import EXAMPLES, Example


def on_cpu(model: onnx.ModelProto, inputs: dict[str, Array]) -> Array:
    session = open_session(serialize(model), "ORT_ENABLE_BASIC")
    wanted = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    feeds = {value.name: inputs[value.name].astype(wanted[value.type]) for value in session.get_inputs()}
    (output,) = run_session(session, feeds).values()
    return output.astype(np.float32)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=list(EXAMPLES))
def test_the_cpu_hides_the_overflow_and_the_simulation_shows_it(example: Example) -> None:
    wanted, hidden = on_cpu(example.float32(), example.inputs), on_cpu(example.float16(), example.inputs)
    assert np.abs(hidden - wanted).max() <= 0.02 * np.abs(wanted).max()
    shown = on_cpu(round_every_node(example.float16()), example.inputs)
    assert not np.allclose(shown, wanted, rtol=0.1, atol=0.1 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("name", ["scale pair", "a norm's squares"])
def test_verification_says_no_without_a_gpu(name: str) -> None:
    example = EXAMPLES[name]
    with pytest.raises(BudgetExceeded, match=r"output 'y' \(rounded\)") as caught:
        verify(example.float32(), example.float16(), example.inputs, cuda=False, adversarial=False)
    by_execution = {verdict.execution: verdict.violations for verdict in caught.value.certificate.outputs}
    assert by_execution["rounded"]
    assert by_execution["runtime"] == ()


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_is_there(), reason="needs a CUDA device to compare with")
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=list(EXAMPLES))
def test_the_simulation_and_a_gpu_agree(example: Example) -> None:
    onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(serialize(example.float16()), options, providers=["CUDAExecutionProvider"])
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    (on_gpu,) = session.run(None, {name: array.astype(np.float16) for name, array in example.inputs.items()})
    simulated = on_cpu(round_every_node(example.float16()), example.inputs)
    assert np.array_equal(np.isfinite(on_gpu), np.isfinite(simulated))
    finite = np.isfinite(simulated)
    assert np.allclose(on_gpu[finite], simulated[finite], rtol=2.0**-8, atol=2.0**-10)
