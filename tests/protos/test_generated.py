from __future__ import annotations

from pathlib import Path

import pytest

from protos import generate


def test_generated_files_are_current() -> None:
    for path, text in generate.generated_files().items():
        assert (generate.ROOT / path).read_text() == text, f"{path} is stale; run: make proto"


def test_main_writes_what_is_stale_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "protos"
    folder.mkdir()
    for name in generate.FILES:
        (tmp_path / name).write_text((generate.ROOT / name).read_text())
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    generate.main()
    assert capsys.readouterr().out.count("wrote protos/") == 4
    generate.main()
    assert capsys.readouterr().out == ""
    (folder / "inference_pb2.py").write_text("stale")
    generate.main()
    assert capsys.readouterr().out == "wrote protos/inference_pb2.py\n"


def test_a_broken_proto_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "protos").mkdir()
    for name in generate.FILES:
        (tmp_path / name).write_text('syntax = "proto3"; message {')
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="protoc refused"):
        generate.generated_files()
