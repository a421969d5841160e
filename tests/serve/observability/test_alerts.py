"""The alert rules fire for what they are about, and ask for what the server tells."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serve.observability.prometheus import PROMTOOL, needs_promtool
from tests.serve.observability.queries import unknown_in

RULES = Path(__file__).parents[3] / "serve" / "observability" / "alerts.yaml"


def promtool(*arguments: str) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", str(RULES))


@needs_promtool
def test_alerts_fire_for_their_fault_and_never_for_a_healthy_server() -> None:
    promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yaml")))


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_the_server_tells(rule: dict[str, Any]) -> None:
    assert unknown_in(rule["expr"]) == []


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = Path(__file__).with_name("alerts_test.yaml").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in rules() if f'alertname="{rule["alert"]}"' not in cases] == []
