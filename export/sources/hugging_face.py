"""A Hugging Face folder: configuration, safetensors weights, and what prepares text, pictures or audio."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfserve.amp_core.weights.file_kinds import WeightsError
from halfserve.amp_core.weights.state_dicts import load_weights
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.samples import Samples
from halfserve.export.sources.hugging_face_tasks import AUDIO, KINDS, PER_TOKEN, PICTURES, TOWERS, Kind, task_of
from halfserve.export.sources.image_libraries import open_timm_folder, require_fitting_torchvision
from halfserve.export.sources.picture_preparation import (
    LibraryPreparation,
    of_transformers,
    picture_samples,
    proved,
    served_preparation,
)
from halfserve.export.sources.sample_files import clip_samples
from halfserve.export.sources.sentence_transformers import is_sparse, sentence_layers
from halfserve.export.sources.source import Source, repository_name, with_training
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.sources.tokenized_text import padding_values, read_tokenizer, served_tokenizer, text_samples
from halfserve.export.tasks.judges import judge_decoded
from halfserve.export.tasks.served_models import (
    AudioModel,
    Embedder,
    ImageModel,
    Normalized,
    PooledImage,
    Preprocessing,
    SparseEmbedder,
    TextNetwork,
    Tower,
)
from halfserve.export.tasks.task import Task
from halfserve.export.to_onnx.capture import one_line
from halfserve.export.verification.judging import Judge
from halfserve.installation import install_hint
from halfserve.protos.pictures import PicturePreparation

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

CONFIG = "config.json"
# Of raw audio, as wav2vec 2.0, HuBERT and WavLM take it; other models want spectrograms.
RAW_AUDIO = "Wav2Vec2FeatureExtractor"
STEPS = ("do_center_crop", "do_normalize", "do_rescale")  # options of an image processor
MAY_HAVE_SEVERAL_LABELS = ("text-classification", "image-classification")


def open_hugging_face(folder: Path, options: SourceOptions) -> Source:
    """Return the model in a folder that `save_pretrained` of transformers or sentence-transformers wrote.

    The folder holds config.json, the weights, and the files of what prepares the inputs. The task follows from the architecture
    where none is asked for.

    Raises:
        ExportError: The folder lacks a file, needs code of its own, or its weights or tokenizer do not fit the model.
        UsageError: The task is not known, or not one that this architecture has weights for.
    """
    content = _content(folder)
    if "architecture" in content and "model_type" not in content:
        if options.task not in (None, "image-classification"):
            raise UsageError(f"{folder} holds a model of timm, which is for --task image-classification")
        return open_timm_folder(folder, content, options)
    transformers = _transformers()
    config = _config(transformers, folder, content, trusted=options.trust_remote_code)
    task = task_of(transformers, config, folder, options.task)
    kind = KINDS[task]
    network = _network(transformers, folder, config, kind, trusted=options.trust_remote_code)
    if kind.takes == AUDIO:
        source = _audio_source(folder, options, network, task)
    elif kind.takes == PICTURES:
        source = _image_source(folder, options, network, task)
    else:
        tokenizer = read_tokenizer(transformers, folder, config, trusted=options.trust_remote_code)
        source = _text_source(folder, options, network, task, tokenizer)
    return with_training(source, folder, network)


def _transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415  (an extra, and slow to import)
    except ModuleNotFoundError as error:
        lacking = f"a Hugging Face folder needs the package {error.name}; {install_hint('hf')}"
        raise ExportError(lacking) from error
    except ImportError as error:  # another package has a version that it does not take
        raise ExportError(f"transformers cannot be imported: {one_line(error)}") from error
    # Where it is there, the code of every model imports it.
    require_fitting_torchvision()
    # Bars are for downloads of gigabytes; the command tells its own progress.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Its table of weights that do not fit; an error says it in one line.
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers


def _content(folder: Path) -> dict[str, Any]:
    """Read config.json."""
    try:
        content = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"cannot read {folder / CONFIG}: {one_line(error)}") from error
    if not isinstance(content, dict) or not content.keys() & {"model_type", "architecture"}:
        raise ExportError(f"{folder / CONFIG} has no model_type; expected a folder that save_pretrained of transformers wrote")
    return content


def _config(transformers: Any, folder: Path, content: Mapping[str, Any], *, trusted: bool) -> PretrainedConfig:
    if "auto_map" in content and not trusted:
        raise ExportError(
            f"{folder} brings code of its own ({', '.join(sorted(map(str, content['auto_map'])))}), which is not run; give "
            "--trust-remote-code where you trust it, or make the module in a factory of yours: "
            "halfserve export MODULE:FACTORY --weights FILE"
        )
    try:
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trusted
        )
    except Exception as error:  # transformers raises anything for what it does not know
        known = f"transformers {transformers.__version__} does not take model_type {content['model_type']!r}"
        raise ExportError(f"{folder / CONFIG}: {known}: {one_line(error)}") from error
    return config


def _network(transformers: Any, folder: Path, config: PretrainedConfig, kind: Kind, *, trusted: bool) -> PreTrainedModel:
    architecture = next(iter(config.architectures or ()), "")
    # The class for any body would load the decoder too.
    loader = architecture if architecture.endswith("EncoderModel") and hasattr(transformers, architecture) else kind.auto_class
    try:
        network, loading = getattr(transformers, loader).from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=trusted,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
        )
    except Exception as error:  # as above; safetensors raises its own
        _require_whole_weights(folder)
        raise ExportError(f"cannot load the model in {folder}: {one_line(error)}") from error
    # A body's own pooler and the mask of training are not used, and may be missing; anything else would be random numbers.
    pooler = () if kind.takes == PICTURES else ("pooler.",)
    unused = {name for name in loading["missing_keys"] if name.startswith(pooler) or name.endswith("masked_spec_embed")}
    missing = sorted(loading["missing_keys"] - unused)
    if missing:
        raise ExportError(
            f"the weights in {folder} lack {len(missing)} tensors of a {type(network).__name__}, such as {missing[0]!r}; they "
            "are of another model than config.json says"
        )
    if loading["mismatched_keys"]:
        name, *shapes = min(loading["mismatched_keys"])
        raise ExportError(
            f"the weights in {folder} do not fit config.json: {name!r} has shape "
            f"{tuple(shapes[0])}, expected {tuple(shapes[1])}"
        )
    if unexpected := _unexpected(network, loading["unexpected_keys"]):
        raise ExportError(
            f"the weights in {folder} have {len(unexpected)} tensors more than a {type(network).__name__}, such as "
            f"{unexpected[0]!r}; they are of another model than config.json says"
        )
    network.config.use_cache = False
    model: PreTrainedModel = network.eval()
    return model


def _require_whole_weights(folder: Path) -> None:
    """Say which file of weights cannot be read, where that is why a model cannot be loaded."""
    try:
        load_weights(folder)
    except WeightsError as error:
        raise ExportError(str(error)) from error


def _unexpected(network: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the weights that belong into a part that the network has, such as one more layer; heads for other tasks do not."""
    prefix = f"{network.base_model_prefix}."
    parts = {name for module in (network, network.base_model) for name, _ in module.named_children()}
    return sorted(n for n in names if n.endswith(".weight") and n.removeprefix(prefix).partition(".")[0] in parts)


def _answer_settings(config: Any, task: str) -> dict[str, str]:
    """Metadata that a server needs to answer with scores, or with shorter embeddings."""
    if task in MAY_HAVE_SEVERAL_LABELS and config.problem_type == "multi_label_classification":
        return {"halfserve.label_scores": "sigmoid"}
    sizes = getattr(config, "matryoshka_dimensions", None)
    if task == "embeddings" and sizes:
        return {"halfserve.embedding_dimensions": ",".join(str(int(size)) for size in sizes)}
    if task == "embeddings" and getattr(config, "is_matryoshka", False) is True:
        return {"halfserve.embedding_dimensions": "any"}
    return {}


def _labels(config: Any) -> tuple[str, ...]:
    return tuple(str(config.id2label[index]) for index in range(config.num_labels))


def _source(folder: Path, module: nn.Module, samples: Samples, task: Task) -> Source:
    name = repository_name(folder.resolve().name)
    return Source(module=module.eval(), samples=samples, name=name, task=task)


def _text_source(
    folder: Path, options: SourceOptions, network: PreTrainedModel, task: str, tokenizer: PreTrainedTokenizerFast
) -> Source:
    kind = KINDS[task]
    samples, dynamic = text_samples(tokenizer, network.config, options, pairs=kind.pairs)
    module: nn.Module
    if kind.takes == TOWERS:
        module = TextNetwork(Tower(network, "text"), "embedding")
    elif task == "embeddings":
        poolings, layers = sentence_layers(folder) or (("mean",), (Normalized(),))
        module = Embedder(network, poolings, layers)
    elif task == "sparse-embeddings":
        is_sparse(folder)  # refuses another pooling
        module = SparseEmbedder(network)
    else:
        module = TextNetwork(network, kind.output)
    labels = _labels(network.config) if kind.architecture.endswith("Classification") and not kind.pairs else ()
    fixed_length = None if dynamic else samples.inputs["input_ids"].shape[1]
    made = Task(
        name=task,
        judge=kind.judge,
        labels=labels,
        files={"tokenizer.json": served_tokenizer(tokenizer, network, folder, fixed_length=fixed_length)},
        settings=_answer_settings(network.config, task),
        padding=padding_values(tokenizer, dynamic),
        per_token=task in PER_TOKEN,
    )
    source = _source(folder, module, samples, made)
    return replace(source, dynamic=dynamic, name=f"{source.name}-text" if kind.takes == TOWERS else source.name)


def _image_source(folder: Path, options: SourceOptions, network: PreTrainedModel, task: str) -> Source:
    path, content = _preparation(folder, "image_processor", "images")
    is_tower, embeds = hasattr(network, "get_image_features"), KINDS[task].has_towers
    processor = _image_processor(folder, trusted=options.trust_remote_code)
    try:
        if processor is not None:
            # With the defaults of its class, and without the steps that it leaves out.
            content = {**dict.fromkeys(STEPS, False), **processor.to_dict()}
        preprocessing = Preprocessing.from_hugging_face(content, network.config.vision_config if is_tower else network.config)
    except (AttributeError, TypeError, ValueError) as error:
        raise _unprepared(path, "images", error) from error
    preprocessing, note = proved(preprocessing, lambda: _as_processed(processor, preprocessing), "transformers")
    body: nn.Module = Tower(network, "image") if is_tower else PooledImage(network) if embeds else network
    module = ImageModel(body, preprocessing, "embedding" if embeds else "logits")
    made = Task(
        name=task,
        judge=KINDS[task].judge,
        labels=() if embeds else _labels(network.config),
        files=served_preparation(preprocessing),
        settings=_answer_settings(network.config, task),
    )
    source = _source(folder, module, picture_samples(preprocessing, options).noting(note), made)
    return replace(source, name=f"{source.name}-image") if is_tower else source


def _image_processor(folder: Path, *, trusted: bool) -> Any:
    """Return the folder's image processor, in its variant with Pillow, as a server has it; None where transformers cannot load
    it.
    """
    try:
        return _transformers().AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=trusted
        )
    except Exception:  # noqa: BLE001  (transformers raises anything for what it does not know)
        return None


def _as_processed(processor: Any, preprocessing: Preprocessing) -> tuple[PicturePreparation, LibraryPreparation]:
    """Return an image processor's preparation of pictures, and the processor itself as a function."""
    if processor is None:
        raise ValueError("transformers cannot load the folder's image processor")
    preparation = of_transformers(processor, preprocessing.height, preprocessing.width)
    return preparation, lambda picture: processor(picture, return_tensors="np")["pixel_values"][0]


def _audio_source(folder: Path, options: SourceOptions, network: PreTrainedModel, task: str) -> Source:
    path, content = _preparation(folder, "feature_extractor", "clips")
    kind = content.get("feature_extractor_type")
    if kind != RAW_AUDIO:
        raise ExportError(
            f"{path} names {kind}; expected {RAW_AUDIO}, of a model that takes raw audio: give others as MODULE:FACTORY"
        )
    try:
        rate = int(content["sampling_rate"])
        module = AudioModel(network, is_normalised=bool(content.get("do_normalize", True)))
    except (KeyError, TypeError, ValueError) as error:
        raise _unprepared(path, "clips", error) from error
    judge: Judge | None = None
    labels = _labels(network.config) if task == "audio-classification" else _tokens(folder, network.config.vocab_size)
    if task == "automatic-speech-recognition":
        judge = partial(judge_decoded, blank=network.config.pad_token_id)
    samples = clip_samples(options, rate)
    source = _source(folder, module, samples, Task(name=task, judge=judge, labels=labels))
    return replace(source, dynamic={"audio": {1: "values"}})


def _preparation(folder: Path, part: str, inputs: str) -> tuple[Path, Mapping[str, Any]]:
    """Return the file that says how inputs are prepared, and what it says; newer folders hold it as a part of another."""
    path = folder / "preprocessor_config.json"
    whole = folder / "processor_config.json"
    if not path.is_file() and whole.is_file():
        path = whole
    try:
        content = json.loads(path.read_text("utf-8"))
        found: Mapping[str, Any] = content[part] if path == whole else content
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _unprepared(path, inputs, error) from error
    if not isinstance(found, dict):
        raise _unprepared(path, inputs, TypeError(f"it holds a {type(found).__name__}"))
    return path, found


def _unprepared(path: Path, inputs: str, error: Exception) -> ExportError:
    return ExportError(f"cannot read {path}, which says how the model's {inputs} are prepared: {one_line(error)}")


def _tokens(folder: Path, count: int) -> tuple[str, ...]:
    """Return the tokens of a CTC model by their number; none where its vocabulary is not a plain table."""
    try:
        content = json.loads((folder / "vocab.json").read_text("utf-8"))
        names = {int(index): str(token) for token, index in content.items()}
    except (OSError, AttributeError, TypeError, ValueError):
        return ()
    return tuple(names.get(index, f"<{index}>") for index in range(count))
