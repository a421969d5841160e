"""`pb_utils.ModelConfig`, which auto_complete_config completes, and what reads a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

INPUT_PROPERTIES = ("name", "data_type", "dims", "optional")
OUTPUT_PROPERTIES = ("name", "data_type", "dims")
OTHER_SCHEDULERS = ("sequence_batching", "ensemble_scheduling")


class ModelConfig:
    """A configuration that a model completes. What config.pbtxt says stays: a contradiction is a ValueError."""

    def __init__(self, model_config: str) -> None:
        """`model_config` is JSON with the field names of model_config.proto."""
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the rows of one batch.

        Raises:
            ValueError: the configuration has a larger one.
        """
        declared = self._model_config.get("max_batch_size", 0)
        if declared > max_batch_size:
            raise ValueError(
                f"{self._model}: auto_complete_config sets max_batch_size {max_batch_size}, the configuration has {declared}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Batch requests, unless the configuration does so already.

        Raises:
            ValueError: it has another scheduler.
        """
        other = next((name for name in OTHER_SCHEDULERS if name in self._model_config), None)
        if other is not None:
            raise ValueError(f"{self._model}: auto_complete_config sets dynamic_batching, but the configuration has {other}")
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set {"decoupled": bool}.

        Raises:
            ValueError: another key, or the configuration says otherwise.
        """
        unknown = sorted(set(transaction_policy_dict) - {"decoupled"})
        if unknown:
            raise ValueError(f"{self._model}: the model transaction policy has {unknown[0]!r}, expected 'decoupled' alone")
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            asked = bool(transaction_policy_dict["decoupled"])
            if policy.get("decoupled", asked) != asked:
                raise ValueError(
                    f"{self._model}: auto_complete_config sets decoupled to {asked}, but the configuration has the contrary"
                )
            policy["decoupled"] = asked

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002  (Triton's name)
        """Declare an input: name, data_type such as "TYPE_FP32", dims, and whether it is optional.

        Raises:
            ValueError: a property is missing or unknown, or the configuration says otherwise.
        """
        self._add("input", input, INPUT_PROPERTIES)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Declare an output: name, data_type and dims.

        Raises:
            ValueError: a property is missing or unknown, or the configuration says otherwise.
        """
        self._add("output", output, OUTPUT_PROPERTIES)

    @property
    def _model(self) -> str:
        return f"model {self._model_config.get('name', '')!r}"

    def _add(self, what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
        where = f"{self._model}: {what} {given.get('name', '')!r} of auto_complete_config"
        for key in given:
            if key not in known:
                raise ValueError(f"{where} has the property {key!r}, expected {', '.join(map(repr, known))}")
        for key in OUTPUT_PROPERTIES:
            if key not in given:
                raise ValueError(f"{where} has no {key!r}")
        entries = self._model_config.setdefault(what, [])
        declared = next((entry for entry in entries if entry["name"] == given["name"]), None)
        if declared is None:
            entries.append(dict(given))
            return
        for key in known:
            has = declared.get(key)
            is_open = has in (None, "TYPE_INVALID") or (key == "dims" and not has)
            if key in given and not is_open and has != given[key]:
                raise ValueError(f"{where} has {key} {given[key]}, but the configuration has {has}")
        declared.update(given)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return the entry of an input in a configuration; None without one."""
    return _entry(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return the entry of an output in a configuration; None without one."""
    return _entry(model_config.get("output", ()), name)


def _entry(entries: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next((entry for entry in entries if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether a model gives any number of responses to a request."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
