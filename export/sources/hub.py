"""A model of the Hugging Face Hub: the files that an export reads of it, fetched at one commit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.sources.source import Source, repository_name
from halfserve.export.sources.source_options import SourceOptions
from halfserve.files.model_hub import SCHEME, HubError, HubModel, fetch_files, find_model

CONFIG = "config.json"
# Files in the repository itself: configurations, tokenizers, and what prepares pictures or audio.
SMALL_SUFFIXES = (".json", ".txt", ".model")
LAYER = re.compile(r"\d+_\w+/")  # the folder of one layer of sentence-transformers, such as 1_Pooling/
# A file of weights, or a shard. Safetensors come first, as a pickle may hold more than tensors.
WEIGHTS = (
    re.compile(r"model(?:-\d+-of-(\d+))?\.safetensors"),
    re.compile(r"pytorch_model(?:-\d+-of-(\d+))?\.bin"),
)


def open_hub_model(
    argument: str, name: str, revision: str, options: SourceOptions, progress: Callable[[str], None] = lambda _: None
) -> Source:
    """Return a model of the hub, after its files were fetched into the hub's cache.

    Args:
        argument: The name as the user gave it.
        name: `ORG/NAME`.
        revision: A branch, a tag or a commit.
        options: The user's options for the source.
        progress: Called with each step before it begins.

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
            f"{model.pinned} has no whole weights that are read: expected model.safetensors or pytorch_model.bin, or all "
            f"shards of one of them, in {model.listed(sorted(path for path in model.files if '/' not in path))}"
            f"{_onnx_hint(model)}{f'; {model.note}' if model.note else ''}"
        )
    layers = {found[0] for path in model.files if (found := LAYER.match(path))}
    for layer in layers:
        inside = {path.removeprefix(layer) for path in model.files if path.startswith(layer)}
        weights += [f"{layer}{path}" for path in _weights(inside)]
    return [*_small(model.files, layers)], weights


def _small(paths: Iterable[str], layers: Iterable[str]) -> Iterator[str]:
    configs = {f"{layer}{CONFIG}" for layer in layers}
    return (path for path in paths if path in configs or ("/" not in path and path.endswith(SMALL_SUFFIXES)))


def _weights(paths: Iterable[str]) -> list[str]:
    """Return the file of weights, or its shards, in the safest form that is whole; empty if none is."""
    for form in WEIGHTS:
        found = [match for path in paths if (match := form.fullmatch(path))]
        whole = [match[0] for match in found if match[1] is None]
        shards = [match[0] for match in found if match[1] is not None and len(found) - len(whole) == int(match[1])]
        if whole or shards:
            return sorted(whole or shards)
    return []


def _onnx_hint(model: HubModel) -> str:
    files = sorted((path for path in model.files if path.endswith(".onnx")), key=lambda path: (len(path), path))
    if not files:
        return ""
    fetch = f"hf download {model.name} --revision {model.commit} --local-dir FOLDER"
    return f"; convert its ONNX model: {fetch}, then halfserve convert FOLDER/{files[0]} --repository models"
