"""What requests of one form have in common, learned from the first of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from serve.engine.config.batching import Turn
from serve.engine.model import Model
from serve.engine.requests import RawLayout
from serve.engine.tensors import Tensors
from serve.protocol.infer_wire import CutRequest
from serve.protocol.placed_responses import PlacedResponses
from serve.protocol.response_forms import ResponseForms
from serve.protocol.shared_memory import Place
from serve.protocol.wanted_outputs import WantedOutput

# Of all forms together; a client that varies its form endlessly costs no more than this, and falls back to parsing.
MAX_FORMS = 1024
MAX_FORM_BYTES = 4096
MAX_OF_ONE_LENGTH = 4


@dataclass(frozen=True, slots=True, eq=False)
class RequestForm:
    """A request that has been checked, but for its id and its bytes.

    Attributes:
        model: that it asks.
        layout: of its raw contents; None where each request must be parsed for itself.
        outputs: names, in the order of the answer.
        rows: of its batch dimension.
        bucket: what it can share a batch with.
        turn: how it waits.
        lying: for each input its place in shared memory, None for one that is sent; None in place of all where all are.
        places: in shared memory, of inputs and outputs.
        special: the outputs that are not just sent.
        shared_bytes: of its inputs in shared memory.
        takes_long: whether its answers may take long to write: some outputs are not just sent, or are texts.
        placed: makes the answers where what is special of outputs is their places; None else.
    """

    model: Model
    layout: RawLayout | None
    outputs: tuple[str, ...]
    rows: int
    bucket: Hashable
    turn: Turn
    lying: tuple[Place | None, ...] | None = None
    places: tuple[Place, ...] = ()
    special: Mapping[str, WantedOutput] = field(default_factory=dict)
    shared_bytes: int = field(init=False)
    takes_long: bool = field(init=False)
    placed: PlacedResponses | None = field(init=False)
    _responses: ResponseForms = field(init=False)

    def __post_init__(self) -> None:
        texts = any(self.model.outputs[name].datatype.itemsize is None for name in self.outputs)
        object.__setattr__(self, "shared_bytes", sum(place.byte_size for place in self.lying or () if place is not None))
        object.__setattr__(self, "takes_long", bool(self.special) or texts)
        object.__setattr__(self, "placed", _placed(self.model, self.special))
        object.__setattr__(self, "_responses", ResponseForms(self.model, self.rows))

    def offsets(self, raw: list[tuple[int, int]]) -> tuple[int, ...] | None:
        """Where the inputs begin, by the places of the raw contents; None where their number or sizes are not this form's.

        Those in shared memory begin at 0.
        """
        layout = self.layout
        if layout is None:
            return None
        lying = self.lying or (None,) * len(layout.inputs)
        sent = [place for place, lies in enumerate(lying) if lies is None]
        if [size for _, size in raw] != [layout.inputs[place].size for place in sent]:
            return None
        offsets = [0] * len(lying)
        for place, (offset, _) in zip(sent, raw, strict=True):
            offsets[place] = offset
        return tuple(offsets)

    def response(self, request_id: bytes, outputs: Tensors) -> bytes:
        """The answer, serialized."""
        return self._responses.response(request_id, outputs)


def _placed(model: Model, special: Mapping[str, WantedOutput]) -> PlacedResponses | None:
    places = {name: wanted.place for name, wanted in special.items() if wanted.place is not None and wanted.classes is None}
    return PlacedResponses(model, places) if places and len(places) == len(special) else None


@dataclass(frozen=True, slots=True)
class Twin:
    """What tells that a request is another one of a form without looking at its fields: all but its holes is the same.

    Attributes:
        form: of both.
        layout: of that form.
        segments: what must be the same: (offset, bytes).
        offsets: where the inputs begin.
        id_start: where the id begins.
        id_end: where it ends; the same where there is none.
    """

    form: RequestForm
    layout: RawLayout
    segments: tuple[tuple[int, bytes], ...]
    offsets: tuple[int, ...]
    id_start: int
    id_end: int

    def is_like(self, data: bytes | memoryview) -> bool:
        """Whether `data`, which is as long, is another such request."""
        for offset, segment in self.segments:  # noqa: SIM110  (a generator would cost as much as the rest)
            if data[offset : offset + len(segment)] != segment:
                return False
        return True


class RequestForms:
    """The forms that were met, by the bytes that they are."""

    def __init__(self) -> None:
        self._forms: dict[bytes, RequestForm] = {}
        self._twins: dict[int, list[Twin]] = {}  # by the length of the request
        self._kept_twins = 0

    def twin(self, data: bytes | memoryview) -> Twin | None:
        """A request that `data` repeats but for its id and its tensors' bytes."""
        for twin in self._twins.get(len(data), ()):
            if twin.is_like(data):
                return twin
        return None

    def find(self, cut: CutRequest | None) -> RequestForm | None:
        """The form of a request that has been met before."""
        return None if cut is None else self._forms.get(cut.form)

    def keep(self, cut: CutRequest | None, form: RequestForm) -> None:
        """Remember a form, if it is small and its requests need not be parsed."""
        if cut is None or form.layout is None or len(cut.form) > MAX_FORM_BYTES:
            return
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        self._forms[cut.form] = form

    def keep_twin(self, data: bytes, cut: CutRequest, form: RequestForm) -> None:
        """Remember where a request of a form that is kept has its holes."""
        offsets = form.offsets(cut.raw)
        if form.layout is None or offsets is None:
            return
        if self._kept_twins >= MAX_FORMS:
            self._twins.clear()
            self._kept_twins = 0
        of_length = self._twins.setdefault(len(data), [])
        if len(of_length) >= MAX_OF_ONE_LENGTH:
            of_length.pop()
        else:
            self._kept_twins += 1
        holes = sorted([(cut.id_offset, len(cut.id)), *cut.raw])
        segments, start = [], 0
        for offset, size in holes:
            if offset > start:
                segments.append((start, data[start:offset]))
            start = offset + size
        if start < len(data):
            segments.append((start, data[start:]))
        twin = Twin(form, form.layout, tuple(segments), offsets, cut.id_offset, cut.id_offset + len(cut.id))
        of_length.insert(0, twin)

    def forget(self) -> None:
        """Forget all: the models have changed."""
        self._forms.clear()
        self._twins.clear()
        self._kept_twins = 0
