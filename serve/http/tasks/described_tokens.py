"""Tokens as text-embeddings-inference describes them: each with its text and its place in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Encoding

MAX_DESCRIBED: Final = 65_536  # tokens in one request: 6 MB of JSON, written in 0.1 s
TEXT_BYTES: Final = 600  # memory of the objects of one text
SPECIAL_BYTES: Final = 128  # memory of a special token's text
NO_PLACE: Final = (0, 0)  # place of a special token
TOGETHER: Final = 256  # tokens described at once: a description takes 1 us and 500 bytes
PIECE_BYTES: Final = 16_384  # size of the pieces in which JSON is written


@dataclass(frozen=True, slots=True)
class DescribedTokens:
    """The tokens of one text, in 12 bytes each.

    Attributes:
        text: tokenized text.
        ids: int32 (tokens,).
        places: int32 (tokens, 2): the first character of each token, and the one after its last.
        special: the texts of special tokens, which have no place in the text, by their index.
    """

    text: str
    ids: NDArray[np.int32]
    places: NDArray[np.int32]
    special: Mapping[int, str]

    @classmethod
    def of(cls, text: str, encoding: Encoding) -> DescribedTokens:
        """Return the tokens of an encoding of `text`."""
        special = list(compress(range(len(encoding)), encoding.special_tokens_mask))
        names = encoding.tokens if special else []
        # One by one: each of the encoding's lists holds the interpreter lock while it is made, the offsets for 0.1 us a token.
        places = (encoding.token_to_chars(index) or NO_PLACE for index in range(len(encoding)))
        return cls(
            text,
            np.fromiter(encoding.ids, np.int32, len(encoding)),
            np.fromiter(chain.from_iterable(places), np.int32, 2 * len(encoding)).reshape(-1, 2),
            {index: names[index] for index in special},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory, besides the text."""
        return TEXT_BYTES + self.ids.nbytes + self.places.nbytes + SPECIAL_BYTES * len(self.special)

    def described(self, first: int, end: int) -> list[dict[str, Any]]:
        """Return the tokens with these indices."""
        ids, places = self.ids[first:end].tolist(), self.places[first:end].tolist()
        return [
            {"id": number, "text": self.text[start:stop], "special": False, "start": start, "stop": stop}
            if index not in self.special
            else {"id": number, "text": self.special[index], "special": True, "start": None, "stop": None}
            for index, (number, (start, stop)) in enumerate(zip(ids, places, strict=True), first)
        ]


def json_pieces(texts: Sequence[DescribedTokens]) -> Iterator[bytes]:
    """Yield the JSON of a list with a list of tokens for each text, in pieces that take less than a millisecond each."""
    written = bytearray(b"[")
    for number, tokens in enumerate(texts):
        written += b",[" if number else b"["
        for first in range(0, len(tokens.ids), TOGETHER):
            written += b"," if first else b""
            written += orjson.dumps(tokens.described(first, first + TOGETHER))[1:-1]
            if len(written) >= PIECE_BYTES:
                yield bytes(written)
                written.clear()
        written += b"]"
    yield bytes(written + b"]")
