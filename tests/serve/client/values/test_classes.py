from __future__ import annotations

import numpy as np
import pytest

from serve.client import Class, InferenceClientError, classes_of
from tests.serve.client.conftest import Connect
from tests.serve.running_server import RunningServer


def test_reads_values_indices_and_labels() -> None:
    output = np.array([[b"0.5:3:a:b", b"-inf:1:"], [b"1e-3:0", "2:9:é".encode()]], object)
    assert classes_of(output) == [
        [Class(3, 0.5, "a:b"), Class(1, float("-inf"), "")],
        [Class(0, 0.001, ""), Class(9, 2.0, "é")],
    ]
    assert classes_of(output[0]) == [[Class(3, 0.5, "a:b"), Class(1, float("-inf"), "")]]
    assert classes_of(np.empty((0, 2), object)) == []


@pytest.mark.parametrize("element", [b"cat", b"1:b:c", 0.5])
def test_other_outputs_are_refused(element: object) -> None:
    with pytest.raises(InferenceClientError, match=r"is no class, expected VALUE:INDEX\[:LABEL\]; was .* top_k"):
        classes_of(np.array([[element]], object))


def test_the_classes_that_the_server_names(server: RunningServer, connect: Connect) -> None:
    client, x = connect(server.address), np.random.default_rng(0).standard_normal((3, 64)).astype(np.float16)
    numbers, named = client.infer("mlp", {"x": x})["y"], client.infer("mlp", {"x": x}, top_k={"y": 2})["y"]
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for row, classes in zip(numbers, classes_of(named), strict=True):
        assert [one.index for one in classes] == list(np.argsort(-row.astype(np.float32), kind="stable")[:2])
        assert [one.label for one in classes] == [digits[one.index] for one in classes]
