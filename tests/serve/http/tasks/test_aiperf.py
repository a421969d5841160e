"""AIPerf of NVIDIA (`pip install aiperf`, in an environment of its own) measures `/v1/embeddings` as it does OpenAI's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.export.hugging_face_folders import tokenizer

AIPERF = shutil.which("aiperf")
REQUESTS = 20


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(AIPERF is None, reason="the command aiperf is not on PATH (pip install aiperf)")
def test_aiperf_measures_the_embeddings_of_a_model(texts: httpx.Client, tmp_path: Path) -> None:
    assert AIPERF is not None
    words = tmp_path / "tokenizer"
    tokenizer().save_pretrained(words)  # without it, AIPerf loads one from the model hub
    url = str(texts.base_url).rstrip("/")
    options = {
        "--model": "embedder", "--endpoint-type": "embeddings", "--url": url, "--tokenizer": str(words),
        "--concurrency": "2", "--request-count": str(REQUESTS), "--synthetic-input-tokens-mean": "6",
        "--synthetic-input-tokens-stddev": "0", "--ui": "none", "--artifact-dir": str(tmp_path / "measured"),
    }  # fmt: skip
    done = subprocess.run(
        [AIPERF, "profile", *(word for option in options.items() for word in option)],
        # With HF_HUB_OFFLINE, it takes the folder of a tokenizer for the name of one on the hub. Its Python is another one.
        env={name: value for name, value in os.environ.items() if name not in {"HF_HUB_OFFLINE", "PYTHONPATH"}},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (tmp_path / "measured").rglob("profile_export_aiperf.json")
    measured = json.loads(report.read_text())
    assert measured["request_count"]["avg"] == REQUESTS
    assert not measured.get("error_summary")
