"""Inputs for a model without samples: pictures of text, sounds, spectrograms, bytes; several sizes for dynamic models.

Noise would show less: a text detector finds nothing in it, and an error relative to an answer of zeros says little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from tests.export.conversions.runtime import Session

# The batch size and the other dynamic dimensions, in order; the last applies to all further ones.
SIZES: tuple[tuple[int, ...], ...] = (
    (1, 48, 320), (1, 320, 480), (2, 64), (1, 160), (2, 320), (1, 640, 640), (1, 576), (1, 512), (1, 16000), (2, 224, 224),
)  # fmt: skip
TRIALS = 3
TEXT = "The quick brown fox 0123456789 jumps over the lazy dog; Sphinx of black quartz, judge my vow. "


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One set of inputs that the float32 model answers with finite numbers."""

    label: str
    feeds: dict[str, np.ndarray[Any, Any]]
    answers: list[Any]


def trials(content: bytes) -> list[Trial]:
    """Up to `TRIALS` sets of inputs of different sizes, with float32's answers; [] if the model accepts none of the guesses."""
    model = onnx.load_from_string(content)
    initialized = {tensor.name for tensor in model.graph.initializer}
    wanted = [value for value in model.graph.input if value.name not in initialized]
    session = Session(content)
    found: list[Trial] = []
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for number, (label, feeds) in enumerate(_guesses(wanted)):
        shapes = tuple(array.shape for array in feeds.values())
        if shapes in seen and len(found) > 0 and number % 2 == 0:
            continue
        answers = _answers(session, feeds)
        if answers is not None:
            seen.add(shapes)
            found.append(Trial(label=label, feeds=feeds, answers=answers))
        if len(found) == TRIALS:
            break
    return found


def _answers(session: Session, feeds: dict[str, np.ndarray[Any, Any]]) -> list[Any] | None:
    try:
        answers = session.run(feeds)
    except Exception:  # noqa: BLE001  (a guess that does not fit)
        return None
    floats = [np.asarray(a) for a in answers if not isinstance(a, list)]
    finite = all(np.isfinite(a).all() for a in floats if np.issubdtype(a.dtype, np.floating))
    return answers if finite and any(a.size for a in floats) else None


def _guesses(wanted: list[onnx.ValueInfoProto]) -> Iterator[tuple[str, dict[str, np.ndarray[Any, Any]]]]:
    """For each size: pictures in [-1, 1] and other values unscaled, then pictures in [0, 1] and everything twice as loud."""
    for sizes in SIZES:
        for variant in (0, 1):
            rng = np.random.default_rng(len(sizes) + variant)
            feeds = {value.name: _array(value, _shape(value, sizes), variant, rng) for value in wanted}
            label = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items() if array.ndim)
            yield f"{label}, variant {variant}", feeds


def _shape(value: onnx.ValueInfoProto, sizes: tuple[int, ...]) -> list[int]:
    batch, others = sizes[0], sizes[1:]
    shape: list[int] = []
    free = 0
    for place, dim in enumerate(value.type.tensor_type.shape.dim):
        if dim.dim_value > 0:
            shape.append(dim.dim_value)
        elif place == 0 or "batch" in dim.dim_param or _is_state(value):
            shape.append(batch)
        else:
            shape.append(others[min(free, len(others) - 1)])
            free += 1
    return shape


def _is_state(value: onnx.ValueInfoProto) -> bool:
    return value.name in {"h", "c", "h0", "c0", "state", "hidden", "cell"}


def _array(value: onnx.ValueInfoProto, shape: list[int], variant: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    if not shape:
        known = {"sr": 16000, "fmin": 50, "fmax": 2000}
        return np.array(known.get(value.name, 1), dtype)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 256 if dtype != np.int64 else 100, shape).astype(dtype)
    if _is_state(value):
        return (0.1 * rng.standard_normal(shape)).astype(dtype)
    if len(shape) == 4 and shape[1] in (1, 3) and shape[-1] not in (160, 257):
        picture = np.stack([_page(shape[2], shape[3], shape[1], number) for number in range(shape[0])])
        return (picture if variant else 2 * picture - 1).astype(dtype)
    if len(shape) == 2 or shape[-1] == 1 or 1 in shape[1:-1]:
        return ((variant + 1) * _sound(shape, rng)).astype(dtype)
    return ((variant + 1) * rng.standard_normal(shape)).astype(dtype)


def _page(height: int, width: int, channels: int, number: int) -> np.ndarray[Any, Any]:
    """Return a page of text, shape (channels, height, width), 0 is black and 1 is white."""
    from PIL import Image, ImageDraw, ImageFont  # noqa: PLC0415  (only pages of text need it)

    page = Image.new("L", (width, height), 245 - 20 * number)
    draw = ImageDraw.Draw(page)
    size = max(12, min(height // 2, 36))
    font = ImageFont.load_default(size)
    for line, top in enumerate(range(size // 4, height, 2 * size)):
        draw.text((4, top), TEXT[(line + number) % 40 :], font=font, fill=(25 + 40 * line) % 150)
    return np.broadcast_to(np.asarray(page, np.float32) / 255, (channels, height, width))


def _sound(shape: list[int], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Three partials of a voice-like tone with noise, at 16 kHz along the longest axis, amplitude about 0.3."""
    count = int(np.prod(shape))
    time = np.arange(count) / 16000
    tone = sum(np.sin(2 * np.pi * 140 * k * time) / k for k in (1, 2, 3))
    return np.asarray(0.2 * tone + 0.02 * rng.standard_normal(count)).reshape(shape)
