"""The folder of a text model, with and without padding."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from google.protobuf import text_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.padding.padding_rule import BUCKETS_KEY, KEY, TOKENS_KEY

WAYS = ("padded", "unpadded")


def write_ways(model: Path, repository: Path) -> None:
    """Write the model's folder under both names of `WAYS`, with links to its versions."""
    config = text_format.Parse((model / "config.pbtxt").read_text(), ModelConfig())
    if KEY not in config.parameters:
        raise typer.BadParameter(f"{model} has no parameter {KEY!r}; export it again, or add it")
    for way in WAYS:
        folder = repository / way
        folder.mkdir(parents=True)
        for version in model.iterdir():
            if version.name.isdigit():
                (folder / version.name).mkdir()
                for file in version.iterdir():
                    os.link(file, folder / version.name / file.name)
        config.name = way
        if way == "unpadded":
            for key in (KEY, BUCKETS_KEY, TOKENS_KEY):
                config.parameters.pop(key, None)
        (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
