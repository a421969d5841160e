"""Whether a model can fit into memory, before the attempt takes the models down that serve already."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from serve.backends.onnx_runtime.external_data import data_bytes
from serve.backends.onnx_runtime.onnx_file import open_onnx
from serve.engine.control_groups import group_folders
from serve.engine.errors import ModelLoadError

MEMINFO = Path("/proc/meminfo")
# A group's files: its limit, what is used of it, and what its statistics call the pages of files, which can be given back.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
MB = 1e6


def require_memory(model: Path, copies: int) -> None:
    """Check that there is room for a model file and its data files, once per copy. That is the least that it takes.

    Args:
        model: the file; its data files are in its folder.
        copies: that will be held at a time.

    Raises:
        ModelLoadError: there is not.
    """
    available = available_bytes()
    if available is None:
        return
    needed = _weights_bytes(model) * max(1, copies)
    if needed > available:
        raise ModelLoadError(
            f"{model}: not enough memory: it takes at least {needed / MB:.0f} MB, {available / MB:.0f} MB are available; "
            "unload another model, or ask for fewer copies (instance_group)"
        )


def available_bytes() -> int | None:
    """What this process may still take, by the machine's account and the container's; None where neither is known."""
    groups = [_group(folder, *VERSION_2) for folder in group_folders()]
    groups += [_group(folder, *VERSION_1) for folder in group_folders("memory")]
    return min((room for room in (_machine("MemAvailable"), *groups) if room is not None), default=None)


def memory_limit_bytes() -> int | None:
    """What this process may take in all, whatever is taken already; None where that is not known."""
    limits = [_limit(folder / VERSION_2[0]) for folder in group_folders()]
    limits += [_limit(folder / VERSION_1[0]) for folder in group_folders("memory")]
    return min((limit for limit in (_machine("MemTotal"), *limits) if limit is not None), default=None)


def _machine(field: str) -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _limit(path: Path) -> int | None:
    """Of one control group; None where it has none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is no such group, or it may take "max"
        return None


def _group(folder: Path, limit: str, used: str, cached: tuple[str, ...]) -> int | None:
    """Of one control group: the limit less what is used and cannot be given back; None where it has none."""
    try:
        most, taken = ((folder / name).read_text().strip() for name in (limit, used))
        if most == "max":
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - int(taken) + sum(int(statistics.get(name, 0)) for name in cached)
    except (OSError, ValueError):
        return None


def _weights_bytes(model: Path) -> int:
    """The model file, the data files that it names, and what exporters put beside it (model.onnx.data, model.onnx_data)."""
    beside = {path for path in model.parent.iterdir() if path.name.startswith(model.name)}
    locations, read = _data(model)
    named = {model.parent / name for name in locations}
    return _size(beside - named) + max(_size(named), read)


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _data(model: Path) -> tuple[frozenset[str], int]:
    """The data files, and bytes that tensors read from them: more than there are where several read the same."""
    try:
        with open_onnx(model) as opened:
            return opened.data_files, data_bytes(opened.model, model)
    except ModelLoadError:  # or another kind of model; whoever loads it says what is wrong
        return frozenset(), 0
