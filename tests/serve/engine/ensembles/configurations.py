"""Configurations of ensembles, in short: a step's maps are "model's name=tensor" pairs."""

from __future__ import annotations


def step(model: str, inputs: str, outputs: str, version: int | None = None) -> str:
    """One step of `ensemble_scheduling`, in protobuf's text format."""
    number = "" if version is None else f"model_version: {version}"
    return f'step {{ model_name: "{model}" {number} {_map("input_map", inputs)} {_map("output_map", outputs)} }}'


def _map(field: str, pairs: str) -> str:
    entries = (pair.split("=") for pair in pairs.split())
    return " ".join(f'{field} {{ key: "{key}" value: "{value}" }}' for key, value in entries)


def ensemble(*steps: str, input: str = "x", output: str = "out", more: str = "") -> str:  # noqa: A002  (as in the configuration)
    """A config.pbtxt whose tensors are FP32 of one element; `name:TYPE` or `name:TYPE:dims` say otherwise."""
    tensors = " ".join(
        f"{kind} {{ {_tensor(each)} }}" for kind, names in (("input", input), ("output", output)) for each in names.split()
    )
    return f'platform: "ensemble" {tensors} ensemble_scheduling {{ {" ".join(steps)} }} {more}'


def _tensor(text: str) -> str:
    name, _, rest = text.partition(":")
    datatype, _, dims = rest.partition(":")
    return f'name: "{name}" data_type: TYPE_{datatype or "FP32"} dims: [ {dims or "1"} ]'
