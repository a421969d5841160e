"""Folders as `save_pretrained` writes them: tiny models with random weights, and tokenizers that know the shipped sentences."""

from __future__ import annotations

import json
import wave
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = files("halfserve.export.tasks").joinpath("sentences.txt").read_text("utf-8").splitlines()
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
LABELS = ("person", "place", "other")


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A BERT-like tokenizer of single words."""
    own = Tokenizer(models.WordLevel(unk_token="[UNK]"))  # noqa: S106  (a token of text)
    own.normalizer, own.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    own.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=special))
    own.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, model_max_length=64, **names)  # type: ignore[no-untyped-call]


def text_folder(folder: Path, architecture: str, **config: Any) -> Path:
    """A folder of a BERT of this architecture, such as `BertForTokenClassification`."""
    words = tokenizer()
    torch.manual_seed(0)
    made = transformers.BertConfig(vocab_size=len(words), pad_token_id=0, initializer_range=0.2, **SIZES, **config)
    getattr(transformers, architecture)(made).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def classifier_folder(folder: Path, architecture: str, labels: tuple[str, ...] = LABELS) -> Path:
    return text_folder(
        folder, architecture, id2label=dict(enumerate(labels)), label2id={label: index for index, label in enumerate(labels)}
    )


def sentence_folder(folder: Path, *pooling: str, dense: bool = False) -> Path:
    """A sentence-transformers folder."""
    text_folder(folder, "BertModel")
    kinds = [
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        *([("Dense", "2_Dense")] if dense else []),
        ("Normalize", "3_Normalize"),
    ]
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{how}": True for how in pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    if dense:
        (folder / "2_Dense").mkdir()
        size = {"in_features": 32 * len(pooling), "out_features": 16, "bias": True}
        (folder / "2_Dense" / "config.json").write_text(
            json.dumps({**size, "activation_function": "torch.nn.modules.activation.Tanh"})
        )
        layer = torch.nn.Linear(size["in_features"], size["out_features"])
        from safetensors.torch import save_file  # noqa: PLC0415

        save_file(
            {f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}, folder / "2_Dense" / "model.safetensors"
        )
    return folder


def sparse_folder(folder: Path, **pooling: str) -> Path:
    """A folder of a sparse encoder of sentence-transformers (SPLADE)."""
    text_folder(folder, "BertForMaskedLM")
    kinds = [("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")]
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.sparse_encoder.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_SpladePooling").mkdir()
    settings = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None, **pooling}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    return folder


def image_folder(folder: Path) -> Path:
    """A folder of a ViT that classifies images of 32 by 32."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **SIZES, image_size=32, patch_size=8, initializer_range=0.2, id2label=dict(enumerate(LABELS))
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    content = {
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "size": {"height": 32, "width": 32},
        "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return folder


def encoder_folder(folder: Path) -> Path:
    """A sentence-transformers folder of a T5's encoder alone, whose dense layer torch.save wrote."""
    sentence_folder(folder, "mean_tokens", dense=True)
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=len(tokenizer()), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    dense = folder / "2_Dense" / "model.safetensors"
    torch.save(safetensors.torch.load_file(dense), dense.with_name("pytorch_model.bin"))
    dense.unlink()
    return folder


def decoder_folder(folder: Path, architecture: str = "Qwen3ForCausalLM") -> Path:
    """A sentence-transformers folder of a Qwen, whose texts are pooled by their last token."""
    sentence_folder(folder, "lasttoken")
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "tie_word_embeddings": False}
    config = transformers.Qwen3Config(vocab_size=len(tokenizer()) + 7, initializer_range=0.2, **SIZES, **heads)
    getattr(transformers, architecture)(config).save_pretrained(folder)
    return folder


def picture_body_folder(folder: Path) -> Path:
    """A folder of a DINOv2, which embeds images of 32 by 32."""
    image_folder(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.Dinov2Model(transformers.Dinov2Config(image_size=32, patch_size=8, **sizes)).save_pretrained(folder)
    return folder


def writer_folder(folder: Path, architecture: str) -> Path:
    """A folder whose config.json names this architecture; nothing else in it is read."""
    folder.mkdir()
    kind = "whisper" if architecture.startswith("Whisper") else "t5"
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
    return folder


def towers_folder(folder: Path) -> Path:
    """A folder of a CLIP whose images are 32 by 32."""
    words = tokenizer()
    words.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**SIZES, "vocab_size": len(words), "eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0},
        vision_config={**SIZES, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    content = {
        "do_rescale": True,
        "do_normalize": True,
        "crop_size": {"height": 32, "width": 32},
        "size": {"shortest_edge": 32},
    }
    parts = {"image_processor": {**content, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}}
    (folder / "processor_config.json").write_text(json.dumps(parts))
    return folder


def audio_folder(folder: Path, architecture: str) -> Path:
    """A folder of a wav2vec 2.0 of this architecture, with clips beside it in `clips/`."""
    torch.manual_seed(0)
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": 5, "pad_token_id": 0}
    sizes = {**SIZES, **convolutions, **positions, "classifier_proj_size": 16, "initializer_range": 0.2}
    config = transformers.Wav2Vec2Config(**sizes, id2label=dict(enumerate(LABELS)))
    getattr(transformers, architecture)(config).save_pretrained(folder)
    content = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": True, "sampling_rate": 16000}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    (folder / "vocab.json").write_text(json.dumps({"<pad>": 0, "|": 1, "a": 2, "b": 3, "c": 4}))
    (folder / "clips").mkdir()
    noise = np.random.default_rng(0)
    for index in range(12):
        values = noise.standard_normal((4000 + 100 * index, 2)).cumsum(axis=0)
        write_clip(folder / "clips" / f"{index:02}.wav", values / np.abs(values).max() * 30000)
    return folder


def write_clip(path: Path, values: NDArray[Any], rate: int = 16000) -> None:
    """Values (count, channels) in 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(values.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(values.astype("<i2").tobytes())
