"""Names of shards: `train-{0000..0011}.tar`, `{train,extra}-*.tar`, or a list of such."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from amp_core.data.errors import DataError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_ADDRESS = re.compile(r"(pipe:|\w{2,}://)")
MOST_NAMES = 1_000_000


def shard_paths(shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Find the files that one or more patterns name.

    Args:
        shards: Each with `{a,b}` for alternatives, `{0000..0011}` for a range (as wide as its first number is written) and
            `*`, `?`, `[...]` for what is there.

    Returns:
        The files in the order of the patterns; those that one `*` finds sorted by name.

    Raises:
        DataError: If a file is missing, comes twice, or is no local file.
    """
    patterns = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    paths = [path for pattern in patterns for name in expand_braces(os.fspath(pattern)) for path in _found(name)]
    if not paths:
        raise DataError("no shards are named; expected a pattern such as 'shards/train-{0000..0011}.tar'")
    for path in paths:
        if not path.is_file():
            raise DataError(f"there is no shard {path}; expected a .tar file")
    twice = sorted({str(path) for path in paths if paths.count(path) > 1}) if len(set(paths)) < len(paths) else []
    if twice:
        raise DataError(f"the shard {twice[0]} is named twice: each of its samples would come twice")
    return paths


def expand_braces(pattern: str) -> Iterator[str]:
    """Write out `{a,b}` and `{00..11}`, from left to right, as a shell does.

    Raises:
        DataError: If a brace is left open or holds neither alternatives nor a range.
    """
    braces = _BRACES.search(pattern)
    if braces is None:
        if "{" in pattern or "}" in pattern:
            raise DataError(f"the braces in {pattern!r} do not close; expected such as 'train-{{0000..0011}}.tar'")
        yield pattern
        return
    for choice in _choices(braces[1], pattern):
        yield from expand_braces(pattern[: braces.start()] + choice + pattern[braces.end() :])


def _choices(inside: str, pattern: str) -> list[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        if "," not in inside:
            raise DataError(
                f"{{{inside}}} in {pattern!r} is neither a range such as {{00..11}} nor alternatives such as {{a,b}}"
            )
        return inside.split(",")
    first, last = int(numbers[1]), int(numbers[2])
    if not 0 <= last - first < MOST_NAMES:
        raise DataError(f"the range {{{inside}}} in {pattern!r} is empty or too long; expected such as {{0000..0011}}")
    return [str(number).zfill(len(numbers[1])) for number in range(first, last + 1)]


def _found(name: str) -> list[Path]:
    if _ADDRESS.match(name):
        raise DataError(
            f"{name!r} is no local file; tar_shards reads samples where they lie on disk. "
            "For what comes as a stream use webdataset.WebDataset, which training takes as a data set too"
        )
    if not glob.has_magic(name):
        return [Path(name)]
    found = sorted(glob.glob(name))  # noqa: PTH207  (Path.glob takes no absolute pattern)
    if not found:
        raise DataError(f"no file matches {name!r}; expected .tar files")
    return [Path(path) for path in found]
