"""Hugging Face folders through the real export: the endpoints answer as transformers does in float32."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from halfserve.export.conversion_settings import ModuleSettings
from halfserve.export.module_pipeline import export_verified
from halfserve.export.repository.repository_target import RepositoryTarget
from halfserve.export.sources.hugging_face import open_hugging_face
from halfserve.export.sources.picture_preparation import proof_pictures
from halfserve.export.sources.source_options import SourceOptions
from tests.export.hugging_face_folders import (
    LABELS,
    SENTENCES,
    classifier_folder,
    image_folder,
    sentence_folder,
    sparse_folder,
    text_folder,
)
from tests.serve.http.tasks.test_text_routes import served

TEXTS = [" ".join(sentence.split()[: 2 + index % 9]) for index, sentence in enumerate(SENTENCES[:40])]
CLASSIFIER = "BertForSequenceClassification"


def exported(folder: Path, repository: Path) -> None:
    source = open_hugging_face(folder, SourceOptions(max_samples=32))
    target = RepositoryTarget(repository=repository, name=source.name, task=source.task)
    settings = ModuleSettings(adversarial=False, search=False)
    export_verified(source.module, source.samples, target, settings, dynamic=source.dynamic, policy=source.policy)


def outputs(folder: Path, auto_class: str, *texts: list[str]) -> tuple[Any, Any]:
    """The network's output and its tokens."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(*texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        return getattr(transformers, auto_class).from_pretrained(folder).eval()(**tokens), tokens


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_sparse_embeddings_are_those_of_splade(tmp_path: Path) -> None:
    folder = sparse_folder(tmp_path / "sparse")
    exported(folder, tmp_path / "models")
    output, tokens = outputs(folder, "AutoModelForMaskedLM", TEXTS)
    weights = torch.log1p(torch.relu(output.logits) * tokens["attention_mask"].unsqueeze(-1)).amax(1).numpy()
    with served(tmp_path / "models") as client:
        answers = client.post("/embed_sparse", json={"inputs": TEXTS}).json()
    dense = np.zeros_like(weights)
    for row, answer in zip(dense, answers, strict=True):
        row[[entry["index"] for entry in answer]] = [entry["value"] for entry in answer]
    cosines = (dense * weights).sum(1) / np.linalg.norm(dense, axis=1) / np.linalg.norm(weights, axis=1)
    assert cosines.min() >= 0.9999


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_vectors_of_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "tokens", "BertModel")
    exported(folder, tmp_path / "models")
    output, tokens = outputs(folder, "AutoModel", TEXTS)
    with served(tmp_path / "models") as client:
        answers = client.post("/embed_all", json={"inputs": TEXTS}).json()
    for answer, vectors, mask in zip(answers, output.last_hidden_state.numpy(), tokens["attention_mask"], strict=True):
        own, theirs = np.array(answer), vectors[: int(mask.sum())]
        assert own.shape == theirs.shape
        assert ((own * theirs).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(theirs, axis=1)).min() >= 0.9999


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_embeddings_are_those_of_transformers(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "encoder", "mean_tokens")
    exported(folder, tmp_path / "models")
    output, tokens = outputs(folder, "AutoModel", TEXTS)
    mask = tokens["attention_mask"].unsqueeze(-1)
    pooled = torch.nn.functional.normalize((output.last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1).numpy()
    with served(tmp_path / "models") as client:
        answer = client.post("/v1/embeddings", json={"model": "encoder", "input": TEXTS}).json()
        vectors = np.array([entry["embedding"] for entry in answer["data"]])
        assert (vectors * pooled).sum(axis=1).min() >= 0.9999
        assert answer["usage"]["total_tokens"] == int(mask.sum())
        assert client.get("/info").json()["max_input_length"] == 64


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_classes_are_those_of_transformers(tmp_path: Path) -> None:
    folder = classifier_folder(tmp_path / "classifier", CLASSIFIER)
    exported(folder, tmp_path / "models")
    wanted = outputs(folder, "AutoModelForSequenceClassification", TEXTS)[0].logits.softmax(-1).numpy()
    with served(tmp_path / "models") as client:
        answer = client.post("/predict", json={"inputs": [[text] for text in TEXTS]}).json()
    found = np.array([[{entry["label"]: entry["score"] for entry in row}[label] for label in LABELS] for row in answer])
    assert np.abs(found - wanted).max() < 0.01


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_pictures_have_the_classes_of_transformers(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "net")
    exported(folder, tmp_path / "models")
    pipeline: Any = transformers.pipeline("image-classification", str(folder))
    with served(tmp_path / "models") as client:
        for data in proof_pictures():
            wanted = pipeline(Image.open(BytesIO(data)))
            answer = client.post("/v2/models/net/classify", content=data).json()
            assert answer[0]["label"] == wanted[0]["label"]
            scores = {entry["label"]: entry["score"] for entry in answer}
            assert all(abs(scores[entry["label"]] - entry["score"]) < 0.01 for entry in wanted)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_relevance_is_that_of_transformers(tmp_path: Path) -> None:
    folder = classifier_folder(tmp_path / "ranker", CLASSIFIER, ("relevant",))
    exported(folder, tmp_path / "models")
    output, _ = outputs(folder, "AutoModelForSequenceClassification", [TEXTS[0]] * len(TEXTS), TEXTS)
    with served(tmp_path / "models") as client:
        answer = client.post("/v1/rerank", json={"model": "ranker", "query": TEXTS[0], "documents": TEXTS}).json()
    found = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    wanted = output.logits.sigmoid().numpy()[:, 0]
    assert np.abs(np.array([found[index] for index in range(len(TEXTS))]) - wanted).max() < 0.01
