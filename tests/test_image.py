"""The container images: what their Dockerfile shows, and what they do once they are built."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from halfserve import Client
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.security_options import SecurityOptions
from tests.deploy.built_images import BuiltImage, built_images, can_build_images
from tests.deploy.manifests import ROOT
from tests.models import save_mlp, save_thousandfold
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import running_server
from tests.serve.security.guarded import tokens_in
from tests.serve.security.test_http import guarded_http

TEXT = re.sub(r"^#.*\n|\\\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
STAGE = re.compile(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", re.MULTILINE | re.DOTALL)
STAGES = {found[2]: (found[1], found[3]) for found in STAGE.finditer(TEXT)}
IMAGES = ("serve", "serve-cuda", "export")
# The other two download 5 GB and double the time, so a long run builds the default one unless it is asked for more.
BUILT_IMAGES = os.environ.get("BUILT_IMAGES", "serve").split()


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
    assert copied == [["pyproject.toml", "hashes.txt"]]
    assert "-r pyproject.toml" in steps[-2]


def test_images_install_and_build_with_what_has_a_hash_alone() -> None:
    for base, step in STAGES.values():
        for command in re.findall(r"bin/(?:uv build|uv pip install|pip install)[^&|]*", step):
            assert "--require-hashes" in command or "--no-deps /wheels/*.whl" in command, base


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
            done = subprocess.run(command, env=environment, capture_output=True, timeout=500, check=False)
            assert done.returncode == int(not is_ready)
            server.call(server.core.retire)
    assert subprocess.run(command, env=environment, capture_output=True, timeout=500, check=False).returncode == 1


def answered(image: BuiltImage, models: Path) -> None:
    """Start the image's own command on models, and ask it: for its health, a request, and who it is."""
    ports = {f"HALFSERVE_SERVE_{name}_PORT": "0" for name in ("GRPC", "HTTP", "METRICS")}
    command = [*image.config["Entrypoint"], *image.config["Cmd"]]
    process = image.start(command, models, HALFSERVE_SERVE_JSON="1", HALFSERVE_SERVE_CPU_PRECISION="float32", **ports)
    try:
        ready = json.loads((process.stdout or io.StringIO()).readline() or "{}")
        assert ready.get("build") == "compiled", process.communicate()[1]
        with Client(f"127.0.0.1:{ready['grpc_port']}") as client:
            assert client.infer("mlp", {"x": np.ones((1, 64), np.float16)})["y"].shape == (1, 10)
        health = image.config["Healthcheck"]["Test"]
        assert health[0] == "CMD"
        image.run(health[1:], models, HALFSERVE_SERVE_HTTP_PORT=str(ready["http_port"]))
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        assert re.search(r"^Uid:\t10001\t10001\t10001\t10001$", status, re.MULTILINE)
        mounts = Path(f"/proc/{process.pid}/mountinfo").read_text(encoding="ascii")
        assert re.search(r"^\S+ \S+ \S+ \S+ / ro,", mounts, re.MULTILINE)
    finally:
        process.kill()
        process.communicate()


def plain(package: str) -> str:
    """A package's name as indexes compare it, with its version."""
    return package.lower().replace("_", "-")


@pytest.mark.long
@pytest.mark.timeout(3600)
@can_build_images
def test_built_images_run_without_rights_on_a_read_only_root(tmp_path: Path) -> None:
    models, samples = tmp_path / "models", tmp_path / "samples"
    samples.mkdir()
    save_mlp(models / "mlp" / "1" / "model.onnx")
    save_thousandfold(samples / "model.onnx", np.float32)
    pinned = re.findall(r"^([\w.-]+==\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    with built_images(tmp_path / "images", BUILT_IMAGES) as images:
        for name, image in images.items():
            listed = json.loads((image.files / "opt/halfserve/sbom.json").read_text(encoding="utf-8"))["components"]
            packages = {
                f"{component['name']}=={component['version']}" for component in listed if component["name"] != "halfserve"
            }
            assert packages
            assert {plain(package) for package in packages} <= {plain(pin) for pin in pinned}
            assert not (image.files / "usr/bin/cc").exists()
            assert not (image.files / "opt/tools/bin").exists()
            if name == "export":
                convert = [*image.config["Entrypoint"], "convert", "model.onnx", "/tmp/model.fp16.onnx", "--json"]  # noqa: S108
                assert json.loads(image.run(convert, samples))["certificate"]["passed"]
            else:
                answered(image, models)
