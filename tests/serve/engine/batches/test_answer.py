from __future__ import annotations

import numpy as np
import pytest

from serve.engine.batches.answer import CUT_BYTES, Answer, BatchOutputs


@pytest.mark.parametrize("width", [2, CUT_BYTES])
def test_an_answer_is_some_rows_as_arrays_and_as_bytes(width: int) -> None:
    y = np.arange(4 * width, dtype=np.int32).reshape(4, width)
    answer = Answer(BatchOutputs({"y": y, "z": -y}), ("y",), 1, 3)
    assert (list(answer), len(answer)) == (["y"], 1)
    np.testing.assert_array_equal(answer["y"], y[1:3])
    assert answer.raw("y", 4 * width) == y[1:3].tobytes()
    with pytest.raises(KeyError):
        answer["z"]


def test_small_batches_become_bytes_once() -> None:
    batch = BatchOutputs({"y": np.zeros((2, 3), np.float16)})
    assert batch.raw("y") is batch.raw("y")
    assert batch.row_shapes == ((3,),)
