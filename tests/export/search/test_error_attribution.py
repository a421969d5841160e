from __future__ import annotations

import numpy as np
import onnx
import pytest

from halfserve.export.conversion_settings import PipelineSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.search.error_attribution import RoundingErrors, measure, with_where
from halfserve.export.search.instrumented_graph import BROKEN
from halfserve.export.search.searched_model import searched_model
from halfserve.export.verification.samples import Array
from tests.export.search.nets import Net, samples


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
