"""Writes a model repository with a text generator, which openvino-genai computes.

    python -m halfserve.examples.generation models
    python -m halfserve.examples.generation models --weights FOLDER --name writer

FOLDER has a language model in OpenVINO's format, as `optimum-cli export openvino` writes it. Without it, the model is a tiny
one that counts on from the last number of the text. The guide is docs/guides/generation.md.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

FILES = Path(__file__).parent


def main(
    repository: Annotated[Path, typer.Argument(help="Folder of the model repository.")],
    weights: Annotated[Path | None, typer.Option(help="Folder of a language model in OpenVINO's format.")] = None,
    name: Annotated[str, typer.Option(help="Name of the model.")] = "writer",
) -> None:
    """Write a model repository with a text generator."""
    if weights is not None and not (weights / "openvino_tokenizer.xml").is_file():
        sys.exit(f"{weights} has no openvino_tokenizer.xml; export the model by: optimum-cli export openvino --model ...")
    folder = repository / name
    if folder.exists():
        sys.exit(f"{folder} exists; choose another --name, or remove it")
    repository.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=repository, prefix=".") as unfinished:  # a server that looks sees a whole model or none
        version = Path(unfinished, name, "1")
        version.mkdir(parents=True)
        shutil.copy(FILES / "config.pbtxt", version.parent)
        shutil.copy(FILES / "model.py", version)
        if weights is None:
            from halfserve.examples.generation.tiny_model import save_tiny_model  # noqa: PLC0415  (needs more packages)

            save_tiny_model(version)
        else:
            shutil.copytree(weights, version, dirs_exist_ok=True)
        version.parent.rename(folder)


if __name__ == "__main__":
    typer.run(main)
