"""The tasks of Hugging Face folders: how the models of each are loaded, and which one an architecture is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.sources.sentence_transformers import is_sparse
from halfserve.export.tasks.judges import judge_embeddings, judge_token_labels, judge_token_vectors
from halfserve.export.to_onnx.capture import one_line, root
from halfserve.export.verification.judging import Judge

if TYPE_CHECKING:
    from transformers import PretrainedConfig

AUDIO = "raw audio"
PICTURES, TEXT = "pictures", "text"
TOWERS = "pictures and text"
# A model of one of these is a body with a head that writes text, which export would silently leave away.
WRITING_HEADS = ("HeadModel", "HeadsModel")
# These write their answer token by token, with a decoder that reads what it wrote.
WRITERS = ("ForConditionalGeneration", "T5Model")
MAIN_INPUTS = {"input_values": AUDIO, "pixel_values": PICTURES}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How models of a task are loaded.

    Attributes:
        auto_class: The class of transformers that loads them.
        architecture: The end of the architecture's name by which the task is known.
        takes: The kind of input of the model.
        has_towers: Whether the task is for one tower of a model that takes `TOWERS`.
        output: The attribute of the model's answer.
        judge: See `Task`.
        pairs: Whether a sample is a pair of texts.
    """

    auto_class: str
    architecture: str
    takes: str = TEXT
    has_towers: bool = False
    output: str = "logits"
    judge: Judge | None = None
    pairs: bool = False


KINDS = {
    "embeddings": Kind(auto_class="AutoModel", architecture="Model", judge=judge_embeddings),
    "feature-extraction": Kind(
        auto_class="AutoModel", architecture="Model", output="last_hidden_state", judge=judge_token_vectors
    ),
    "sparse-embeddings": Kind(auto_class="AutoModelForMaskedLM", architecture="ForMaskedLM", judge=judge_embeddings),
    "text-classification": Kind(auto_class="AutoModelForSequenceClassification", architecture="ForSequenceClassification"),
    "rerank": Kind(auto_class="AutoModelForSequenceClassification", architecture="ForSequenceClassification", pairs=True),
    "token-classification": Kind(
        auto_class="AutoModelForTokenClassification", architecture="ForTokenClassification", judge=judge_token_labels
    ),
    "image-classification": Kind(
        auto_class="AutoModelForImageClassification", architecture="ForImageClassification", takes=PICTURES
    ),
    "image-embeddings": Kind(
        auto_class="AutoModel", architecture="Model", takes=PICTURES, has_towers=True, judge=judge_embeddings
    ),
    "text-embeddings": Kind(
        auto_class="AutoModel", architecture="Model", takes=TOWERS, has_towers=True, judge=judge_embeddings
    ),
    "audio-classification": Kind(
        auto_class="AutoModelForAudioClassification", architecture="ForSequenceClassification", takes=AUDIO
    ),
    "automatic-speech-recognition": Kind(auto_class="AutoModelForCTC", architecture="ForCTC", takes=AUDIO),
}
PER_TOKEN = frozenset({"feature-extraction", "token-classification"})


def task_of(transformers: Any, config: PretrainedConfig, folder: Path, asked: str | None) -> str:
    """Return the task of a folder's model: the one that is asked for (`--task`), or the one that its architecture says.

    Raises:
        UsageError: The task is not known, not one that this architecture has weights for, or cannot be told.
        ExportError: The code of this architecture cannot be imported.
    """
    if asked is not None and asked not in KINDS:
        raise UsageError(f"--task {asked!r} is not known; expected one of {', '.join(KINDS)}")
    architecture = next(iter(config.architectures or ()), "")
    if architecture.endswith(WRITERS):
        raise _writer(architecture, folder)
    takes = _takes(_class_of(transformers, architecture))
    fitting = [
        name
        for name, kind in KINDS.items()
        if architecture.endswith(kind.architecture) and not architecture.endswith(WRITING_HEADS) and _fits(kind, takes)
    ]
    if asked is not None:
        # The body of any model of text or pictures embeds, whatever head its weights have beside it.
        if asked in fitting or (KINDS[asked].architecture == "Model" and KINDS[asked].takes in takes):
            return asked
        raise UsageError(
            f"--task {asked} needs the weights of a ...{KINDS[asked].architecture} that takes {KINDS[asked].takes}; {folder} "
            f"holds a {architecture or 'model of no architecture'}" + (f", which is for --task {fitting[0]}" if fitting else "")
        )
    if not fitting and AUDIO in takes:
        heads = " or ".join(f"...{kind.architecture}" for kind in KINDS.values() if kind.takes == AUDIO)
        raise UsageError(f"{folder} holds a {architecture}; of raw audio, expected a {heads}; give others as MODULE:FACTORY")
    # The head of most masked language models is left from their training, and makes no embeddings.
    fitting = [name for name in fitting if name != "sparse-embeddings" or is_sparse(folder)]
    is_of_sentences = (folder / "modules.json").is_file()
    if not fitting and is_of_sentences and TEXT in takes:
        return "embeddings"  # sentence-transformers uses the body of any architecture
    if not fitting:
        raise UsageError(f"{folder} holds a {architecture or 'model of no architecture'}; give its --task: {', '.join(KINDS)}")
    found = fitting[0]
    if TOWERS in takes:
        raise UsageError(
            f"{folder} holds a {architecture}, which has a tower for pictures and one for texts, each a model of its own; "
            f"export one with --task {fitting[0]} and the other with --task {fitting[1]}"
        )
    if found == "text-classification" and config.num_labels == 1:
        return "rerank"
    return "feature-extraction" if found == "embeddings" and not is_of_sentences else found


def _class_of(transformers: Any, architecture: str) -> Any:
    try:
        return getattr(transformers, architecture, None)
    except ImportError as error:  # it imports a model's code where it is asked for
        raise ExportError(
            f"transformers {transformers.__version__} cannot import {architecture}: {one_line(root(error))}"
        ) from error


def _writer(architecture: str, folder: Path) -> UsageError:
    encoder = f"{architecture.removesuffix('ForConditionalGeneration').removesuffix('Model')}EncoderModel"
    message = (
        f"{folder} holds a {architecture}, which writes its answer token by token; export takes models that answer in one "
        "pass, and has neither the decoder's loop nor its key-value cache"
    )
    if "T5" in architecture:
        message += (
            "; for embeddings, save its encoder in a folder of its own: "
            f"{encoder}.from_pretrained({str(folder)!r}).save_pretrained(...)"
        )
    return UsageError(message)


def _fits(kind: Kind, takes: frozenset[str]) -> bool:
    return kind.has_towers if TOWERS in takes else kind.takes in takes


def _takes(architecture: Any) -> frozenset[str]:
    """Return the kinds of input that an architecture's models accept, by its class; None if transformers has none."""
    if architecture is None:
        return frozenset({TEXT, PICTURES})
    if hasattr(architecture, "get_image_features") and hasattr(architecture, "get_text_features"):
        return frozenset({TOWERS})
    return frozenset({MAIN_INPUTS.get(getattr(architecture, "main_input_name", ""), TEXT)})
