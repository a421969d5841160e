from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from halfserve.export.conversion_results import Certified
from halfserve.export.conversion_settings import ModuleSettings
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.module_pipeline import export_verified
from halfserve.export.repository.repository_target import RepositoryTarget
from halfserve.export.sources.hugging_face import open_hugging_face
from halfserve.export.sources.source import Source
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.tasks.task import Task
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from tests.captured import captured, write_capture
from tests.export.hugging_face_folders import (
    LABELS,
    SENTENCES,
    SIZES,
    audio_folder,
    classifier_folder,
    decoder_folder,
    encoder_folder,
    image_folder,
    picture_body_folder,
    sentence_folder,
    sparse_folder,
    text_folder,
    towers_folder,
    write_clip,
    writer_folder,
)
from tests.export.to_onnx.answers import session

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "embeddings": lambda folder: sentence_folder(folder, "mean_tokens"),
    "feature-extraction": lambda folder: text_folder(folder, "BertModel"),
    "sparse-embeddings": sparse_folder,
    "text-classification": lambda folder: classifier_folder(folder, "BertForSequenceClassification"),
    "rerank": lambda folder: classifier_folder(folder, "BertForSequenceClassification", ("relevant",)),
    "token-classification": lambda folder: classifier_folder(folder, "BertForTokenClassification"),
    "image-classification": image_folder,
    "image-embeddings": towers_folder,
    "text-embeddings": towers_folder,
    "audio-classification": lambda folder: audio_folder(folder, "Wav2Vec2ForSequenceClassification"),
    "automatic-speech-recognition": lambda folder: audio_folder(folder, "Wav2Vec2ForCTC"),
}
LABELLED = {"text-classification", "token-classification", "image-classification", "audio-classification"}
TOWERS = {"image-embeddings": "-image", "text-embeddings": "-text"}
PADDED = "input_ids[1]=0 attention_mask[1]=0"
PADDING = {
    "embeddings": PADDED,
    "feature-extraction": f"{PADDED} -> last_hidden_state[1]",
    "sparse-embeddings": PADDED,
    "text-classification": PADDED,
    "rerank": PADDED,
    "token-classification": f"{PADDED} -> logits[1]",
    "text-embeddings": PADDED,
}
AUDIO = {"audio-classification", "automatic-speech-recognition"}


def options_of(task: str, folder: Path) -> SourceOptions:
    """What a user says: the clips of a model of audio, and which tower."""
    return SourceOptions(task=task if task in TOWERS else None, samples=folder / "clips" if task in AUDIO else None)


def exported(source: Source, repository: Path) -> Certified:
    target = RepositoryTarget(repository=repository, name=source.name, task=source.task)
    return export_verified(
        source.module, source.samples, target, ModuleSettings(), dynamic=source.dynamic, policy=source.policy
    )


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task == "embeddings" else pytest.mark.long) for task in FOLDERS]
)
def test_a_folder_becomes_a_model_that_answers_as_transformers_does(task: str, tmp_path: Path) -> None:
    folder = FOLDERS[task](tmp_path / "my-model")
    source = open_hugging_face(folder, options_of(task, folder))
    assert source.task is not None
    assert (source.name, source.task.name) == (f"my-model{TOWERS.get(task, '')}", task)
    done = exported(source, tmp_path / "models")
    assert done.certificate.passed
    assert done.search is None, "nothing had to be searched for"
    judged = [verdict.task for verdict in done.certificate.outputs]
    assert all(judged) == (source.task.judge is not None)
    opened = session(str(done.path / "model.onnx"))
    inputs = {name: tensor[:3] for name, tensor in source.samples.inputs.items()}
    (answer,) = opened.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    with torch.no_grad():
        (expected,) = source.module(**inputs).values()
    assert np.abs(answer - expected.numpy()).max() <= 0.01 * np.abs(expected.numpy()).max()
    assert (done.path / "tokenizer.json").exists() == ("input_ids" in inputs)
    (files,) = find_models(tmp_path / "models")
    model = load_model(files, _runtime(), DevicePlacement(use_gpu=False, threads=1), Defaults())
    assert model.config.parameters["halfserve.task"].string_value == task
    assert model.config.parameters["halfserve.padding"].string_value == PADDING.get(task, "")
    labels = (tmp_path / "models" / source.name / "labels.txt").read_text().split() if task in LABELLED else None
    assert labels is None or tuple(labels) == LABELS


OWN_CODE = """
from transformers import BertConfig, BertModel

class Settings(BertConfig):
    model_type = "own"

class Net(BertModel):
    config_class = Settings
"""


@pytest.mark.long
def test_a_folders_own_code_is_run_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = text_folder(tmp_path / "model", "BertModel")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "own.Settings", "AutoModel": "own.Net"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": auto}))
    with pytest.raises(ExportError, match="brings code of its own .* give --trust-remote-code where you trust it"):
        open_hugging_face(folder, SourceOptions())
    source = open_hugging_face(folder, SourceOptions(trust_remote_code=True))
    assert type(source.module.network).__module__.startswith("transformers_modules.")


def _runtime() -> Any:
    from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime  # noqa: PLC0415

    return OnnxRuntime()


@pytest.mark.parametrize("pooling", ["cls_token", "lasttoken", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens"])
def test_tokens_are_pooled_as_the_folder_says(pooling: str, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "model", pooling)
    source = open_hugging_face(folder, SourceOptions(task="embeddings"))
    network = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = {name: tensor[:5] for name, tensor in source.samples.inputs.items()}
    with torch.no_grad():
        (embeddings,) = source.module(**inputs).values()
        for row, embedding in enumerate(embeddings):
            one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
            count = int(one["attention_mask"].sum())
            tokens = network(**one).last_hidden_state[0, :count]
            pooled = {
                "cls_token": tokens[0],
                "lasttoken": tokens[-1],
                "max_tokens": tokens.amax(0),
                "mean_tokens": tokens.mean(0),
                "mean_sqrt_len_tokens": tokens.sum(0) / count**0.5,
            }[pooling]
            torch.testing.assert_close(embedding, pooled / pooled.norm(), atol=1e-5, rtol=1e-5)


def test_poolings_are_joined_and_a_dense_layer_follows(tmp_path: Path) -> None:
    source = open_hugging_face(sentence_folder(tmp_path / "m", "cls_token", "max_tokens", dense=True), SourceOptions())
    with torch.no_grad():
        (embeddings,) = source.module(**{name: tensor[:4] for name, tensor in source.samples.inputs.items()}).values()
    assert embeddings.shape == (4, 16)
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(4))


def test_pixels_are_normalised_in_the_graph(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "m")
    source = open_hugging_face(folder, SourceOptions())
    images = source.samples.inputs["image"][:4]
    assert images.shape == (4, 32, 32, 3)
    assert images.dtype == torch.uint8
    content = json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(content[name]) for name in ("image_mean", "image_std"))
    prepared = ((images * content["rescale_factor"] - mean) / std).permute(0, 3, 1, 2)
    network = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(source.module(images)["logits"], network(prepared).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("content", [[1], {"size": 32, "image_mean": "x"}, {"size": 32, "image_std": 3}])
def test_a_broken_preparation_of_images_is_refused(tmp_path: Path, content: Any) -> None:
    folder = image_folder(tmp_path / "m")
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(ExportError, match=r"cannot read .*preprocessor_config.json, which says how the model's images are"):
        open_hugging_face(folder, SourceOptions())


def test_a_models_length_limits_the_samples(tmp_path: Path) -> None:
    source = open_hugging_face(text_folder(tmp_path / "m", "BertModel", max_position_embeddings=9), SourceOptions())
    assert source.samples.inputs["input_ids"].shape == (len(SENTENCES), 9)


def _without(folder: Path, prefix: str) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def _edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _fewer_words(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    weights[name] = weights[name][:50].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _edited(folder / "config.json", vocab_size=50)


def _truncated(path: Path, count: int = 1000) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: _edited(folder / "config.json", **changes)


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights of the head": (
        lambda folder: _without(folder, "classifier."),
        "lack 2 tensors of a BertForSequenceClassification, such as 'classifier.bias'",
    ),
    "no weights of the pooler": (
        lambda folder: _without(folder, "bert.pooler."),
        "lack 2 tensors of a BertForSequenceClassification, such as 'bert.pooler.dense.bias'",
    ),
    "other sizes": (_edit_config(intermediate_size=48), r"do not fit config.json: .* has shape \(.*, expected \("),
    "truncated weights": (
        lambda folder: _truncated(folder / "model.safetensors"),
        "is no whole safetensors file: .*; copy or download",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights; expected one of"),
    "more layers in the weights": (
        _edit_config(num_hidden_layers=1),
        "tensors more than a BertForSequenceClassification, such as 'bert.encoder.layer.1.",
    ),
    "own code": (_edit_config(auto_map={"AutoModel": "m.Net"}), r"brings code of its own \(AutoModel\)"),
    "an unknown kind": (_edit_config(model_type="no-such"), "does not take model_type 'no-such'"),
    "no configuration": (lambda folder: (folder / "config.json").write_text("[]"), "has no model_type"),
    "damaged configuration": (lambda folder: (folder / "config.json").write_text("{"), "cannot read .*config.json"),
    "no tokenizer": (_no_tokenizer, "has no tokenizer, such as a tokenizer.json"),
    "a damaged tokenizer": (
        lambda folder: _truncated(folder / "tokenizer.json", 30),
        "tokenizer.json is no tokenizer: EOF .*; expected the file that save_pretrained",
    ),
    "a tokenizer of another model": (_fewer_words, r"has \d+ tokens, the model 50; they do not belong together"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(mistake: str, tmp_path: Path) -> None:
    folder = classifier_folder(tmp_path / "m", "BertForSequenceClassification")
    spoil, text = MISTAKES[mistake]
    spoil(folder)
    with pytest.raises(ExportError, match=text) as refused:
        open_hugging_face(folder, SourceOptions())
    assert "\n" not in str(refused.value)


def test_a_task_that_the_weights_are_not_for_is_refused(tmp_path: Path) -> None:
    folder = classifier_folder(tmp_path / "m", "BertForSequenceClassification")
    with pytest.raises(UsageError, match="'translate' is not known; expected one of embeddings, "):
        open_hugging_face(folder, SourceOptions(task="translate"))
    with pytest.raises(
        UsageError,
        match="--task token-classification needs .* a ...ForTokenClassification that takes text; .*--task text-classification",
    ):
        open_hugging_face(folder, SourceOptions(task="token-classification"))


def test_unknown_layers_of_sentence_transformers_are_refused(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "m", "mean_tokens")
    entries = json.loads((folder / "modules.json").read_text())
    entries.append({"idx": 3, "name": "3", "path": "3", "type": "sentence_transformers.models.LSTM"})
    (folder / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ExportError, match="names a LSTM; expected Transformer, Pooling, Dense and Normalize"):
        open_hugging_face(folder, SourceOptions())


def test_sparse_embeddings_are_those_of_splade(tmp_path: Path) -> None:
    folder = sparse_folder(tmp_path / "m")
    source = open_hugging_face(folder, SourceOptions())  # modules.json says the task
    assert source.task is not None
    assert source.task.name == "sparse-embeddings"
    inputs = {name: tensor[:4] for name, tensor in source.samples.inputs.items()}
    assert (inputs["attention_mask"] == 0).any(), "a text is padded"
    with torch.no_grad():
        logits = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()(**inputs).logits
        weights = torch.log(1 + torch.relu(logits)) * inputs["attention_mask"][..., None]
        torch.testing.assert_close(source.module(**inputs)["embedding"], weights.amax(1), atol=1e-5, rtol=1e-4)
        whole = {"input_ids": inputs["input_ids"], "attention_mask": torch.ones_like(inputs["input_ids"])}
        torch.testing.assert_close(source.module(inputs["input_ids"]), source.module(**whole))


def test_a_masked_language_model_makes_sparse_embeddings_where_it_is_said(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "m", "BertForMaskedLM")
    with pytest.raises(UsageError, match="holds a BertForMaskedLM; give its --task: embeddings, "):
        open_hugging_face(folder, SourceOptions())
    for task in ("sparse-embeddings", "feature-extraction"):
        source = open_hugging_face(folder, SourceOptions(task=task))
        assert source.task is not None
        assert source.task.name == task
    with pytest.raises(ExportError, match="has the pooling_strategy 'sum'; expected 'max'"):
        open_hugging_face(sparse_folder(tmp_path / "sums", pooling_strategy="sum"), SourceOptions())


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_tower_embeds_as_the_whole_model_does(tower: str, tmp_path: Path) -> None:
    folder = towers_folder(tmp_path / "m")
    source = open_hugging_face(folder, SourceOptions(task=f"{tower}-embeddings"))
    inputs = {name: tensor[:4] for name, tensor in source.samples.inputs.items()}
    whole = transformers.AutoModel.from_pretrained(folder).eval()
    prepared = (inputs.get("image", torch.zeros(4, 32, 32, 3)) / 255 - torch.tensor([0.5, 0.4, 0.3])) / torch.tensor(
        [
            0.2,
            0.25,
            0.3,
        ]
    )
    words = {name: inputs.get(name, torch.ones(4, 5, dtype=torch.int64)) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        answer = whole(pixel_values=prepared.permute(0, 3, 1, 2), **words)
        torch.testing.assert_close(source.module(**inputs)["embedding"], answer[f"{tower}_embeds"], atol=1e-5, rtol=1e-4)


def test_an_encoder_of_t5_embeds_without_its_decoder(tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path / "m")
    source = open_hugging_face(folder, SourceOptions())
    assert source.task is not None
    assert source.task.name == "embeddings"
    inputs = {name: tensor[:4] for name, tensor in source.samples.inputs.items()}
    tokens = transformers.T5EncoderModel.from_pretrained(folder)(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    dense = torch.load(folder / "2_Dense" / "pytorch_model.bin")
    pooled = (tokens * mask).sum(1) / mask.sum(1)
    expected = nn.functional.normalize(torch.tanh(pooled @ dense["linear.weight"].T + dense["linear.bias"]), dim=-1)
    torch.testing.assert_close(source.module(**inputs)["embedding"], expected, atol=1e-5, rtol=1e-4)


def test_a_decoders_body_embeds_by_its_last_token(tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path / "m")
    source = open_hugging_face(folder, SourceOptions())  # modules.json says the task
    assert source.task is not None
    assert source.task.name == "embeddings"
    inputs = {name: tensor[:4] for name, tensor in source.samples.inputs.items()}
    whole = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        texts = [ids[mask == 1][None] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        last = torch.cat([whole(text).last_hidden_state[:, -1] for text in texts])
        expected = nn.functional.normalize(last, dim=-1)
        torch.testing.assert_close(source.module(**inputs)["embedding"], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("task", [None, "image-embeddings"])
def test_a_body_of_pictures_embeds_them(task: str | None, tmp_path: Path) -> None:
    folder = picture_body_folder(tmp_path / "m")
    source = open_hugging_face(folder, SourceOptions(task=task))
    assert source.task is not None
    assert (source.name, source.task.name, source.task.labels) == ("m", "image-embeddings", ())
    image = source.samples.inputs["image"][:4]
    prepared = (image / 255 - torch.tensor([0.5, 0.4, 0.3])) / torch.tensor([0.2, 0.25, 0.3])
    whole = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = nn.functional.normalize(whole(prepared.permute(0, 3, 1, 2)).last_hidden_state[:, 0], dim=-1)
        torch.testing.assert_close(source.module(image)["embedding"], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("make", [encoder_folder, decoder_folder, picture_body_folder])
def test_bodies_of_other_architectures_pass_the_verdict(make: Callable[[Path], Path], tmp_path: Path) -> None:
    done = exported(open_hugging_face(make(tmp_path / "m"), SourceOptions()), tmp_path / "models")
    assert done.certificate.passed


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_a_model_that_writes_text_asks_for_its_task(architecture: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    kind = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama"}[architecture]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
    with pytest.raises(UsageError, match=f"holds a {architecture}; give its --task: embeddings, "):
        open_hugging_face(folder, SourceOptions())


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("T5ForConditionalGeneration", r"; for embeddings, .*: T5EncoderModel.from_pretrained\('.*'\).save_pretrained\(...\)"),
        ("WhisperForConditionalGeneration", ""),
    ],
)
@pytest.mark.parametrize("task", [None, "embeddings", "automatic-speech-recognition"])
def test_a_model_with_a_decoder_is_refused_by_name(architecture: str, more: str, task: str | None, tmp_path: Path) -> None:
    folder = writer_folder(tmp_path / "m", architecture)
    expected = f"holds a {architecture}, which writes its answer token by token; .*neither the decoder's loop nor its key-value"
    with pytest.raises(UsageError, match=f"{expected} cache{more}$"):
        open_hugging_face(folder, SourceOptions(task=task))


def test_a_model_of_two_towers_wants_to_know_which(tmp_path: Path) -> None:
    folder = towers_folder(tmp_path / "m")
    with pytest.raises(UsageError, match="--task image-embeddings and the other with --task text-embeddings"):
        open_hugging_face(folder, SourceOptions())
    with pytest.raises(UsageError, match="needs the weights of a"):
        open_hugging_face(folder, SourceOptions(task="embeddings"))


def test_a_model_that_is_given_no_mask_takes_texts_of_one_length(tmp_path: Path) -> None:
    folder = towers_folder(tmp_path / "m")
    _edited(folder / "tokenizer_config.json", model_input_names=["input_ids"])
    source = open_hugging_face(folder, SourceOptions(task="text-embeddings"))
    assert {name: tensor.shape[1] for name, tensor in source.samples.inputs.items()} == {"input_ids": 64}
    assert not source.dynamic


def test_a_body_of_audio_is_of_no_task(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "m", "Wav2Vec2Model")
    with pytest.raises(UsageError, match="holds a Wav2Vec2Model; of raw audio, expected a ...ForSequenceClassification or"):
        open_hugging_face(folder, SourceOptions())
    with pytest.raises(UsageError, match="needs the weights of a ...Model that takes text"):
        open_hugging_face(folder, SourceOptions(task="feature-extraction"))


def test_clips_are_normalised_in_the_graph(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "m", "Wav2Vec2ForCTC")
    source = open_hugging_face(folder, SourceOptions(samples=folder / "clips"))
    audio = source.samples.inputs["audio"]
    assert audio.shape == (12, 4000), "cut to the shortest"
    assert 0.1 < float(audio.abs().max()) <= 1
    extractor = transformers.Wav2Vec2FeatureExtractor.from_pretrained(folder)
    prepared = extractor(list(audio.numpy()), sampling_rate=16000, return_tensors="pt").input_values
    network = transformers.AutoModelForCTC.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(source.module(audio)["logits"], network(prepared).logits, atol=1e-4, rtol=1e-4)
    assert source.task is not None
    assert source.task.labels == ("<pad>", "|", "a", "b", "c")


CLIPS: dict[str, tuple[str | None, Callable[[Path], object], str]] = {
    "none": (None, lambda _: None, "give --samples FOLDER with .wav files of 16000 Hz"),
    "empty": ("empty", Path.mkdir, "has no clip; expected files that end in .wav"),
    "other rate": (
        "clips",
        lambda clips: write_clip(clips / "00.wav", np.zeros((9000, 1)), rate=44100),
        "has 44100 Hz and 16 bits; the model takes 16000 Hz.*ffmpeg -i 00.wav -ar 16000",
    ),
    "short": (
        "clips",
        lambda clips: write_clip(clips / "00.wav", np.zeros((90, 1))),
        "has 90 values a clip, 0.006 s; expected at least 0.1 s",
    ),
    "no sound": (
        "clips",
        lambda clips: (clips / "00.wav").write_bytes(b"RIFF"),
        "is no .wav file that can be read: it ends early",
    ),
    "short array": ("c.npy", lambda file: np.save(file, np.zeros((4, 90), np.float32)), "has 90 values a clip"),
    "flat array": (
        "c.npy",
        lambda file: np.save(file, np.zeros(9000, np.float32)),
        r"expected floats of shape \(clips, values\)",
    ),
}


@pytest.mark.parametrize("case", CLIPS)
def test_clips_that_cannot_be_used_are_refused(case: str, tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "m", "Wav2Vec2ForCTC")
    name, spoil, message = CLIPS[case]
    samples = folder / name if name else None
    if samples:
        spoil(samples)
    with pytest.raises(ExportError, match=message):
        open_hugging_face(folder, SourceOptions(samples=samples))


def test_a_model_of_spectrograms_is_refused(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "m", "Wav2Vec2ForCTC")
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "ASTFeatureExtractor"}))
    with pytest.raises(ExportError, match="names ASTFeatureExtractor; expected Wav2Vec2FeatureExtractor"):
        open_hugging_face(folder, SourceOptions(samples=folder / "clips"))


def _task_of(folder: Path, **options: Any) -> Task:
    task = open_hugging_face(folder, SourceOptions(**options)).task
    assert task is not None
    return task


def _roberta(folder: Path) -> Path:
    """Positions of a RoBERTa begin behind its padding index: 50 of them are for 48 tokens."""
    text_folder(folder, "BertModel")
    network = transformers.RobertaModel(
        transformers.RobertaConfig(vocab_size=5000, max_position_embeddings=50, pad_token_id=1, **SIZES)
    )
    network.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("made", "longest"),
    [
        (lambda folder: text_folder(folder, "BertModel"), 64),  # the tokenizer's bound; the model has 512 places
        (lambda folder: text_folder(folder, "BertModel", max_position_embeddings=40), 40),
        (_roberta, 48),
        (lambda folder: _with_bound(sentence_folder(folder, "mean_tokens"), 24), 24),
    ],
)
def test_the_tokenizer_of_a_version_states_the_models_longest_text(
    made: Callable[[Path], Path], longest: int, tmp_path: Path
) -> None:
    content = json.loads(_task_of(made(tmp_path / "model"), task="embeddings").files["tokenizer.json"])
    assert (content["truncation"]["max_length"], content["padding"]) == (longest, None)


def _with_bound(folder: Path, tokens: int) -> Path:
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": tokens}))
    return folder


def test_the_tokenizer_of_a_model_of_one_length_pads_to_it(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "model", "BertModel")
    _edited(folder / "tokenizer_config.json", model_input_names=["input_ids"])
    content = json.loads(_task_of(folder, task="embeddings").files["tokenizer.json"])
    assert content["padding"]["strategy"] == {"Fixed": 64}
    assert content["truncation"]["max_length"] == 64


def test_how_answers_become_scores_or_shorter_is_a_setting(tmp_path: Path) -> None:
    assert _task_of(classifier_folder(tmp_path / "one", "BertForSequenceClassification")).settings == {}
    several = classifier_folder(tmp_path / "several", "BertForSequenceClassification")
    _edited(several / "config.json", problem_type="multi_label_classification")
    assert _task_of(several).settings == {"halfserve.label_scores": "sigmoid"}
    nested = sentence_folder(tmp_path / "nested", "mean_tokens")
    _edited(nested / "config.json", matryoshka_dimensions=[8, 16])
    assert _task_of(nested).settings == {"halfserve.embedding_dimensions": "8,16"}
    _edited(nested / "config.json", matryoshka_dimensions=None, is_matryoshka=True)
    assert _task_of(nested).settings == {"halfserve.embedding_dimensions": "any"}


def test_captured_tokens_are_padded_as_texts_are(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "model", "BertModel")
    names = open_hugging_face(folder, SourceOptions()).samples.inputs
    short, long = ({name: np.full((rows, length), 1, np.int64) for name in names} for rows, length in ((2, 3), (1, 5)))
    wrong = {"x": np.zeros((1, 2), np.float32)}
    traffic = write_capture(tmp_path / "traffic", captured(short), captured(long, 1.0), captured(wrong, 2.0))
    source = open_hugging_face(folder, SourceOptions(samples=traffic))
    assert source.samples.inputs.keys() == names.keys()
    assert source.samples.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert source.samples.traffic is not None
    assert (source.samples.traffic.requests, source.samples.traffic.left_out) == (2, {"of another shape": 1})
