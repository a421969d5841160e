from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.conftest import load_repository
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_text_models import LABELS, Text, expected, save_text_model, setting, sigmoid
from tests.serve.running_server import running_server

PAIR = ("the train leaves", "at seven")


def ranked(scores: Any) -> list[tuple[str, float]]:
    return sorted(zip(LABELS, scores, strict=True), key=lambda entry: -entry[1])


def require_ranked(answer: list[dict[str, Any]], scores: Any) -> None:
    wanted = ranked(scores)
    assert [entry["label"] for entry in answer] == [label for label, _ in wanted]
    assert np.allclose([entry["score"] for entry in answer], [score for _, score in wanted], atol=1e-6)


def softmax(logits: Any) -> Any:
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize(("inputs", "text"), [("a cat", "a cat"), (["a cat"], "a cat"), (list(PAIR), PAIR)])
def test_one_input_has_its_classes_the_most_likely_first(texts: httpx.Client, inputs: Any, text: Text) -> None:
    (logits,) = expected("classifier", [text])
    require_ranked(texts.post("/predict", json={"inputs": inputs}).json(), softmax(logits))


def test_a_batch_has_a_list_for_each_input(texts: httpx.Client) -> None:
    answer = texts.post("/predict", json={"inputs": [["a cat"], list(PAIR)], "raw_scores": True}).json()
    for found, logits in zip(answer, expected("classifier", ["a cat", PAIR]), strict=True):
        require_ranked(found, logits)


def test_a_model_of_several_labels_scores_each_alone(tmp_path: Path) -> None:
    save_text_model(tmp_path, "classifier", setting("halfserve.label_scores", "sigmoid"))
    with running_server(lambda: load_repository(tmp_path)) as server, running_http(server) as rest:
        answer = httpx.post(f"http://127.0.0.1:{rest.port}/predict", json={"inputs": "a cat"}, timeout=60).json()
    require_ranked(answer, sigmoid(expected("classifier", ["a cat"])[0]))


@pytest.mark.parametrize(
    ("inputs", "status", "message"),
    [
        (None, 422, "'inputs' is null, expected a text, a pair"),
        ([], 400, "'inputs' is an empty list"),
        ("", 400, "inputs has an empty text"),
        (["a", "b", "c"], 422, "inputs is a list of 3, expected [text] or [text, text]"),
        ([["a"], "b"], 422, 'inputs[1] is "b", expected [text] or [text, text]'),
        ([["a"], ["b", 7]], 422, "inputs[1] is a list of 2, expected [text] or [text, text]"),
    ],
)
def test_wrong_inputs_are_refused(texts: httpx.Client, inputs: Any, status: int, message: str) -> None:
    answer = texts.post("/predict", json={"inputs": inputs})
    assert answer.status_code == status
    assert answer.json()["error"].startswith(message)
