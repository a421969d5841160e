"""The container images, as far as their Dockerfile shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from halfserve.serve.security.options import SecurityOptions
from halfserve.serve.security.roles import Role
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import running_server
from tests.serve.security.guarded import tokens_in
from tests.serve.security.test_http import guarded_http

TEXT = re.sub(r"^#.*\n|\\\n", "", (Path(__file__).parent.parent / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
STAGE = re.compile(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", re.MULTILINE | re.DOTALL)
STAGES = {found[2]: (found[1], found[3]) for found in STAGE.finditer(TEXT)}
IMAGES = ("serve", "serve-cuda", "export")


def instructions(stage: str) -> list[str]:
    """Of a stage and those below it in the image, in order."""
    below, own = STAGES[stage]
    return [*(instructions(below) if below in STAGES else []), *own.strip().splitlines()]


def test_every_base_is_an_exact_version() -> None:
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+$", TEXT, re.MULTILINE)
    outside = {below for below, _ in STAGES.values()} - STAGES.keys()
    assert outside == {"python:${PYTHON}-trixie", "python:${PYTHON}-slim-trixie"}


@pytest.mark.parametrize("image", IMAGES)
def test_an_edit_of_the_sources_rebuilds_the_last_layer_alone(image: str) -> None:
    steps = [step for step in instructions(image) if step.startswith(("RUN", "COPY"))]
    assert [step for step in steps if "from=wheel" in step or "wheels" in step] == steps[-1:]
    copied = [step.split()[1:-1] for step in steps if step.startswith("COPY")]
    assert copied == [["pyproject.toml", "constraints.txt"]]
    assert "-r pyproject.toml" in steps[-2]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_user_without_rights(image: str) -> None:
    assert [step for step in instructions(image) if step.startswith("USER")] == ["USER 10001"]


def test_an_image_tells_its_health_of_a_server_that_asks_for_tokens(tmp_path: Path) -> None:
    (check,) = (step for step in instructions("serve") if step.startswith("HEALTHCHECK"))
    command = json.loads(check[check.index("[") :])
    tokens_in(tmp_path / "tokens", alice=Role.INFER)
    with (
        running_server(lambda: [held_model(HeldBackend())]) as server,
        guarded_http(server, SecurityOptions(token_file=tmp_path / "tokens")) as (_, rest),
    ):
        environment = os.environ | {"HALFSERVE_SERVE_HTTP_PORT": str(rest.port)}
        for is_ready in (True, False):
            done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
            assert done.returncode == int(not is_ready)
            server.call(server.core.retire)
    assert subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode == 1
