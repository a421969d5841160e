from __future__ import annotations

import hashlib
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.certificate import BudgetExceeded
from halfserve.export.cli.output import print_conversion
from halfserve.export.conversion_results import SearchFailed
from halfserve.export.conversion_settings import PipelineSettings
from halfserve.export.conversion_targets import FileTarget
from halfserve.export.export_errors import ExportError
from halfserve.export.file_conversion import convert, convert_verified
from halfserve.export.onnx_files.model_file import ModelFile, open_model
from halfserve.export.repository import recorded_samples
from halfserve.export.repository.repository_target import RepositoryTarget
from halfserve.export.verification.criteria import Verification
from halfserve.export.verification.remedies import MEANS
from halfserve.export.verification.samples import Array, SampleSet
from halfserve.export.verification.simulation import round_every_node
from halfserve.serve.model_control.certificate_check import check_certificate
from tests.export.search.nets import planted
from tests.export.search.nets import samples as planted_samples
from tests.export.stored_models import answers, in_one_file, parse, sums

QUICK = PipelineSettings(adversarial=False)
SAMPLES = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """x [n, 512] -> (x + w0 + w1) / 2."""
    model = sums(2)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim.insert(0, onnx.TensorShapeProto.Dimension(dim_param="n"))
    return in_one_file(model, tmp_path / "in.onnx")


def samples(_: ModelFile) -> SampleSet:
    return SampleSet(inputs=[SAMPLES])


USUAL = Verification(samples=samples, budget=Budget())


class Sums(nn.Module):
    """The same in torch, plus an offset that float16 cannot be blamed for."""

    def __init__(self, model: onnx.ModelProto, offset: float) -> None:
        super().__init__()
        self.terms = [torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in model.graph.initializer]
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        *weights, factor = self.terms
        return sum(weights, x) * factor + self.offset


@pytest.mark.parametrize("given", ["arrays", "file", "nothing"])
def test_convert_writes_a_verified_model(source: Path, tmp_path: Path, given: str) -> None:
    arrays = {value.name: np.ones((4, 512), np.float32) for value in onnx.load(source).graph.input}
    np.savez(tmp_path / "samples.npz", **arrays)  # type: ignore[arg-type]  # (numpy types the keywords as its own options)
    samples: dict[str, dict[str, Array] | Path | None] = {"arrays": arrays, "file": tmp_path / "samples.npz", "nothing": None}
    done = convert(source, tmp_path / "half.onnx", samples=samples[given])
    assert done.certificate.passed
    assert done.path == tmp_path / "half.onnx"
    assert any("32 made-up rows" in note for note in done.certificate.notes) == (given == "nothing")


def test_what_stays_float32_has_one_name_in_python_and_commands(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out.onnx", samples={"x": SAMPLES}, keep_fp32_nodes=["add[0]"], keep_fp32_ops=["Mul"])
    reasons = {node.reason for node in done.report.kept}
    assert reasons == {"matches 'add[0]' in keep_fp32_nodes", "Mul is in keep_fp32_ops"}
    for name in ("keep_fp32_nodes", "keep_fp32_ops"):
        assert name in MEANS
        assert f"--{name.replace('_', '-')}" in MEANS


def test_each_step_is_told(source: Path, tmp_path: Path) -> None:
    told: list[str] = []
    done = convert_verified(
        source,
        FileTarget(path=tmp_path / "out.onnx"),
        QUICK,
        USUAL,
        progress=told.append,
    )
    assert told == ["reading the model", "converting to float16", "asking ONNX Runtime for the placement", "verifying"]
    assert (done.report.fp16_nodes, done.search, done.superseded) == (3, None, ())
    assert done.size_bytes == (tmp_path / "out.onnx").stat().st_size
    assert done.source_bytes == source.stat().st_size


def test_a_difference_that_the_float32_model_has_already_is_no_question_of_precision(source: Path, tmp_path: Path) -> None:
    reference = Sums(onnx.load(source), 1.0).eval()
    verification = Verification(samples=samples, budget=Budget(), reference=reference)
    with pytest.raises(SearchFailed, match="no choice of nodes can meet the budget: even with all 3 in float32") as caught:
        convert_verified(source, FileTarget(path=tmp_path / "out.onnx"), QUICK, verification)
    assert "the float32 ONNX model itself is over budget beside the reference: output 'y': max error" in str(caught.value)
    assert (caught.value.search.passed, caught.value.search.runs) == (False, 2)
    assert "keep sensitive layers" not in str(caught.value)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.long
def test_the_search_asks_for_headroom_too(source: Path, tmp_path: Path) -> None:
    verification = Verification(samples=samples, budget=Budget(min_headroom=1e9))
    target = FileTarget(path=tmp_path / "out.onnx")
    with pytest.raises(SearchFailed, match=r"even with all 3 in float32: headroom 64 \(least 1e\+09\)"):
        convert_verified(source, target, PipelineSettings(), verification)


@pytest.mark.long
def test_an_interrupted_search_writes_the_best_model_so_far(tmp_path: Path) -> None:
    onnx.save(planted(4, {1: "overflow"}), tmp_path / "in.onnx")
    told: list[str] = []

    def progress(step: str) -> None:
        told.append(step)
        if step.startswith("searching: run 4 of"):
            raise KeyboardInterrupt

    done = convert_verified(
        tmp_path / "in.onnx",
        FileTarget(path=tmp_path / "out.onnx"),
        replace(QUICK, repair=False),
        Verification(samples=lambda _: SampleSet(inputs=planted_samples()), budget=Budget()),
        progress=progress,
    )
    assert told[-3:] == ["converting to float16", "asking ONNX Runtime for the placement", "verifying"]
    assert done.search is not None
    assert (done.search.ending, done.search.passed) == ("interrupted", True)
    assert done.certificate is not None
    assert done.certificate.passed
    assert (tmp_path / "out.onnx").exists()


def test_what_compares_nothing_is_neither_written_nor_searched(tmp_path: Path) -> None:
    text = (
        "g (float[n] x) => (float[m] y) { l = Constant<value_float = 9.0>() k = Greater(x, l) c = Compress(x, k) y = Relu(c) }"
    )
    onnx.save(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}'), tmp_path / "in.onnx")
    verification = Verification(samples=lambda _: SampleSet(inputs=[np.ones(4, np.float32)]), budget=Budget())
    target = FileTarget(path=tmp_path / "out.onnx")
    with pytest.raises(BudgetExceeded, match="no output holds a number that was compared, so nothing is proved") as caught:
        convert_verified(tmp_path / "in.onnx", target, PipelineSettings(), verification)
    assert not isinstance(caught.value, SearchFailed)
    assert not target.path.exists()


@pytest.mark.long
@pytest.mark.parametrize(("offset", "passes"), [(0.0, True), (1.0, False)])
def test_another_reference_may_be_given(offset: float, passes: bool, source: Path, tmp_path: Path) -> None:
    reference = Sums(onnx.load(source), offset).eval()
    verification = Verification(samples=samples, budget=Budget(), reference=reference)
    target = RepositoryTarget(repository=tmp_path / "models", name="m")

    def run() -> Path:
        settings = replace(QUICK, search=False)
        return convert_verified(source, target, settings, verification).path

    if passes:
        assert run() == tmp_path / "models" / "m" / "1"
    else:
        with pytest.raises(BudgetExceeded, match="output 'y'"):
            run()
        assert not (tmp_path / "models").exists()


def test_labels_reach_the_certificate(source: Path, tmp_path: Path) -> None:
    verification = Verification(samples=samples, budget=Budget(), labels=np.zeros(6, np.int64))
    done = convert_verified(source, FileTarget(path=tmp_path / "out.onnx"), QUICK, verification)
    assert done.certificate is not None
    assert done.certificate.accuracy is not None


def test_a_model_over_budget_leaves_what_was_there(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.onnx").write_bytes(b"before")
    verification = Verification(samples=samples, budget=Budget(max_abs_error=0.0))
    target, settings = FileTarget(path=tmp_path / "out.onnx", overwrite=True), replace(QUICK, keep_io_types=False, search=False)
    with pytest.raises(BudgetExceeded):
        convert_verified(source, target, settings, verification)
    assert (tmp_path / "out.onnx").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx", "out.onnx"]


def test_a_repository_takes_no_model_without_a_certificate(source: Path, tmp_path: Path) -> None:
    target = RepositoryTarget(repository=tmp_path / "models", name="m")
    with pytest.raises(ExportError, match="a version in a repository needs a certificate"):
        convert_verified(source, target, PipelineSettings(), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx"]


def test_samples_with_their_float32_answers_travel_with_a_version(source: Path, tmp_path: Path) -> None:
    target = RepositoryTarget(repository=tmp_path / "models", name="m")
    done = convert_verified(source, target, QUICK, USUAL)
    assert done.certificate is not None
    content = (done.path / "samples.npz").read_bytes()
    assert done.certificate.files == {"samples.npz": hashlib.sha256(content).hexdigest()}
    assert check_certificate(done.path / "model.onnx") == "passed"
    with np.load(done.path / "samples.npz") as recorded:
        (x, y) = recorded["input/x"], recorded["output/y"]
    np.testing.assert_array_equal(x, SAMPLES[:4])
    np.testing.assert_allclose(y, Sums(onnx.load(source), 0.0)(torch.from_numpy(x)), rtol=1e-6)


def test_samples_that_are_too_large_do_not_travel(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_samples, "MAX_BYTES", 2 * SAMPLES[:1].nbytes)
    with np.load(io.BytesIO(recorded_samples.recorded_samples(open_model(source), [SAMPLES]))) as recorded:
        assert len(recorded["input/x"]) == 1
    monkeypatch.setattr(recorded_samples, "MAX_BYTES", 2 * SAMPLES[:1].nbytes - 1)
    assert recorded_samples.recorded_samples(open_model(source), [SAMPLES]) == b""


@pytest.mark.long
def test_what_cannot_be_placed_is_written_all_the_same(tmp_path: Path) -> None:
    model = sums(2)
    model.graph.node[0].domain, model.graph.node[0].op_type = "com.example", "Unknown"
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    source = in_one_file(model, tmp_path / "in.onnx")
    done = convert_verified(source, FileTarget(path=tmp_path / "out.onnx"), PipelineSettings(), None)
    assert isinstance(done.placement, str)
    assert "cannot open the model" in done.placement
    assert "Unknown" in {node.op_type for node in open_model(tmp_path / "out.onnx").proto.graph.node}


def test_nodes_that_cuda_leaves_to_the_cpu_are_reported_for_bfloat16_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = parse("g (float[n,4] x) => (float[n,4] y) { a = MatMul (x, w) y = Tan (a) }", w=np.eye(4))
    target = FileTarget(path=tmp_path / "out.onnx")
    settings = PipelineSettings(dtype="bfloat16")
    place = in_one_file(model, tmp_path / "tan.onnx")
    done = convert_verified(place, target, settings, None)
    (warning,) = done.cuda
    assert (warning.node, warning.kind) == ("y", "on the CPU")
    print_conversion(done)
    assert "on CUDA   y: ONNX Runtime 1.31.1 has no CUDA kernel for Tan of opset 7" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["file", "repository"])
def test_an_error_names_the_place_that_was_given(source: Path, tmp_path: Path, kind: str) -> None:
    def taken_away(step: str) -> None:
        if step == "verifying":
            next(tmp_path.rglob(".*/out.onnx" if kind == "file" else ".*/model.onnx")).unlink()

    target = FileTarget(path=tmp_path / "out.onnx") if kind == "file" else RepositoryTarget(repository=tmp_path / "r", name="m")
    place = tmp_path / "out.onnx" if kind == "file" else tmp_path / "r" / "m" / "model.onnx"
    with pytest.raises(ExportError, match=f"{re.escape(str(place))}: No such file") as caught:
        convert_verified(source, target, QUICK, USUAL, progress=taken_away)
    assert "/." not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.onnx"]


def test_a_file_larger_than_its_source_says_why(tmp_path: Path) -> None:
    """Nodes without weights: there is nothing to halve, and the casts at the inputs and outputs add to them."""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y) { h = Neg (x) y = Abs (h) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "in.onnx")
    done = convert(tmp_path / "in.onnx", tmp_path / "half.onnx")
    assert done.size_bytes > done.source_bytes
    assert done.growth is not None
    assert done.growth.startswith(f"than its source by {done.size_bytes - done.source_bytes:,} bytes: ")
    assert re.search(r"[\d,]+ more in metadata, .*[\d,]+ more in casts", done.growth)


def test_a_file_that_is_smaller_has_no_growth_to_explain(tmp_path: Path) -> None:
    source = in_one_file(sums(2, (1, 1 << 14)), tmp_path / "large.onnx")
    assert convert(source, tmp_path / "half.onnx").growth is None


def in_float16(model: onnx.ModelProto, feed: dict[str, Array]) -> list[Array]:
    """What hardware with float16 arithmetic answers: every node rounds, and a Cast to float16 does."""
    return list(answers(round_every_node(model), feed).values())


def test_a_choice_among_scores_that_float16_merges_is_right(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    text = """g (float[N,16] x) => (int64[N] y, float[N,16] z) {
        s = MatMul (x, w)  y = ArgMax <axis = 1, keepdims = 0> (s)  z = Tanh (x) }"""
    model = parse(text, w=10 + 0.1 * random.normal(size=(16, 1000)))
    source = in_one_file(model, tmp_path / "in.onnx")
    x = random.uniform(size=(200, 16)).astype(np.float32)
    done = convert(source, tmp_path / "half.onnx", samples={"x": x})
    exact = answers(source.read_bytes(), {"x": x})["y"]
    half, _ = in_float16(onnx.load(done.path), {"x": x})
    assert np.mean(half == exact) >= Budget().min_agreement
    assert done.search is not None


def both_answers(source: Path, done: Path, feed: dict[str, Array]) -> tuple[Array, Array]:
    """The float32 model's first output, and that of the converted one in float16."""
    exact = answers(source.read_bytes(), feed)
    return next(iter(exact.values())), in_float16(onnx.load(done), feed)[0]


def test_a_mean_of_8000_tokens_is_right_after_samples_of_16(tmp_path: Path) -> None:
    model = parse(
        """g (float[N, L, 8] x) => (float[N, 8] y) {
        s = ReduceSum <keepdims = 0> (x, one)  d = Shape <start = 1, end = 2> (x)  n = Cast <to = 1> (d)  y = Div (s, n) }""",
        one=[1],
    )
    source = in_one_file(model, tmp_path / "in.onnx")
    random = np.random.default_rng(0)
    x = random.uniform(5, 15, (4, 16, 8)).astype(np.float32)
    done = convert(source, tmp_path / "half.onnx", samples={"x": x})
    exact, half = both_answers(source, done.path, {"x": random.uniform(5, 15, (4, 8000, 8)).astype(np.float32)})
    assert np.abs(exact - half).max() <= 1e-3 * np.abs(exact).max()
    assert done.certificate.sizes == {"L": (16, 512, 2048)}


def test_what_overflows_only_on_longer_samples_is_searched(tmp_path: Path) -> None:
    """A count of tokens, by a product with weights, which no rule knows as a sum."""
    model = parse(
        """g (float[N, L, 8] x) => (float[N, A, 8] y) {
        d = Shape <start = 1, end = 2> (x)  n = Cast <to = 1> (d)  big = Mul (n, w)
        far = Mul (x, big)  y = Div (far, big) }""",
        w=np.float32(8.0),
    )
    source = in_one_file(model, tmp_path / "in.onnx")
    x = np.random.default_rng(0).uniform(5, 15, (4, 16, 8)).astype(np.float32)
    done = convert(source, tmp_path / "half.onnx", samples={"x": x})
    assert done.search is not None
    assert done.search.keep_fp32_nodes
    exact, half = both_answers(source, done.path, {"x": np.repeat(x, 128, 1)})
    assert np.abs(exact - half).max() <= 0.01 * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_a_sum_over_20000_turns_is_right(kind: str, tmp_path: Path) -> None:
    loop = """g (float[N, 8] x) => (float[N, 8] y) { z = Sub (x, x)  go = Cast <to = 9> (turns)
        s = Loop (turns, go, z) <body = b (int64 i, bool c, float[N, 8] h) => (bool d, float[N, 8] k)
            { d = Identity (c)  a = Abs (x)  k = Add (h, a) }>
        y = Div (s, count) }"""
    scan = """g (float[L, 8] x) => (float[8] y) { z = Constant <value = float[8] {0, 0, 0, 0, 0, 0, 0, 0}> ()
        s = Scan <num_scan_inputs = 1, body = b (float[8] h, float[8] e) => (float[8] k) { a = Abs (e)  k = Add (h, a) }> (z, x)
        y = Div (s, count) }"""
    model = parse(loop, count=20000.0, turns=np.int64(20000)) if kind == "Loop" else parse(scan, count=20000.0)
    source = in_one_file(model, tmp_path / "in.onnx")
    random = np.random.default_rng(0)
    done = convert(source, tmp_path / "half.onnx", samples={"x": random.normal(size=(4, 8)).astype(np.float32)})
    exact, half = both_answers(
        source, done.path, {"x": random.normal(size=(4 if kind == "Loop" else 20000, 8)).astype(np.float32)}
    )
    assert np.abs(exact - half).max() <= 0.01 * np.abs(exact).max()


def test_samples_that_float32_mostly_answers_with_nan_are_refused(tmp_path: Path) -> None:
    model = parse("g (float[N, 8] x) => (float[N, 8] y) { y = Log (x) }")
    source = in_one_file(model, tmp_path / "in.onnx")
    x = np.random.default_rng(0).uniform(1, 9, (32, 8)).astype(np.float32)
    x[:15] *= -1
    done = convert(source, tmp_path / "half.onnx", samples={"x": x}, adversarial=False)
    figures = done.certificate.outputs[0].figures
    assert (figures.nan_rows, figures.all_rows, figures.rows) == (15, 32, 17)
    assert any("15 of 32 rows with NaN" in note for note in done.certificate.notes)
    x[15:30] *= -1
    with pytest.raises(BudgetExceeded, match="float32 itself answers 30 of 32 rows with NaN.*give samples") as caught:
        convert(source, tmp_path / "none.onnx", samples={"x": x})
    assert not isinstance(caught.value, SearchFailed)
    assert not (tmp_path / "none.onnx").exists()
