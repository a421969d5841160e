"""Write `export/placement/cuda_kernels.json` from the installed ONNX Runtime, over the emulated device.

python -m tests.serve.cuda_emulator.kernel_table
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import onnxruntime as ort

from halfserve.export.placement.cuda_kernels import LETTERS, OTHER, TABLE
from tests.serve.cuda_emulator.library import make_device, make_tensorrt

OPEN_END = 2**31 - 1
DOMAINS = ("", "com.microsoft", "ai.onnx.ml")
ORDER = (*LETTERS.values(), OTHER)
BY_TYPE = {name.lower(): letter for name, letter in LETTERS.items()}
ELEMENT = re.compile(r"\((\w+)\)")
# A process of its own, as the device's libraries are found when a process starts. It ends where a provider cannot be loaded.
READER = "from tests.serve.cuda_emulator.kernel_table import definitions; print(definitions())"

Types: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, order=True)
class Registered:
    """A kernel in a registry: its versions, and the letters of its types by type variable."""

    versions: tuple[int, int]
    types: Types

    def with_types_of(self, other: Registered) -> Registered | None:
        """The two in one, where they differ in one variable alone; None where one entry would say more than both."""
        if self.versions != other.versions or [name for name, _ in self.types] != [name for name, _ in other.types]:
            return None
        pairs = [*zip(self.types, other.types, strict=True)]
        if sum(ours != theirs for ours, theirs in pairs) > 1:
            return None
        return Registered(
            versions=self.versions, types=tuple((ours[0], ordered(ours[1] + theirs[1])) for ours, theirs in pairs)
        )

    def __str__(self) -> str:
        first, last = self.versions
        versions = f"{first}+" if last == OPEN_END else str(first) if last == first else f"{first}-{last}"
        return " ".join((versions, *(f"{variable}={letters}" for variable, letters in self.types)))


def ordered(letters: Iterable[str]) -> str:
    return "".join(sorted({*letters}, key=ORDER.index))


def letters_of(types: Iterable[str]) -> str:
    """The letters of types such as "tensor(float16)" or "seq(tensor(float))"."""
    return ordered(BY_TYPE.get(found[1] if (found := ELEMENT.search(name)) else "", OTHER) for name in types)


def definitions() -> str:
    """The installed runtime's kernels (provider, domain, operator, versions, types by variable) and operators, as JSON."""
    import onnxruntime.capi.onnxruntime_pybind11_state as runtime  # noqa: PLC0415  (of the reading process)

    kernels: list[Any] = runtime.get_all_opkernel_def()
    listed = [[k.provider, k.domain, k.op_name, k.version_range, k.type_constraints] for k in kernels]
    return json.dumps([listed, [[s.domain, s.name, s.since_version] for s in runtime.get_all_operator_schema()]])


def table_of(kernels: Iterable[tuple[str, str, str, tuple[int, int], dict[str, list[str]]]], provider: str) -> dict[str, str]:
    """The table of one provider, sorted, in the form that `cuda_kernels.parse_table` reads."""
    found: dict[str, set[Registered]] = defaultdict(set)
    for name, domain, op_type, versions, types in kernels:
        if name == provider and domain in DOMAINS:
            letters = tuple((variable, letters_of(allowed)) for variable, allowed in sorted(types.items()))
            found[f"{domain}:{op_type}" if domain else op_type].add(
                Registered(versions=(versions[0], versions[1]), types=letters)
            )
    return {name: "; ".join(map(str, sorted(merged(entries)))) for name, entries in sorted(found.items())}


def merged(entries: set[Registered]) -> set[Registered]:
    """The same kernels in as few entries as possible."""
    for ours, theirs in combinations(sorted(entries), 2):
        both = ours.with_types_of(theirs)
        if both is not None:
            return merged((entries - {ours, theirs}) | {both})
    return entries


def make_table(folder: Path) -> str:
    """The file's content. Skips a test where the installed runtime has no CUDA provider.

    Args:
        folder: for the emulated device.
    """
    make_device(folder)
    make_tensorrt(folder)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    read = subprocess.run([sys.executable, "-c", READER], env=environment, capture_output=True, text=True, check=True)
    kernels, operators = json.loads(read.stdout)
    versions: dict[str, set[int]] = defaultdict(set)
    for domain, name, since in operators:
        if not domain:
            versions[name].add(since)
    content = {
        "runtime": ort.__version__,
        "cuda": table_of(kernels, "CUDAExecutionProvider"),
        "cpu": table_of(kernels, "CPUExecutionProvider"),
        "versions": {name: " ".join(map(str, sorted(numbers))) for name, numbers in sorted(versions.items())},
    }
    return json.dumps(content, indent=1) + "\n"


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        TABLE.write_text(make_table(Path(made)), encoding="utf-8")
