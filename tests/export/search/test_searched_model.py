from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from torch import Tensor, nn

from halfserve.amp_core.recorder import Magnitudes, Record, RecordEntry
from halfserve.export.certificate.budget import Budget
from halfserve.export.conversion_settings import ConversionSettings, PipelineSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_fp16.convert import convert
from halfserve.export.search.error_attribution import RoundingErrors, measure, with_where
from halfserve.export.search.instrumented_graph import BROKEN
from halfserve.export.search.searched_model import searched_model
from halfserve.export.search.smallest_fp32_set import find_fp32_nodes, seeds_of
from halfserve.export.to_onnx.export_onnx import export_onnx
from halfserve.export.verification.samples import Array
from tests.export.onnx_fp16.models import normal
from tests.export.search.nets import Net, planted, samples
from tests.export.stored_models import parse

X = normal(8, 16)
DIM = 32


@pytest.fixture
def gelu() -> onnx.ModelProto:
    """The tanh-GELU of a product: a Clip goes before the cube, unless that stays float32."""
    return parse(
        """g (float[N, 16] x) => (float[N, 8] y) {
        mm = MatMul (x, w) cube = Pow (mm, three) small = Mul (cube, k) sum = Add (mm, small) inner = Mul (sum, s)
        tanh = Tanh (inner) more = Add (tanh, one) product = Mul (mm, more) y = Mul (product, half) }""",
        w=normal(16, 8),
        three=3.0,
        k=0.044715,
        s=0.7978845,
        one=1.0,
        half=0.5,
    )


@pytest.mark.long
@pytest.mark.parametrize("error", [1e-4, 1e-6, 1e-9])
def test_what_is_found_can_be_converted(gelu: onnx.ModelProto, error: float) -> None:
    found = find_fp32_nodes(gelu, [X], budget=Budget(max_scaled_error=error), adversarial=False)
    assert found.passed
    done = convert(onnx_ir.from_proto(gelu), ConversionSettings(keep_fp32_nodes=found.keep_fp32_nodes))
    assert set(found.keep_fp32_nodes) <= {kept.name for kept in done.report.kept}


def test_nodes_of_skipped_repairs_are_not_present(gelu: onnx.ModelProto) -> None:
    searched = searched_model(gelu, PipelineSettings())
    assert searched.made == {"cube/Clip"}
    assert searched.present(["mm", "cube/Clip"]) == ["cube/Clip", "mm"]
    assert searched.present(["cube", "cube/Clip"]) == ["cube"]


class HandwrittenNorm(nn.Module):
    def forward(self, x_btd: Tensor) -> Tensor:
        scaled = x_btd * 1e4
        return scaled * torch.rsqrt((scaled * scaled).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.after = norm, nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x_btd: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x_btd)).chunk(3, dim=-1)
        attended = torch.softmax(q @ k.transpose(-1, -2) / DIM**0.5, -1) @ v
        x_btd = x_btd + self.out(attended)
        result: Tensor = x_btd + self.mlp(self.after(x_btd))
        return result


class Transformer(nn.Module):
    def __init__(self, blocks: int, poisoned: int) -> None:
        super().__init__()
        norms = [HandwrittenNorm() if index == poisoned else nn.LayerNorm(DIM) for index in range(blocks)]
        self.blocks = nn.ModuleList(map(Block, norms))

    def forward(self, x_btd: Tensor) -> Tensor:
        for block in self.blocks:
            x_btd = block(x_btd)
        return x_btd


@pytest.fixture(scope="module")
def x_btd() -> Tensor:
    return torch.randn(4, 8, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.long
def test_the_poisoned_norm_is_found_with_its_module_and_line(x_btd: Tensor) -> None:
    torch.manual_seed(0)
    model = export_onnx(Transformer(3, 1).eval(), (x_btd,))
    found = find_fp32_nodes(model, [x_btd.numpy()], budget=Budget(), repair=False)
    assert found.passed
    assert found.minimal
    assert {kept.module for kept in found.kept} == {"blocks.1.norm"}
    assert all(kept.source is not None and "test_searched_model.py:" in kept.source for kept in found.kept)
    assert len(found.keep_fp32_nodes) <= 6
    assert found.runs <= len(found.keep_fp32_nodes) + 8


@pytest.mark.long
def test_the_repaired_model_is_what_is_searched(x_btd: Tensor) -> None:
    torch.manual_seed(0)
    model = export_onnx(Transformer(2, 0).eval(), (x_btd,))
    found = find_fp32_nodes(model, [x_btd.numpy()], budget=Budget())
    assert found.passed
    converted = convert(onnx_ir.from_proto(model), ConversionSettings(keep_fp32_nodes=found.keep_fp32_nodes))
    kept = {node.name for node in converted.report.kept}
    assert set(found.keep_fp32_nodes) <= kept


def entry(module: str, op: str = "aten.mul.Tensor", dtype: str = "float32", overflow: int = 0) -> RecordEntry:
    return RecordEntry(
        module=module,
        op=op,
        direction="forward",
        output=0,
        inputs=(dtype,),
        dtype=dtype,
        calls=1,
        magnitudes=Magnitudes(elements=100, overflow=overflow, largest=1e6 if overflow else 1.0, smallest=1.0),
        unscaled_largest=1.0,
        unscaled_smallest=1.0,
    )


def test_modules_that_overflowed_and_what_takes_their_results() -> None:
    searched = searched_model(Net().layers(1).plant("overflow").layers(1).model(), PipelineSettings(repair=False))
    names = list(searched.nodes)
    seeds = seeds_of(Record(entries=(entry("overflow", overflow=3), entry("trunk")), steps=1), searched)
    first = names.index("overflow/up")
    assert seeds == names[first : first + 5]  # its four nodes, and the one behind them
    assert seeds_of(Record(entries=(entry("overflow"),), steps=1), searched) == []


def test_modules_that_were_pinned_while_others_ran_in_half() -> None:
    searched = searched_model(Net().layers(1).plant("cancel").model(), PipelineSettings(repair=False))
    pinned = entry("cancel", "aten.addmm.default")
    assert seeds_of(Record(entries=(pinned, entry("trunk", "aten.mm.default", "float16")), steps=1), searched) == [
        "cancel/add",
        "cancel/sub",
    ]
    assert seeds_of(Record(entries=(pinned, entry("trunk", "aten.mm.default")), steps=1), searched) == []


@pytest.mark.long
def test_a_good_seed_saves_runs_and_a_bad_one_changes_no_result() -> None:
    kinds = itertools.cycle(["overflow", "cancel"])
    plants = {2 * place: next(kinds) for place in range(6)}
    model = planted(12, plants)
    budget = Budget(max_scaled_error=0.02, min_agreement=0)

    def found(record: Record | None) -> tuple[set[str], int]:
        result = find_fp32_nodes(model, samples(), budget=budget, adversarial=False, repair=False, record=record)
        assert result.passed
        assert result.minimal
        return set(result.keep_fp32_nodes), result.runs

    plain, runs = found(None)
    good = Record(entries=tuple(entry(f"{kind}_{place}", overflow=1) for place, kind in plants.items()), steps=1)
    seeded, fewer = found(good)
    assert seeded == plain
    assert fewer < runs
    assert found(Record(entries=(entry("trunk", overflow=1),), steps=1))[0] == plain


def measured(net: Net, kept: tuple[str, ...] = (), x: Array | None = None) -> RoundingErrors:
    searched = searched_model(net.model(), PipelineSettings(repair=False))
    batches = samples() if x is None else [x]
    return measure(searched, kept, [{"x": batch} for batch in batches])


def halved(values: Array | np.float32) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(np.float16).astype(np.float32)


def test_each_number_is_what_numpy_computes() -> None:
    net = Net()
    factor = np.float32(np.pi)
    product = net.add("Mul", "x", net.constant(factor), name="product")
    net.x = net.add("Sub", product, "x", name="difference")
    found = measured(net)
    x = samples()[0]
    half_product = halved(halved(x) * halved(factor))
    assert found.scale[product] == np.abs(x * factor).max()
    assert found.rounding[product] == np.abs(halved(x * factor) - x * factor).max()
    assert found.local[product] == np.abs(half_product - x * factor).max()
    assert found.inherited[product]["x"] == np.abs(halved(x) * factor - x * factor).max()
    assert found.inherited[product]["c0"] == np.abs(x * halved(factor) - x * factor).max()
    assert found.inherited[net.x][product] == np.abs((half_product - x) - (x * factor - x)).max()
    assert found.half == {"product", "difference"}


def test_an_overflow_is_seen_where_it_happens_and_hides_nothing_behind_it() -> None:
    net = Net().plant("overflow").plant("cancel")
    found = measured(net)
    up, far, back, *_ = (node.output[0] for node in net.nodes)
    assert found.rounding[up] < BROKEN
    assert found.rounding[far] == BROKEN
    assert found.inherited[back][far] == BROKEN
    outputs = {node.name: node.output[0] for node in net.nodes}
    assert found.local_error([outputs["overflow/far"]]) == float("inf")
    assert 0.1 < found.inherited[outputs["cancel/sub"]][outputs["cancel/add"]] < 10


def test_kept_nodes_add_no_error() -> None:
    net = Net().plant("cancel")
    found = measured(net, ("cancel/add", "cancel/sub"))
    assert set(found.accumulated.values()) == {0}
    added, result = (node.output[0] for node in net.nodes[:2])
    assert found.inherited[result][added] == 0
    assert found.inherited[added]["x"] == 0
    assert found.local == {}


def test_empty_and_infinite_values_are_no_errors() -> None:
    for x in (np.zeros((0, 8), np.float32), np.full((1, 8), -np.inf, np.float32)):
        net = Net()
        net.x = net.add("Mul", "x", net.constant(2.0), name="double")
        found = measured(net, x=x)
        assert found.scale[net.x] == 0
        assert found.local[net.x] == 0


def test_an_opset_without_where_is_raised() -> None:
    old = Net().layers(1).model(opset=8)
    assert next(entry.version for entry in with_where(old).opset_import) == 13
    new = Net().layers(1).model(opset=9)
    assert with_where(new) is new
    strange = onnx.ModelProto()
    strange.CopyFrom(old)
    strange.opset_import[0].version = 0
    with pytest.raises(ExportError, match="opset 0 is too old to be measured: "):
        with_where(strange)
