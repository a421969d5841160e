"""A model of the Hugging Face Hub: the files that an export reads of it, fetched at one commit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.sources.source import Source, repository_name
from halfserve.export.sources.source_options import SourceOptions
from halfserve.files.model_hub import SCHEME, HubError, HubModel, fetch_files, find_model

CONFIG = "config.json"
# Files in the repository itself: configurations, tokenizers, and what prepares pictures or audio.
SMALL_SUFFIXES = (".json", ".txt", ".model")
LAYER = re.compile(r"\d+_\w+/")  # the folder of one layer of sentence-transformers, such as 1_Pooling/
# A file of weights, or shards. Safetensors come first, as a pickle may hold more than tensors.
WEIGHTS = tuple(
    re.compile(form) for form in (r"model\.safetensors", r"model-\d+-of-\d+\.safetensors", r"pytorch_model(-\d+-of-\d+)?\.bin")
)


def open_hub_model(argument: str, name: str, revision: str, options: SourceOptions, progress: Callable[[str], None]) -> Source:
    """Return the model `name` (ORG/NAME) at a revision, after its files were fetched into the hub's cache.

    `argument` is the name as the user gave it. `progress` is called with each step before it begins.

    Raises:
        ExportError: The model cannot be had, has no weights that can be read, or needs code of its own.
        UsageError: An option is given that a model of the hub does not take.
    """
    from halfserve.export.sources.hugging_face import open_hugging_face  # noqa: PLC0415  (transformers, an extra)

    nowhere = "" if argument.startswith(SCHEME) else f"there is no file or folder {argument}, and as a model of the hub: "
    try:
        progress(f"asking the hub for {name}")
        model = find_model(name, revision)
        nowhere = ""
        if options.trust_remote_code:
            raise UsageError(
                "--trust-remote-code is for a folder on this disk, whose code you can read before it runs: hf download "
                f"{name} --revision {model.commit} --local-dir FOLDER, then halfserve export FOLDER --trust-remote-code"
            )
        small, weights = _needed(model)
        size = sum(model.files[path] for path in (*small, *weights))
        progress(f"fetching {len(small) + len(weights)} files of {model.pinned}, {size / 2**20:.0f} MiB")
        folder = fetch_files(model, small, weights)
    except HubError as error:
        raise ExportError(f"{nowhere}{error}") from error
    progress("reading the model")
    source = open_hugging_face(folder, options)
    return replace(
        source,
        name=source.name.replace(model.commit, repository_name(name.partition("/")[2])),
        samples=source.samples.noting(model.note),
        origin={"hub": model.endpoint, "model": name, "revision": revision, "commit": model.commit},
    )


def _needed(model: HubModel) -> tuple[list[str], list[str]]:
    """Return the small files and the weights that an export reads.

    Raises:
        ExportError: There is no configuration, or there are no weights in a form that is read.
    """
    if CONFIG not in model.files:
        raise ExportError(
            f"{model.pinned} has no {CONFIG}, so it is no model of transformers, sentence-transformers or timm; it has "
            f"{model.listed(sorted(model.files))}{_onnx_hint(model)}"
        )
    weights = _weights(model.files)
    if not weights:
        raise ExportError(
            f"{model.pinned} has no weights that are read: expected model.safetensors or pytorch_model.bin, or the shards of "
            f"one of them, in {model.listed(sorted(path for path in model.files if '/' not in path))}"
            f"{_onnx_hint(model)}{f'; {model.note}' if model.note else ''}"
        )
    small = [path for path in model.files if "/" not in path and path.endswith(SMALL_SUFFIXES)]
    for layer in {found[0] for path in model.files if (found := LAYER.match(path))}:
        inside = [path.removeprefix(layer) for path in model.files if path.startswith(layer)]
        small += [layer + path for path in inside if path == CONFIG]
        weights += [layer + path for path in _weights(inside)]
    return small, weights


def _weights(paths: Iterable[str]) -> list[str]:
    """Return the file of weights, or its shards, in the safest form that is there; empty if none is."""
    found = (sorted(path for path in paths if form.fullmatch(path)) for form in WEIGHTS)
    return next(filter(None, found), [])


def _onnx_hint(model: HubModel) -> str:
    files = sorted((path for path in model.files if path.endswith(".onnx")), key=lambda path: (len(path), path))
    if not files:
        return ""
    fetch = f"hf download {model.name} --revision {model.commit} --local-dir FOLDER"
    return f"; convert its ONNX model: {fetch}, then halfserve convert FOLDER/{files[0]} --repository models"
