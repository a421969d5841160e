"""Samples in tar files, WebDataset's layout: `{key}.{field}` side by side, grouped by key."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from halfserve.amp_core.data.data_errors import DataError
from halfserve.amp_core.data.tar_index import index_shards, shard_paths
from halfserve.amp_core.factory import one_line

Decoder = Callable[[bytes], Any]


def _npy(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


def _pt(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _image(content: bytes) -> Tensor:
    """Decode an image to uint8 of shape [1, height, width] if it is gray, else [3, height, width]."""
    from PIL import Image  # noqa: PLC0415  (only those who read images need Pillow)

    with Image.open(io.BytesIO(content)) as image:
        pixels = np.array(image if image.mode in {"L", "RGB"} else image.convert("RGB"))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1).contiguous()


def _integer(content: bytes) -> int:
    return int(content)


def _text(content: bytes) -> str:
    return content.decode("utf-8")


_IMAGES = ("png", "jpg", "jpeg", "webp", "ppm")
DECODERS: dict[str, Decoder] = {
    "npy": _npy,
    "pt": _pt,
    "pth": _pt,
    "json": json.loads,
    "cls": _integer,
    "txt": _text,
    **dict.fromkeys(_IMAGES, _image),
}


def decoder_for(field: str, own: Mapping[str, Decoder]) -> Decoder:
    """Return the decoder of a field, such as `image.npy`; the user's own, by its whole name or its last part, take precedence.

    Raises:
        DataError: If there is none, or it needs a package that is not installed.
    """
    kind = field.rpartition(".")[2]
    if field in own or kind in own:
        return own.get(field) or own[kind]
    if kind not in DECODERS:
        raise DataError(
            f"there is no decoder for the field {field!r}; known are {', '.join(DECODERS)}, "
            f"or give your own: decode={{{kind!r}: function of bytes}}"
        )
    if kind in _IMAGES and importlib.util.find_spec("PIL") is None:
        raise DataError(f"decoding {field!r} needs Pillow; install it by `pip install pillow`")
    return DECODERS[kind]


Transform = Callable[[Any, Any], tuple[Any, Any]]


class TarShards(Dataset[tuple[Any, Any]]):
    """See `tar_shards`."""

    def __init__(
        self,
        paths: Sequence[Path],
        fields: tuple[str, str],
        decode: Mapping[str, Decoder],
        transform: Transform | None,
        shuffle_window: int,
    ) -> None:
        alternatives = [field.lower().split(";") for field in fields]
        self._paths = list(paths)
        self._decoders = [[decoder_for(name, decode) for name in names] for names in alternatives]
        self._transform = transform
        self._shuffle_window = shuffle_window
        self._index = index_shards(self._paths, alternatives)

    def __len__(self) -> int:
        return len(self._index.shard)

    def __getitem__(self, item: int) -> tuple[Any, Any]:
        if not 0 <= item < len(self):
            raise IndexError(f"there is no sample {item}; the shards have {len(self)}")
        path = self._paths[self._index.shard[item]]
        try:
            # Opened for each item (4 microseconds): a file left open would share its position with forked workers.
            with path.open("rb") as file:
                first, second = (self._field(file, path, item, field) for field in range(2))
        except OSError as error:
            raise DataError(f"cannot read the shard {path}: {error.strerror or error}") from error
        return (first, second) if self._transform is None else self._transform(first, second)

    def _field(self, file: IO[bytes], path: Path, item: int, field: int) -> Any:
        offset, size = int(self._index.offset[item, field]), int(self._index.size[item, field])
        content = _read(file, offset, size)
        if len(content) < size:
            raise DataError(f"the shard {path} has become shorter since training began; leave the shards alone while it runs")
        try:
            return self._decoders[field][self._index.choice[item, field]](content)
        except Exception as error:
            name = _member_name(file, offset)
            raise DataError(f"{path}: {name!r} cannot be decoded: {one_line(error)}") from error

    def epoch_order(self, generator: torch.Generator) -> Tensor:
        """Shards in random order, their samples mixed within a window; int64 of shape [samples].

        A sample moves by less than the window, so that only the neighbouring shards are read at a time.
        """
        samples, window = len(self), self._shuffle_window
        if window >= samples:
            return torch.randperm(samples, generator=generator)
        places = torch.randperm(len(self._paths), generator=generator).numpy()  # place of each shard in the random order
        by_shard = torch.from_numpy(np.argsort(places[self._index.shard], kind="stable"))
        moved = torch.arange(samples) + torch.rand(samples, generator=generator, dtype=torch.float64) * window
        return by_shard[moved.argsort(stable=True)]


def _read(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _member_name(file: IO[bytes], offset: int) -> str:
    try:
        return tarfile.TarInfo.frombuf(_read(file, offset - 512, 512), "utf-8", "surrogateescape").name
    except tarfile.HeaderError:
        return f"member at byte {offset}"


def tar_shards(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    fields: tuple[str, str] = ("image.npy", "label.cls"),
    decode: Mapping[str, Decoder] | None = None,
    transform: Transform | None = None,
    shuffle_window: int = 10_000,
) -> TarShards:
    """Return a data set of the samples in local tar files.

    A sample is a run of files whose names are equal up to the first dot, as in WebDataset's shards: `000017.image.npy`,
    `000017.label.cls`. The headers of all shards are read at once (20 microseconds a file), so the set has a length, a
    truncated shard fails before training starts, and a resumed run does not read earlier samples. Each sample is read by the
    one worker that needs it, for any numbers of shards, workers and ranks.

    Compressed or remote shards cannot be read at an offset: use `webdataset.WebDataset` for them.

    Args:
        shards: One or more patterns, such as `shards/train-{0000..0011}.tar` or `shards/*.tar`.
        fields: The input's and the target's: the name after the first dot, in lower case; with alternatives as `png;jpg`.
        decode: Functions from bytes, by a field's name or by its last part. Without: npy (array), pt (read by
            `torch.load(weights_only=True)`), json, cls (integer), txt (string), and with Pillow png, jpg, jpeg, webp, ppm
            (uint8 tensor of shape [1 or 3, height, width]).
        transform: (input, target) -> (input, target), after decoding: augmentation, normalization, cutting to one size.
        shuffle_window: In training the shards come in random order, and samples are mixed within a window of this many samples.
            The larger, the more random; from the number of samples on, the order is a random permutation.

    Raises:
        DataError: Naming the file, if one is missing, truncated, damaged, compressed, or has a sample without a field.
    """
    if len(fields) != 2:
        raise DataError(f"fields must be two, of the input and of the target, got {len(fields)}")
    if shuffle_window < 1:
        raise DataError(f"shuffle_window must be at least 1 (no mixing), got {shuffle_window}")
    return TarShards(shard_paths(shards), fields, decode or {}, transform, shuffle_window)
