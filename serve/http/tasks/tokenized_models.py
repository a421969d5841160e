"""Models that take text: their tokenizers, loaded when the models are, and tokens as rows of inference requests."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from halfserve.files.varint import encoded_varint
from halfserve.installation import install_hint
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.disk_files import read_regular
from halfserve.serve.engine.errors import FailedPreconditionError, InferenceError, ModelLoadError, UnsupportedError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_repository import require_inside
from halfserve.serve.engine.tensors import ANY_SIZE
from halfserve.serve.http.routing.error_forms import Fault, InputError
from halfserve.serve.http.tasks.described_tokens import MAX_DESCRIBED, DescribedTokens
from halfserve.serve.http.tasks.text_bodies import Text, shown
from halfserve.serve.http.tasks.tokenizing import CHARACTERS_PER_TEXT, R, TokenizerThreads, TokenizerWork

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

logger = logging.getLogger(__name__)
EMBEDDINGS: Final = frozenset({"embeddings", "text-embeddings"})
RERANK: Final = frozenset({"rerank"})
CLASSIFICATION: Final = frozenset({"text-classification"})
SPARSE_EMBEDDINGS: Final = frozenset({"sparse-embeddings"})
TOKEN_VECTORS: Final = frozenset({"feature-extraction"})
TEXT_TASKS: Final = EMBEDDINGS | RERANK | CLASSIFICATION | SPARSE_EMBEDDINGS | TOKEN_VECTORS
TOKENIZER: Final = "tokenizer.json"
MAX_TOKENS: Final = 32_768  # limit for one text, where the tokenizer has none
# A text with more characters for each token that the model takes is refused, or cut, before it is tokenized: real text has 3
# to 6. So the time to tokenize is bounded.
CHARACTERS_PER_TOKEN: Final = 64
MAX_CHARACTERS: Final = 262_144  # of a text in any case: the longest takes 0.1 to 0.4 s, and 8 characters for each token
MAX_CHARACTERS_TOGETHER: Final = 8 * 2**20  # limit for all texts of a request, with the query counted for each text
RAW_ENTRY: Final = bytes((ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2,))
IDS, MASK, TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
INPUTS: Final = (IDS, MASK, TYPE_IDS)
ROW_BYTES: Final = 256  # memory of the objects of one row


def task_of(model: Model) -> str:
    """Return the task that `halfserve.task` names; "" for none."""
    return str(own_parameter(model.config, "halfserve.task") or "")


def labels_of(model: Model, count: int) -> Sequence[str]:
    """Names of the classes of the model's first output; LABEL_0 and so on where it has none, as transformers names them."""
    given = model.labels_of(next(iter(model.outputs)))
    return given if len(given) == count else [f"LABEL_{index}" for index in range(count)]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one text, special ones included, padding not.

    Attributes:
        ids: int32 (tokens,).
        type_ids: int32 (tokens,); None where all are 0.
    """

    ids: NDArray[np.int32]
    type_ids: NDArray[np.int32] | None

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return ROW_BYTES + self.ids.nbytes + (0 if self.type_ids is None else self.type_ids.nbytes)


class TokenizedModel:
    """One model version with its tokenizer. Its methods may be called on any thread.

    Attributes:
        model: the version.
        max_tokens: the most tokens of a text, special ones included.
        max_characters: the most that are tokenized of a text.
        output: the name of the output that answers, the model's first.
        tokenizer: does not cut texts.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        """Take the bounds that a tokenizer.json states.

        Raises:
            ModelLoadError: the model has other inputs than tokens.
        """
        strange = sorted(model.inputs.keys() - set(INPUTS))
        if strange or IDS not in model.inputs:
            raise ModelLoadError(f"its inputs are {', '.join(model.inputs)}; expected {IDS} and of {', '.join(INPUTS)}")
        self.model = model
        self.output = next(iter(model.outputs))
        fixed = model.inputs[IDS].shape[-1]
        stated = tokenizer.truncation
        self.max_tokens = MAX_TOKENS if stated is None else int(stated["max_length"])
        if fixed != ANY_SIZE:
            self.max_tokens = fixed
        self.max_characters = min(CHARACTERS_PER_TOKEN * self.max_tokens, MAX_CHARACTERS)
        padding = tokenizer.padding or {}
        self._least = 0 if fixed == ANY_SIZE else fixed
        self._pads_left = padding.get("direction") == "left"
        pads = {IDS: padding.get("pad_id", 0), TYPE_IDS: padding.get("pad_type_id", 0)}
        self.tokenizer, self._cutting = tokenizer, _sharing(tokenizer)
        tokenizer.no_truncation()
        direction = "right" if stated is None else stated["direction"]
        self._cutting.enable_truncation(self.max_tokens, direction=direction)
        for one in (tokenizer, self._cutting):
            one.no_padding()
        self._inputs = tuple((name, spec.datatype.array_dtype, pads.get(name, 0)) for name, spec in model.inputs.items())
        self._head = lru_cache(maxsize=4096)(self._made_head)

    def of_texts(self, texts: Sequence[Text], param: str, *, truncate: bool) -> TokenizerWork[TokenRow]:
        """Rows of texts, or of pairs of texts.

        Args:
            texts: texts of at least one character.
            param: the field of the request that they come from.
            truncate: whether to cut texts that are too long.

        Raises:
            InputError: a text is too long, or all together are; `tokens_of` raises it too, and where a text gives no token.
        """
        if not truncate:
            self.require_short(texts, param)
        most, tokenizer = self.max_characters, self._cutting if truncate else self.tokenizer

        def tokens_of(piece: range) -> list[TokenRow]:
            some = [_cut(texts[index], most) for index in piece]
            encodings = tokenizer.encode_batch_fast(some)
            return [self._row(encoding, param, index) for encoding, index in zip(encodings, piece, strict=True)]

        return self._work(texts, param, tokens_of)

    def of_ids(self, ids: Sequence[Sequence[Any]], param: str) -> TokenizerWork[TokenRow]:
        """Rows of token ids as the client gives them.

        Raises:
            InputError: `tokens_of` raises it where there is no id, there are too many, or one is not in the vocabulary.
        """
        return TokenizerWork(
            characters=[CHARACTERS_PER_TEXT + len(row) for row in ids],
            tokens_of=lambda piece: [self._row_of_ids(ids[index], param, index) for index in piece],
        )

    def require_short(self, texts: Sequence[Text], param: str) -> None:
        """Check the number of characters, which bounds the time to tokenize.

        Raises:
            InputError: a text has more than `max_characters`.
        """
        most = self.max_characters
        for index, length in enumerate(map(_longest, texts)):
            if length > most:
                raise self._too_long(param, index, f"{length} characters", f"{most} characters")

    def described(self, texts: Sequence[str], param: str, *, with_special: bool) -> TokenizerWork[DescribedTokens]:
        """Return the tokens of each text as TEI describes them.

        Args:
            texts: texts of at least one character.
            param: the field of the request that they come from.
            with_special: whether to add special tokens, which have no place in the text.

        Raises:
            InputError: a text is too long; `tokens_of` raises it too, where all together have more than MAX_DESCRIBED tokens.
        """
        self.require_short(texts, param)
        count = 0

        def tokens_of(piece: range) -> list[DescribedTokens]:
            nonlocal count
            some = [texts[index] for index in piece]
            encodings = self.tokenizer.encode_batch(some, add_special_tokens=with_special)
            count += sum(map(len, encodings))
            if count > MAX_DESCRIBED:
                raise InputError(
                    f"{param!r} gives more than {MAX_DESCRIBED} tokens, expected at most as many in one request; split it",
                    param=param,
                    fault=Fault.TOO_MANY,
                )
            return [DescribedTokens.of(text, encoding) for text, encoding in zip(some, encodings, strict=True)]

        return self._work(texts, param, tokens_of)

    def _row_of_ids(self, ids: Sequence[Any], param: str, index: int) -> TokenRow:
        if not ids:
            raise InputError(f"{param}[{index}] has no token ids, expected at least one", param=param, fault=Fault.EMPTY)
        if len(ids) > self.max_tokens:
            raise self._too_long(param, index, f"{len(ids)} tokens", f"{self.max_tokens} tokens")
        size = self.tokenizer.get_vocab_size()
        for number in ids:
            if type(number) is not int or not 0 <= number < size:
                raise InputError(f"{param}[{index}] has {shown(number)}, expected token ids from 0 to {size - 1}", param=param)
        return TokenRow(np.array(ids, np.int32), None)

    def message(self, row: TokenRow) -> bytes:
        """Return a serialized ModelInferRequest of one row, padded where the model's length is fixed."""
        count = len(row.ids)
        length = max(count, self._least)
        pieces = [self._head(length)]
        for name, dtype, pad in self._inputs:
            if name == IDS:
                raw = row.ids.astype(dtype).tobytes()
            elif name == TYPE_IDS and row.type_ids is not None:
                raw = row.type_ids.astype(dtype).tobytes()
            else:
                raw = dtype.type(name == MASK).tobytes() * count
            padding = dtype.type(pad).tobytes() * (length - count)
            raw = padding + raw if self._pads_left else raw + padding
            pieces += (RAW_ENTRY, encoded_varint(len(raw)), raw)
        return b"".join(pieces)

    def without_padding(self, tokens: NDArray[np.float32], row: TokenRow) -> NDArray[np.float32]:
        """Return the part of an output (tokens, ...) that belongs to the row's own tokens."""
        count = len(row.ids)
        return tokens[-count:] if self._pads_left else tokens[:count]

    def _row(self, encoding: Encoding, param: str, index: int) -> TokenRow:
        count = len(encoding)
        if not count:
            raise InputError(f"{param}[{index}] gives no token, expected text", param=param, fault=Fault.EMPTY)
        if count > self.max_tokens:
            raise self._too_long(param, index, f"{count} tokens", f"{self.max_tokens} tokens")
        types = encoding.type_ids
        return TokenRow(np.array(encoding.ids, np.int32), np.array(types, np.int32) if any(types) else None)

    def _work(self, texts: Sequence[Text], param: str, tokens_of: Callable[[range], list[R]]) -> TokenizerWork[R]:
        characters = _costs(texts, self.max_characters)
        if sum(characters) > MAX_CHARACTERS_TOGETHER:
            raise InputError(
                f"the texts have {sum(characters)} characters, those of a query counted with each text, expected at most "
                f"{MAX_CHARACTERS_TOGETHER} in one request; split it",
                param=param,
                fault=Fault.TOO_MANY,
            )
        return TokenizerWork(characters=characters, tokens_of=tokens_of)

    def _made_head(self, length: int) -> bytes:
        """Return the part of a message that is the same for all texts of this many tokens."""
        head = ModelInferRequest(model_name=self.model.name, model_version=str(self.model.version))
        for name, spec in self.model.inputs.items():
            head.inputs.add(name=name, datatype=spec.datatype.wire, shape=[1, length])
        head.outputs.add(name=self.output)
        return head.SerializeToString(deterministic=True)

    def _too_long(self, param: str, index: int, given: str, most: str) -> InputError:
        return InputError(
            f"{param}[{index}] has {given}, expected at most {most} for model {self.model.name!r}; shorten it",
            param=param,
            fault=Fault.TOO_LONG,
        )


class TokenizedModels:
    """The text models of a server. Lives on the event loop.

    Attributes:
        threads: tokenize for all of them.
    """

    def __init__(self, core: InferenceCore) -> None:
        self._core = core
        self._loading: dict[Model, asyncio.Task[TokenizedModel | InferenceError]] = {}
        self.threads = TokenizerThreads()
        self._follows = False

    def start(self) -> None:
        """Load the tokenizers of all text models, now and whenever models change."""
        self._core.on_change(self._follow)
        self._follows = True
        self._follow()

    def stop(self) -> None:
        """Undo `start`; nothing if it was not called: the server could not listen."""
        if self._follows:
            self._core.off_change(self._follow)
        self._follows = False
        for task in self._loading.values():
            task.cancel()
        self._loading.clear()

    async def of(self, model: Model) -> TokenizedModel:
        """Return a text model.

        Raises:
            FailedPreconditionError: its tokenizer is missing or cannot be used.
            UnsupportedError: the package tokenizers is missing.
        """
        loaded = await asyncio.shield(self._begin(model))
        if isinstance(loaded, InferenceError):
            raise loaded
        return loaded

    def _follow(self) -> None:
        served = [model for model in self._core.models() if task_of(model) in TEXT_TASKS]
        for model in self._loading.keys() - set(served):
            self._loading.pop(model)
        for model in served:
            self._begin(model)

    def _begin(self, model: Model) -> asyncio.Task[TokenizedModel | InferenceError]:
        task = self._loading.get(model)
        if task is None:
            task = self._loading[model] = asyncio.get_running_loop().create_task(asyncio.to_thread(_load, model))
        return task


def _cut(text: Text, most: int) -> Text:
    return text[:most] if isinstance(text, str) else (text[0][:most], text[1][:most])


def _costs(texts: Sequence[Text], most: int) -> list[int]:
    """Return the cost of each text to tokenize, in characters; `most`: characters that are tokenized of it at most."""
    if set(map(type, texts)) == {str}:  # in half the time
        return [CHARACTERS_PER_TEXT + min(most, length) for length in map(len, texts)]
    return [
        CHARACTERS_PER_TEXT + sum(min(most, len(part)) for part in ((text,) if isinstance(text, str) else text))
        for text in texts
    ]


def _longest(text: Text) -> int:
    return len(text) if isinstance(text, str) else max(map(len, text))


def _load(model: Model) -> TokenizedModel | InferenceError:
    """Return a text model, or why there is none, which is logged."""
    label = f"{model.name}/{model.version}"
    try:
        return TokenizedModel(model, _tokenizer(model))
    except ImportError:
        lacking = f"the server lacks the package tokenizers; {install_hint('text')}"
        logger.warning("%s: takes no text: %s", label, lacking, extra={"model": label})
        return UnsupportedError(f"model {model.name!r} takes no text here: {lacking}")
    except Exception as error:  # tokenizers raises plain Exceptions
        # Anything may be in the file of a user.
        unexpected = not isinstance(error, OSError | ModelLoadError)
        said, about = "%s: cannot use its %s: %s", {"model": label}
        logger.warning(said, label, TOKENIZER, error, exc_info=unexpected, extra=about)
        return FailedPreconditionError(
            f"model {model.name!r} takes no text here: its {TOKENIZER} is missing or does not fit; the server's log says more"
        )


def _tokenizer(model: Model) -> Tokenizer:
    # Its threads would compete with those of the models; texts of one call are tokenized on one.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer  # noqa: PLC0415  (an extra, imported when a text model is loaded)

    if model.path is None:
        raise ModelLoadError("the model has no files")
    path = model.path.parent / TOKENIZER
    require_inside(model.path.parent.parent.parent, path)
    return Tokenizer.from_buffer(read_regular(path))


def _sharing(whole: Tokenizer) -> Tokenizer:
    """Return a tokenizer with truncation and padding of its own, that shares the vocabulary's memory."""
    from tokenizers import Tokenizer  # noqa: PLC0415  (see `_tokenizer`)

    other = Tokenizer(whole.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(whole, part) is not None:
            setattr(other, part, getattr(whole, part))
    added = whole.get_added_tokens_decoder()
    for number in sorted(added):
        (other.add_special_tokens if added[number].special else other.add_tokens)([added[number]])
    # Ids of added tokens need not be consecutive.
    return other if other.get_added_tokens_decoder() == added else Tokenizer.from_str(whole.to_str())
