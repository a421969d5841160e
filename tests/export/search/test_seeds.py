from __future__ import annotations

import itertools

from amp_core.recorder import Entry, Magnitudes, Record
from export.certificate.budget import Budget
from export.onnx_fp16.settings import Settings
from export.search.searched_model import searched_model
from export.search.seeds import seeds_of
from export.search.smallest_fp32_set import find_fp32_nodes
from tests.export.search.nets import Net, planted, samples


def entry(module: str, op: str = "aten.mul.Tensor", dtype: str = "float32", overflow: int = 0) -> Entry:
    return Entry(
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
    searched = searched_model(Net().layers(1).plant("overflow").layers(1).model(), Settings(repair=False))
    names = list(searched.nodes)
    seeds = seeds_of(Record(entries=(entry("overflow", overflow=3), entry("trunk")), steps=1), searched)
    first = names.index("overflow/up")
    assert seeds == names[first : first + 5]  # its four nodes, and the one behind them
    assert seeds_of(Record(entries=(entry("overflow"),), steps=1), searched) == []


def test_modules_that_were_pinned_while_others_ran_in_half() -> None:
    searched = searched_model(Net().layers(1).plant("cancel").model(), Settings(repair=False))
    pinned = entry("cancel", "aten.addmm.default")
    assert seeds_of(Record(entries=(pinned, entry("trunk", "aten.mm.default", "float16")), steps=1), searched) == [
        "cancel/add",
        "cancel/sub",
    ]
    assert seeds_of(Record(entries=(pinned, entry("trunk", "aten.mm.default")), steps=1), searched) == []


def test_a_good_seed_saves_runs_and_a_bad_one_changes_no_result() -> None:
    kinds = itertools.cycle(["overflow", "cancel"])
    plants = {2 * place: next(kinds) for place in range(6)}
    model = planted(12, plants)
    budget = Budget(max_scaled_error=0.02, min_agreement=0)

    def found(record: Record | None) -> tuple[set[str], int]:
        result = find_fp32_nodes(model, samples(), budget=budget, adversarial=False, repair=False, record=record)
        assert result.passed
        assert result.minimal
        return set(result.node_block_list), result.runs

    plain, runs = found(None)
    good = Record(entries=tuple(entry(f"{kind}_{place}", overflow=1) for place, kind in plants.items()), steps=1)
    seeded, fewer = found(good)
    assert seeded == plain
    assert fewer < runs
    assert found(Record(entries=(entry("trunk", overflow=1),), steps=1))[0] == plain
