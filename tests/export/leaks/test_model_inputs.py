from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.errors import ExportError
from export.leaks.model_inputs import DTYPES, inputs_from_descriptions


@given(dtype=st.sampled_from(sorted(DTYPES)), sizes=st.lists(st.integers(0, 4), max_size=4), limit=st.integers(1, 100))
def test_a_description_gives_what_it_says(dtype: str, sizes: list[int], limit: int) -> None:
    (made,) = inputs_from_descriptions([f"{dtype}{sizes}<{limit}"]).args
    assert (made.dtype, list(made.shape)) == (DTYPES[dtype], sizes)
    if not made.is_floating_point() and made.numel():
        assert 0 <= int(made.max()) < max(limit, 2)


def test_names_and_order() -> None:
    inputs = inputs_from_descriptions(["int64[2,3]<9", "mask=bool[2,3]", "float32[]"])
    assert [made.dtype for made in inputs.args] == [torch.int64, torch.float32]
    assert list(inputs.kwargs) == ["mask"]
    assert torch.equal(inputs_from_descriptions(["float32[3]"]).args[0], inputs_from_descriptions(["float32[3]"]).args[0])


@pytest.mark.parametrize("text", ["", "float32", "float32[2", "float[2]", "float32[-1]", "2,3", "x=y=float32[1]"])
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(ExportError, match="expected DTYPE"):
        inputs_from_descriptions([text])
