"""Which operators an execution provider has kernels for, at which opsets and for which floating types, as text and back.

`python -m export.placement.kernel_registry CUDAExecutionProvider` prints the table of the installed ONNX Runtime, in the form
that `cuda_kernels.py` keeps it. It asks the runtime's own registry, for which every provider's libraries must be there: for
CUDA the driver, CUDA and cuDNN, for TensorRT its own.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

FLOATS = {"h": "float16", "f": "float", "d": "double", "b": "bfloat16"}
OTHER = "n"
DOMAINS = ("", "com.microsoft", "ai.onnx.ml")
_OPEN_END = 2**31 - 1
_LINE = re.compile(r"(?:(?P<domain>[\w.]+):)?(?P<op_type>\w+) (?P<ranges>.+)")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)|(?P<open>\+)) (?P<types>[a-z]*)")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What there is for one operator at a range of opsets.

    Attributes:
        first: The first opset of the operator's domain.
        last: The last one, included.
        types: Letters of `FLOATS` for the floating types that it takes, and `OTHER` for any other.
    """

    first: int
    last: int
    types: str


Registry = dict[tuple[str, str], tuple[Kernel, ...]]


def parse_table(text: str) -> Registry:
    """Read a table: a line per operator, such as `Clip 6-11 f; 12+ hfdn`; operators of other domains as `domain:Name`.

    Raises:
        ValueError: A line is not of this form.
    """
    registry: Registry = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        parts = _LINE.fullmatch(line)
        ranges = [_RANGE.fullmatch(entry.strip()) for entry in parts["ranges"].split(";")] if parts else [None]
        if parts is None or not all(ranges):
            raise ValueError(f"{line!r} is no line of a kernel table; expected such as 'Clip 6-11 f; 12+ hfdn'")
        registry[parts["domain"] or "", parts["op_type"]] = tuple(
            Kernel(first=int(r["first"]), last=_OPEN_END if r["open"] else int(r["last"]), types=r["types"])
            for r in ranges
            if r is not None
        )
    return registry


def format_table(registry: Registry) -> str:
    """The table's text, sorted; `parse_table` reads it."""
    lines = []
    for (domain, op_type), kernels in sorted(registry.items()):
        ranges = [f"{k.first}{'+' if k.last == _OPEN_END else f'-{k.last}'} {k.types}" for k in kernels]
        lines.append(f"{domain}{':' if domain else ''}{op_type} {'; '.join(ranges)}")
    return "\n".join(lines) + "\n"


def registry_of(definitions: list[Any], provider: str) -> Registry:
    """Reduce kernel definitions, as the runtime lists them, to what a placement depends on.

    Args:
        definitions: Objects with `provider`, `domain`, `op_name`, `version_range` (first and last opset) and `type_constraints`
            (type names by parameter).
        provider: Whose to take.
    """
    found: dict[tuple[str, str], dict[tuple[int, int], set[str]]] = defaultdict(lambda: defaultdict(set))
    for kernel in definitions:
        if kernel.provider == provider and kernel.domain in DOMAINS:
            letters = _letters([name for names in kernel.type_constraints.values() for name in names])
            found[kernel.domain, kernel.op_name][tuple(kernel.version_range)] |= letters
    return {key: _merged(ranges) for key, ranges in found.items()}


def _letters(names: list[str]) -> set[str]:
    letters = {letter for letter, float_name in FLOATS.items() if any(f"({float_name})" in name for name in names)}
    others = [name for name in names if not any(f"({float_name})" in name for float_name in FLOATS.values())]
    return letters | ({OTHER} if others or not names else set())


def _merged(ranges: dict[tuple[int, int], set[str]]) -> tuple[Kernel, ...]:
    kernels: list[Kernel] = []
    for (first, last), letters in sorted(ranges.items()):
        types = "".join(letter for letter in (*FLOATS, OTHER) if letter in letters)
        if kernels and kernels[-1].types == types and kernels[-1].last + 1 >= first:
            kernels[-1] = Kernel(first=kernels[-1].first, last=max(last, kernels[-1].last), types=types)
        else:
            kernels.append(Kernel(first=first, last=last, types=types))
    return tuple(kernels)


def main(provider: str) -> None:
    """Print the installed runtime's table."""
    from onnxruntime.capi.onnxruntime_pybind11_state import (  # noqa: PLC0415  (only this function needs the runtime)
        get_all_opkernel_def,
    )

    sys.stdout.write(format_table(registry_of(get_all_opkernel_def(), provider)))


if __name__ == "__main__":
    main(sys.argv[1])
