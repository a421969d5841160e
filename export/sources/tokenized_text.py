"""Text as samples: a Hugging Face folder's tokenizer, and tokens of the user's sentences or of halfserve's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from halfserve.export.export_errors import ExportError
from halfserve.export.samples import Samples
from halfserve.export.sources.sample_files import array_samples, read_sentences
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.to_onnx.capture import one_line
from halfserve.protos.captured_requests import SampledTraffic

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

SHIPPED_TEXT = "the samples are sentences that halfserve ships; give --samples TEXT_FILE for a verdict on your own"
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
MASK = "attention_mask"
LONGEST = 128  # tokens of a sample; a verdict on longer ones takes samples of the user's
SENTENCE_SETTINGS = "sentence_bert_config.json"  # sentence-transformers' own bound of a text's length
UNBOUNDED = 10**6  # tokens; transformers writes 10**30 for a tokenizer without a bound


def read_tokenizer(transformers: Any, folder: Path, config: PretrainedConfig, *, trusted: bool) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a folder, with a token to pad with, which a `config` without `pad_token_id` gets too.

    Raises:
        ExportError: There is none, it is written in Python alone, or it does not fit the model.
    """
    # Without any, transformers makes up a tokenizer that knows no word.
    if not any(path.is_file() for pattern in VOCABULARIES for path in folder.glob(pattern)):
        raise ExportError(
            f"{folder} has no tokenizer, such as a tokenizer.json; save the model's own there with save_pretrained"
        )
    _require_whole_tokenizer(folder / "tokenizer.json")
    try:
        tokenizer: PreTrainedTokenizerFast = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trusted
        )
    except Exception as error:  # transformers raises anything
        raise ExportError(
            f"cannot load the tokenizer in {folder}: {one_line(error)}; save it there with save_pretrained"
        ) from error
    if not tokenizer.is_fast:
        raise ExportError(
            f"the tokenizer in {folder} is written in Python alone; save its fast form, with a tokenizer.json, there"
        )
    known = config.get_text_config().vocab_size
    if len(tokenizer) > known:
        raise ExportError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, the model {known}; they do not belong together"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ExportError(f"the tokenizer in {folder} has no token to pad with; set pad_token and save it again")
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def _require_whole_tokenizer(path: Path) -> None:
    """Ask the library that reads the file; transformers says only which key it missed."""
    from tokenizers import Tokenizer  # noqa: PLC0415  (comes with transformers)

    if not path.is_file():
        return  # transformers makes one of the vocabulary
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no type of its own
        raise ExportError(
            f"{path} is no tokenizer: {error}; expected the file that save_pretrained of the model's tokenizer writes"
        ) from error


def text_samples(
    tokenizer: PreTrainedTokenizerFast, config: PretrainedConfig, options: SourceOptions, *, pairs: bool
) -> tuple[Samples, Mapping[str, Mapping[int, str]]]:
    """Tokens of the texts, or of each text with the next as a pair, int64 (texts, length); and the sizes that vary.

    Captured requests of a text endpoint have the tokens that the model got, and are taken as they are.
    A model that is given no mask was trained on texts of one length, and takes no other.

    Raises:
        ExportError: The user's samples cannot be read.
    """
    is_masked = MASK in tokenizer.model_input_names
    texts, note, traffic = _texts(options)
    if texts or options.samples is None:
        inputs = _tokenized(tokenizer, config, texts, pairs=pairs, is_masked=is_masked)
        samples = Samples(inputs=inputs, labels=None, note=note, traffic=traffic)
    else:
        names = [name for name in TOKENS if name in tokenizer.model_input_names]
        samples = array_samples(options.samples, options.max_samples, padding_values(tokenizer, names))
    return samples, {name: {1: "length"} for name in samples.inputs} if is_masked else {}


def _tokenized(
    tokenizer: PreTrainedTokenizerFast, config: PretrainedConfig, texts: Sequence[str], *, pairs: bool, is_masked: bool
) -> dict[str, Tensor]:
    settings = config.get_text_config()
    places = min(tokenizer.model_max_length, getattr(settings, "max_position_embeddings", LONGEST))
    second = [*texts[1:], texts[0]] if pairs else None
    encoded = tokenizer(
        list(texts),
        second,
        padding=True if is_masked else "max_length",
        truncation=True,
        max_length=min(places, LONGEST) if is_masked else places,
        return_tensors="pt",
    )
    return {name: encoded[name] for name in TOKENS if name in encoded}


def served_tokenizer(
    tokenizer: PreTrainedTokenizerFast, network: PreTrainedModel, folder: Path, *, fixed_length: int | None
) -> bytes:
    """Return a tokenizer.json for a server: `truncation` holds the most tokens that the model takes, as its folder says.

    `fixed_length` is the number of tokens of every text, which `padding` then has; None if texts may have any length.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415  (comes with transformers)

    # A copy: the samples have left their own bound and padding in the original.
    served = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    longest = fixed_length or _most_tokens(tokenizer, network, folder)
    if longest is None:
        served.no_truncation()
    else:
        served.enable_truncation(longest, strategy="longest_first", direction=tokenizer.truncation_side)
    if fixed_length is None:
        served.no_padding()
    else:
        served.enable_padding(
            direction=tokenizer.padding_side,
            pad_id=tokenizer.pad_token_id,
            pad_type_id=tokenizer.pad_token_type_id,
            pad_token=str(tokenizer.pad_token),
            length=fixed_length,
        )
    return served.to_str().encode()


def _most_tokens(tokenizer: PreTrainedTokenizerFast, network: PreTrainedModel, folder: Path) -> int | None:
    """Return the most tokens of a text, special ones included; None where nothing bounds them."""
    settings = network.config.get_text_config()
    bounds = [tokenizer.model_max_length, getattr(settings, "max_position_embeddings", None), _sentence_bound(folder)]
    for name, module in network.named_modules():
        # RoBERTa and its like count positions from behind their padding index.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            bounds.append(module.num_embeddings - module.padding_idx - 1)
    known = [bound for bound in bounds if isinstance(bound, int) and 0 < bound < UNBOUNDED]
    return min(known, default=None)


def _sentence_bound(folder: Path) -> Any:
    path = folder / SENTENCE_SETTINGS
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"cannot read {path}: {one_line(error)}") from error
    return content.get("max_seq_length") if isinstance(content, dict) else None


def _texts(options: SourceOptions) -> tuple[Sequence[str], str, SampledTraffic | None]:
    if options.samples is None:
        shipped = files("halfserve.export.tasks").joinpath("sentences.txt").read_text("utf-8").splitlines()
        return shipped, SHIPPED_TEXT, None
    texts, traffic = read_sentences(options.samples, options.max_samples)
    return texts, "", traffic


def padding_values(tokenizer: PreTrainedTokenizerFast, inputs: Iterable[str]) -> dict[str, int]:
    """Return the padding value of each input at the end of a text; empty if texts have no mask, or are padded at the start."""
    values = {
        "input_ids": tokenizer.pad_token_id,
        MASK: 0,
        "token_type_ids": tokenizer.pad_token_type_id,
    }
    padded = {name: int(values[name]) for name in inputs}
    return padded if MASK in padded and tokenizer.padding_side == "right" else {}
