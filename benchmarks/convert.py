"""Compares our float16 converter with others: share of clean conversions, share of float16 nodes, speed, and size.

    python -m benchmarks.convert [--modelopt-python PATH] [--kinds node,...] [--converters ours,...] [--rounds 5] [--json]

"Clean" is ONNX's full checker, ONNX Runtime's CPU loads and runs it, right values, right types of inputs and outputs
(tests/export/conversions/judge.py), over the models of ONNX's own backend tests that hold float32 and that ONNX Runtime's CPU
runs right in float32. Every conversion is judged in a child process, so that a crash counts and ends nothing.
modelopt has requirements of its own: make an environment for it and name its Python.

    python3 -m venv peers && peers/bin/pip install nvidia-modelopt onnx onnxruntime onnxslim onnx-graphsurgeon polygraphy
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.converters import peers
from benchmarks.converters.speed_models import SPEED_MODELS
from benchmarks.converters.suite import Outcome, Share, judgeable_cases, outcomes, timings
from tests.export.conversions.cases import KINDS

Json = dict[str, Any]
console = Console(stderr=True)


def main(
    modelopt_python: Annotated[Path | None, typer.Option(help="the Python that has nvidia-modelopt")] = None,
    kinds: str = ",".join(KINDS),
    converters: str = ",".join([*peers.LOCAL, *peers.MODELOPT]),
    rounds: Annotated[int, typer.Option(min=0, help="timing rounds, 0 for none")] = 5,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Judge and time the converters."""
    python = str(modelopt_python) if modelopt_python else None
    names = [name for name in converters.split(",") if python or name not in peers.MODELOPT]
    if len(names) < len(converters.split(",")):
        console.print("modelopt is left out: name the Python that has it with --modelopt-python")
    result: Json = {"versions": peers.versions(python), "clean": [], "speed": []}
    console.print(", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    for kind in [kind for kind in kinds.split(",") if kind]:
        cases = judgeable_cases(kind, workers)
        for name in names:
            for keep_io in (True, False):
                found = list(outcomes(name, cases, keep_io=keep_io, modelopt_python=python, workers=workers))
                result["clean"].append(_row(kind, name, found, keep_io=keep_io))
    if rounds:
        result["speed"] = list(_speed(names, python, rounds))
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        _show(result)


def _row(kind: str, name: str, found: list[Outcome], *, keep_io: bool) -> Json:
    share = sum((outcome.share for outcome in found), Share())
    failures = [outcome for outcome in found if not outcome.verdict.ok]
    row: Json = {
        "kind": kind,
        "converter": name,
        "keep_io": keep_io,
        "cases": len(found),
        "clean": len(found) - len(failures),
        "failed_steps": dict(Counter(outcome.verdict.step for outcome in failures)),
        "share": dataclasses.asdict(share),
    }
    console.print(
        f"{kind}, {name}, {'same' if keep_io else 'float16'} I/O: {row['clean']} of {row['cases']} {row['failed_steps']}"
    )
    if name == "ours":
        row["failures"] = [f"{o.case}: {o.verdict.step}: {o.verdict.text}" for o in failures]
        for line in row["failures"]:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    return row


def _speed(names: list[str], python: str | None, rounds: int) -> list[Json]:
    converters = {name: peers.converter(name, python) for name in names}
    rows: list[Json] = []
    for label, build in SPEED_MODELS.items():
        console.print(f"timing: {label}")
        for name, timing in timings(converters, build().SerializeToString(), rounds).items():
            rows.append({"model": label, "converter": name} | dataclasses.asdict(timing))
    return rows


def _show(result: Json) -> None:
    out = Console()
    clean = Table("models", "converter", "I/O kept", "clean", "nodes in float16", "casts", title="Clean conversions")
    for row in result["clean"]:
        share = row["share"]
        floats = share["float16"] + share["float32"]
        percent = f"{100 * share['float16'] / floats:.1f} %" if floats else "-"
        kept = "yes" if row["keep_io"] else "no"
        clean.add_row(row["kind"], row["converter"], kept, f"{row['clean']}/{row['cases']}", percent, str(share["casts"]))
    out.print(clean)
    speed = Table("model", "converter", "seconds", "size", "problem", title="Speed, medians")
    for row in result["speed"]:
        speed.add_row(row["model"], row["converter"], f"{row['seconds']:.3f}", f"{row['size_ratio']:.3f}", row["problem"])
    if result["speed"]:
        out.print(speed)


if __name__ == "__main__":
    typer.run(main)
