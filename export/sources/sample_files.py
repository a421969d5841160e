"""Files of samples: arrays, texts, and audio clips."""

from __future__ import annotations

import wave
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfserve.export.captured_samples import captured_arrays, captured_files
from halfserve.export.export_errors import ExportError
from halfserve.export.samples import Samples
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.verification.samples import UNNAMED, read_array_file
from halfserve.protos.captured_requests import SampledTraffic, is_capture


def array_samples(path: Path, count: int, padding: Mapping[str, int] | None = None) -> Samples:
    """Return samples from an .npz or .npy file (see `read_arrays`), or captured requests in a folder (see `captured_arrays`).

    Raises:
        ExportError: They cannot be read, or are texts or files.
    """
    if not path.is_dir():
        return Samples(inputs=read_arrays(path, count), labels=None)
    arrays, traffic = captured_arrays(path, count, padding)
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Samples(inputs=inputs, labels=None, traffic=traffic)


def read_arrays(path: Path, count: int) -> Tensor | dict[str, Tensor]:
    """Return the first samples of an .npz, by the parameters of forward, or of an .npy, for a single parameter.

    Raises:
        ExportError: It cannot be read, or an array has a type that torch does not have.
    """
    arrays = read_array_file(path)
    try:
        tensors = {name: torch.from_numpy(array[:count].copy()) for name, array in arrays.items() if array.ndim}
    except TypeError as error:
        raise ExportError(
            f"{path} holds an array of another type than numbers; expected floats, whole numbers or booleans"
        ) from error
    if len(tensors) < len(arrays) or not tensors:
        raise ExportError(f"{path} holds a single number, or nothing; expected arrays whose first dimension counts the samples")
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if not max(lengths.values()):
        raise ExportError(f"{path} holds no samples: each array is empty; expected at least 1 in its first dimension")
    if len(set(lengths.values())) > 1 or not min(lengths.values()):
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ExportError(
            f"{path} holds different numbers of samples: {counts}; expected the same number, at least 1, in each array"
        )
    return tensors[UNNAMED] if tensors.keys() == {UNNAMED} else tensors


def read_sentences(path: Path, count: int) -> tuple[list[str], SampledTraffic | None]:
    """Return the first lines of a text file, empty ones left out; or the texts of captured requests in a folder,
    none where they hold tensors.

    Raises:
        ExportError: It cannot be read, is not UTF-8, or has no text.
    """
    if path.is_dir():
        captured, traffic = captured_files(path, count)
        return [text.decode("utf-8", "replace") for text in captured], traffic
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ExportError(f"cannot read the samples {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8 text; expected a sentence in each line") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ExportError(f"{path} has no text; expected a sentence in each line")
    return texts[:count], None


ARRAYS = frozenset({".npy", ".npz"})
# Bytes of a value, as its type, and half of its range. Values of one byte have no sign.
WIDTHS = {1: ("u1", 128.0), 2: ("<i2", 2.0**15), 4: ("<i4", 2.0**31)}
SHORTEST_S = 0.1


def clip_samples(options: SourceOptions, rate: int) -> Samples:
    """Return the user's clips, cut to the shortest of them: float32 (clips, values), from -1 to 1.

    They lie in a folder of .wav files of the model's sampling rate, in values per second, or in an .npy or .npz file.

    Raises:
        ExportError: There are none, or they cannot be read, are of another rate, or are too short.
    """
    path = options.samples
    if path is None:
        raise ExportError(
            f"a model of audio needs clips for its verdict: give --samples FOLDER with .wav files of {rate} Hz, or an .npy"
        )
    if is_capture(path) or (path.suffix in ARRAYS and not path.is_dir()):
        samples = array_samples(path, options.max_samples)
        audio = _audio(path, samples.inputs)
        _require_length(path, audio.shape[1], rate)
        return replace(samples, inputs={"audio": audio})
    if not path.is_dir():
        raise ExportError(f"{path} is no folder; expected a folder of .wav files, or an .npy")
    paths = sorted(entry for entry in path.iterdir() if entry.suffix.lower() == ".wav")[: options.max_samples]
    if not paths:
        raise ExportError(f"{path} has no clip; expected files that end in .wav")
    clips = {clip: read_clip(clip, rate) for clip in paths}
    shortest = min(clips, key=lambda clip: len(clips[clip]))
    length = len(clips[shortest])
    _require_length(shortest, length, rate)
    note = f"each clip was cut to the length of the shortest, {length / rate:.2f} s"
    return Samples(inputs={"audio": torch.stack([clip[:length] for clip in clips.values()])}, labels=None, note=note)


def _require_length(path: Path, length: int, rate: int) -> None:
    if length < SHORTEST_S * rate:
        raise ExportError(f"{path} has {length} values a clip, {length / rate:.3f} s; expected at least {SHORTEST_S} s")


def _audio(path: Path, arrays: Tensor | dict[str, Tensor]) -> Tensor:
    values = arrays.get("audio") if isinstance(arrays, dict) else arrays
    if values is None or values.dim() != 2 or not values.is_floating_point():
        raise ExportError(f"{path} holds no clips; expected floats of shape (clips, values), in an .npz under the name audio")
    return values.float()


def read_clip(path: Path, rate: int) -> Tensor:
    """Return the mean of a .wav file's channels, float32 (values,), from -1 to 1.

    Raises:
        ExportError: It cannot be read, or is of another rate.
    """
    try:
        with wave.open(str(path)) as file:
            found, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ExportError(
            f"{path} is no .wav file that can be read: {str(error) or 'it ends early'}; {_advice(path, rate)}"
        ) from error
    if found != rate or width not in WIDTHS:
        raise ExportError(
            f"{path} has {found} Hz and {8 * width} bits; the model takes {rate} Hz, in 8, 16 or 32 bits; {_advice(path, rate)}"
        )
    kind, half = WIDTHS[width]
    whole = content[: len(content) // (width * channels) * width * channels]  # a file that was cut ends within a frame
    values = np.frombuffer(whole, kind).astype(np.float32) / np.float32(half)
    values -= np.float32(width == 1)
    return torch.from_numpy(values.reshape(-1, channels).mean(axis=1))


def _advice(path: Path, rate: int) -> str:
    return f"convert it: ffmpeg -i {path.name} -ar {rate} -ac 1 -c:a pcm_s16le OTHER.wav"
