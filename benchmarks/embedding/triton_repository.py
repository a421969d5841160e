"""The compared task for Triton: a Python model with the tokenizer, an ONNX model, and the ensemble of the two.

The tokenizer pads the texts of a batch to one length, so that the ONNX model can batch them again: Triton batches requests of
one length only.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch

from halfserve.export.sources.hugging_face import open_hugging_face
from halfserve.export.sources.source_options import SourceOptions

ENSEMBLE, OUTPUT = "embed", "sentence_embedding"
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
BATCHED = "max_batch_size: 32 instance_group { count: 1 kind: KIND_CPU } dynamic_batching { } "
PYTHON_MODEL = Path(__file__).parent / "triton_tokenizer.py"


def write_triton_repository(folder: Path, repository: Path, threads: int) -> None:
    """Write the three models.

    Args:
        folder: The Hugging Face folder with the tokenizer, and the model in float32 with pooling and norm.
        repository: The repository to write; must not exist.
        threads: The number of ONNX Runtime's threads; 0 for one per core.
    """
    source = open_hugging_face(folder, SourceOptions(task="embeddings"))
    examples = {name: tensor[:2] for name, tensor in source.samples.inputs.items()}
    for name in ("tokenize", "encoder", ENSEMBLE):
        (repository / name / "1").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about itself
        torch.onnx.export(
            source.module,
            kwargs=examples,
            f=repository / "encoder" / "1" / "model.onnx",
            dynamo=True,
            dynamic_shapes={name: {0: "batch", 1: "length"} for name in examples},
            external_data=False,
            verbose=False,
            output_names=[OUTPUT],
        )
    shutil.copy(folder / "tokenizer.json", repository / "tokenize" / "1")
    shutil.copy(PYTHON_MODEL, repository / "tokenize" / "1" / "model.py")
    width = source.module(**examples)["embedding"].shape[-1]
    tokens = [f'name: "{name}" data_type: TYPE_INT64 dims: -1' for name in TOKENS]
    text = 'input { name: "TEXT" data_type: TYPE_STRING dims: 1 } '
    answer = f'output {{ name: "{OUTPUT}" data_type: TYPE_FP32 dims: {width} }} '
    made = "".join(f'output_map {{ key: "{name}" value: "{name}" }} ' for name in TOKENS)
    taken = made.replace("output_map", "input_map")
    configs = {
        "tokenize": f'backend: "python" {BATCHED}{text}' + "".join(f"output {{ {spec} }} " for spec in tokens),
        "encoder": f'platform: "onnxruntime_onnx" backend: "onnxruntime" {BATCHED}{answer}'
        + "".join(f"input {{ {spec} }} " for spec in tokens)
        + f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{threads}" }} }}',
        ENSEMBLE: f'platform: "ensemble" max_batch_size: 32 {text}{answer}ensemble_scheduling {{ '
        f'step {{ model_name: "tokenize" model_version: -1 input_map {{ key: "TEXT" value: "TEXT" }} {made}}} '
        f'step {{ model_name: "encoder" model_version: -1 {taken}output_map {{ key: "{OUTPUT}" value: "{OUTPUT}" }} }} }}',
    }
    for name, config in configs.items():
        (repository / name / "config.pbtxt").write_text(f'name: "{name}" {config}\n')
