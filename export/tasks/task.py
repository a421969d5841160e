"""A task: how a user judges a model's answers, and what a server needs beside its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfserve.export.verification.judging import Judge


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of a model.

    Attributes:
        name: As `--task` names it, such as "embeddings".
        judge: Judges the first output; None where the argmax of each row, which every verdict compares, is the task's answer.
        labels: Names of the classes in order; empty where there are none.
        files: Contents of files for the version's folder, by name, such as tokenizer.json.
        padding: What a server may pad each input with in axis 1, by name; empty where texts of different lengths stay apart.
        per_token: Whether the outputs have a row for each token, in axis 1.
        settings: Parameters of config.pbtxt for a server, by name.
    """

    name: str
    judge: Judge | None = None
    labels: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    padding: Mapping[str, int] = field(default_factory=dict)
    per_token: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
