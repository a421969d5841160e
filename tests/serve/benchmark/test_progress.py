from __future__ import annotations

import pytest

from serve.benchmark.progress import ProgressBar


def test_a_models_name_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar:
        bar.begin("measuring a[/b]", 1)
    assert "measuring a[/b]" in capsys.readouterr().err
