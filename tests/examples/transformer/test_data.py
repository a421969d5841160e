from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.transformer.data import LENGTH, NO_TARGET, PADDING, SHORTEST, ascending, data


def test_the_data_is_always_the_same_and_the_parts_differ() -> None:
    parts, again = data(), data()
    for one, other in zip(parts, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
    assert [len(part) for part in parts] == [2048, 512]
    assert not torch.equal(parts[0].tensors[0][:512], parts[1].tensors[0])


def test_every_target_is_its_sequence_in_order() -> None:
    for part in data():
        tokens, targets = part.tensors
        assert (tokens.shape, targets.shape) == ((len(part), LENGTH),) * 2
        lengths = set()
        for sequence, target in zip(tokens.tolist(), targets.tolist(), strict=True):
            digits = [token - 1 for token in sequence if token != PADDING]
            padding = LENGTH - len(digits)
            assert sequence[len(digits) :] == [PADDING] * padding
            assert target == sorted(digits) + [NO_TARGET] * padding
            lengths.add(len(digits))
        assert lengths == set(range(SHORTEST, LENGTH + 1))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_what_is_absent_is_sorted_behind(digits: list[int], draw: st.DataObject) -> None:
    present = draw.draw(st.lists(st.booleans(), min_size=len(digits), max_size=len(digits)))
    kept = sorted(digit for digit, here in zip(digits, present, strict=True) if here)
    result = ascending(torch.tensor([digits]), torch.tensor([present]))[0].tolist()
    assert result == kept + [NO_TARGET] * (len(digits) - len(kept))
