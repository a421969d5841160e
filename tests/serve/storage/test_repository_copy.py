"""Repositories in object storage become whole versions on this disk, whatever the store does meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from halfserve.files import object_storage
from halfserve.serve.engine.config.model_config import DeclaredConfig, config_from_json
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.storage import file_cache
from halfserve.serve.storage.repository_copy import RepositoryCopy
from halfserve.serve.storage.storage_options import ObjectStorage
from tests.s3_server import FLIPPED, TRUNCATED, S3Server, s3_server

Open = Callable[..., RepositoryCopy]
SAMPLE = bytes(range(256)) * 40  # 10 KiB: ten pieces


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr(file_cache, "PIECE_BYTES", 1024)
    monkeypatch.setattr(file_cache, "WINDOW_PIECES", 2)
    with s3_server(monkeypatch) as server:
        yield server


class MemoryStore:
    """A store that costs less time than S3, for what is the same with every one."""

    def __init__(self) -> None:
        self._fs = fsspec.filesystem("memory")

    def put(self, path: str, content: bytes) -> None:
        self._fs.store[f"/bucket/{path}"] = MemoryFile(self._fs, f"/bucket/{path}", content)


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    yield MemoryStore()
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def open_copy(tmp_path: Path) -> Iterator[Open]:
    copies = []

    def opened(url: str = "s3://bucket/models", max_bytes: int = 2**20) -> RepositoryCopy:
        copy = RepositoryCopy(ObjectStorage(url=url, folder=tmp_path / "cache", max_bytes=max_bytes))
        copies.append(copy)
        return copy

    yield opened
    for copy in copies:
        copy.close()


def files(copy: RepositoryCopy) -> dict[str, bytes]:
    return {str(path.relative_to(copy.path)): path.read_bytes() for path in copy.path.rglob("*") if path.is_file()}


def reads(s3: S3Server) -> list[str]:
    """The objects that were read since the last call."""
    found = [path for method, path in s3.requests if method == "GET" and path.startswith("models/")]
    s3.requests.clear()
    return found


def test_the_versions_that_the_policy_selects_are_copied(memory: MemoryStore, open_copy: Open) -> None:
    for version in (1, 2, 10):
        memory.put(f"models/m/{version}/model.onnx", b"m%d" % version)
        memory.put(f"models/both/{version}/model.onnx", b"b%d" % version)
    memory.put("models/both/config.pbtxt", b"version_policy { specific { versions: [1, 10] } }")
    memory.put("models/both/1/fp32/model.onnx", b"")
    memory.put("models/m/initial_state/zero", b"0")
    memory.put("models/m/.hidden/x", b"x")
    memory.put("models/m\n\x1b[2J/1/model.onnx", b"a name that no line can show")
    memory.put("models/README.md", b"of no model")
    copy = open_copy("memory://bucket/models")
    assert copy.update() == {}
    assert files(copy) == {
        "both/config.pbtxt": b"version_policy { specific { versions: [1, 10] } }",
        "both/1/model.onnx": b"b1",
        "both/1/fp32/model.onnx": b"",
        "both/10/model.onnx": b"b10",
        "m/10/model.onnx": b"m10",
        "m/initial_state/zero": b"0",
    }


def test_a_version_without_its_model_file_does_not_show(memory: MemoryStore, open_copy: Open) -> None:
    memory.put("models/m/1/model.onnx", b"m1")
    memory.put("models/m/2/certificate.json", b"{}")
    memory.put("models/m/2/model.onnx.data", b"data")
    copy = open_copy("memory://bucket/models")
    copy.update()
    assert files(copy) == {"m/1/model.onnx": b"m1"}
    memory.put("models/m/2/model.onnx", b"m2")
    copy.update(serving={("m", 1)})
    assert files(copy).keys() == {
        "m/1/model.onnx",
        *(f"m/2/{name}" for name in ("certificate.json", "model.onnx", "model.onnx.data")),
    }
    copy.update(serving={("m", 2)})
    assert "m/1/model.onnx" not in files(copy)


def test_only_what_changed_is_read_again(s3: S3Server, open_copy: Open) -> None:
    for name in ("a", "b"):
        s3.put(f"models/{name}/1/model.onnx", name.encode())
    copy = open_copy()
    copy.update()
    reads(s3)
    copy.update()
    assert [method for method, _ in s3.requests] == ["GET"]  # one list
    s3.put("models/b/1/model.onnx", b"other")
    s3.put("models/a/1/model.onnx", b"a")  # the same content
    copy.update()
    assert reads(s3) == ["models/b/1/model.onnx"]
    assert files(copy) == {"a/1/model.onnx": b"a", "b/1/model.onnx": b"other"}
    s3.delete("models/a/1/model.onnx")
    copy.update(serving={("a", 1), ("b", 1)})
    assert files(copy) == {"b/1/model.onnx": b"other"}


def test_a_restart_and_a_second_server_copy_nothing_again(s3: S3Server, open_copy: Open) -> None:
    s3.put("models/m/1/model.onnx", SAMPLE)
    first = open_copy()
    first.update()
    reads(s3)
    second = open_copy()
    second.update()
    assert second.path != first.path
    assert reads(s3) == []
    assert (second.path / "m/1/model.onnx").samefile(first.path / "m/1/model.onnx")
    first.close()
    assert files(second) == {"m/1/model.onnx": SAMPLE}
    second.close()
    third = open_copy()
    third.update()
    assert files(third) == {"m/1/model.onnx": SAMPLE}
    assert reads(s3) == []


@pytest.mark.long
@pytest.mark.parametrize("fault", [500, 503, TRUNCATED])
def test_a_failing_read_is_tried_again(fault: int | str, s3: S3Server, open_copy: Open) -> None:
    s3.put("models/m/1/model.onnx", SAMPLE)
    failed: list[str] = []

    def fail_once(method: str, path: str) -> int | str | None:
        if len(failed) == 2 or not path.endswith("model.onnx"):
            return None
        failed.append(path)
        return fault

    s3.fault = fail_once
    copy = open_copy()
    assert copy.update() == {}
    assert files(copy) == {"m/1/model.onnx": SAMPLE}
    assert len(failed) == 2


@pytest.mark.parametrize("times", [1, 100])
def test_bytes_that_differ_from_their_md5_are_not_shown(times: int, s3: S3Server, open_copy: Open) -> None:
    s3.put("models/m/1/model.onnx", SAMPLE)
    flipped: list[str] = []

    def flip(method: str, path: str) -> str | None:
        if method != "GET" or not path.endswith("model.onnx") or len(flipped) == times:
            return None
        flipped.append(path)
        return FLIPPED

    s3.fault = flip
    copy = open_copy()
    failures = copy.update()
    if times == 1:
        assert (failures, files(copy)) == ({}, {"m/1/model.onnx": SAMPLE})
    else:
        assert (
            "s3://bucket/models/m/1/model.onnx: two reads gave other bytes than those that its ETag is the MD5 of"
            in failures["m"]
        )
        assert files(copy) == {}
        s3.fault = None
        assert copy.update() == {}
        assert files(copy) == {"m/1/model.onnx": SAMPLE}


def test_an_encrypted_objects_etag_is_no_md5(s3: S3Server, open_copy: Open) -> None:
    s3.put("models/m/1/model.onnx", SAMPLE, {"x-amz-server-side-encryption": "aws:kms"})
    s3.fault = lambda method, path: FLIPPED if method == "GET" and path.endswith("model.onnx") else None
    copy = open_copy()
    assert copy.update() == {}
    assert len(files(copy)["m/1/model.onnx"]) == len(SAMPLE)


@pytest.mark.long
def test_a_read_that_hangs_is_given_up_and_tried_again(s3: S3Server, open_copy: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(object_storage.S3_CONFIG, "read_timeout", 0.3)
    s3.put("models/m/1/model.onnx", SAMPLE)
    released, hung = threading.Event(), list[str]()

    def hang_once(_: str, path: str) -> None:
        if path.endswith("model.onnx") and not hung:
            hung.append(path)
            released.wait(60)

    s3.fault = hang_once
    copy = open_copy()
    assert copy.update() == {}
    assert not released.is_set()
    assert files(copy) == {"m/1/model.onnx": SAMPLE}
    released.set()


def test_two_servers_that_start_together_copy_once(s3: S3Server, open_copy: Open) -> None:
    for name in "abc":
        s3.put(f"models/{name}/1/model.onnx", SAMPLE)
    copies = [open_copy(), open_copy()]
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(RepositoryCopy.update, copies)) == [{}, {}]
    assert files(copies[0]) == files(copies[1]) == {f"{name}/1/model.onnx": SAMPLE for name in "abc"}
    assert len(reads(s3)) == 3 * len(SAMPLE) // 1024


@pytest.mark.long
def test_a_copy_that_broke_off_is_resumed(s3: S3Server, open_copy: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfserve.files.object_storage.TRIES", 1)
    s3.put("models/m/1/model.onnx", b"first")
    copy = open_copy()
    copy.update()
    s3.put("models/m/2/model.onnx", SAMPLE)
    reads(s3)
    s3.fault = lambda _, path: 403 if path and len(s3.requests) > 6 else None
    failures = copy.update()
    assert list(failures) == ["m"]
    assert "s3://bucket/models/m/2/model.onnx: cannot be read" in failures["m"]
    assert files(copy) == {"m/1/model.onnx": b"first"}
    s3.fault = None
    before = len(reads(s3))
    copy.close()
    again = open_copy()
    assert again.update() == {}
    assert files(again) == {"m/2/model.onnx": SAMPLE}
    assert before - 1 + len(reads(s3)) <= 11  # of ten pieces


def test_a_version_that_is_replaced_while_it_is_copied_shows_as_one_of_both(s3: S3Server, open_copy: Open) -> None:
    old, new = {"model.onnx": SAMPLE, "model.onnx.data": SAMPLE}, {"model.onnx": SAMPLE[::-1], "model.onnx.data": SAMPLE[::-1]}
    for name, content in old.items():
        s3.put(f"models/m/1/{name}", content)

    def replace(_: str, path: str) -> None:
        if path.endswith(".data") and sum(asked == path for _, asked in s3.requests) == 3:  # in the middle
            for name, content in new.items():
                s3.put(f"models/m/1/{name}", content)

    s3.fault = replace
    copy = open_copy()
    assert copy.update() == {}
    assert files(copy) == {f"m/1/{name}": content for name, content in new.items()}
    for name, content in old.items():  # what was read of both is not taken for the old one
        s3.put(f"models/m/1/{name}", content)
    copy.update()
    assert files(copy) == {f"m/1/{name}": content for name, content in old.items()}


@pytest.mark.long
def test_a_version_that_goes_on_changing_waits(s3: S3Server, open_copy: Open) -> None:
    s3.put("models/quiet/1/model.onnx", b"q")
    s3.put("models/m/1/model.onnx", b"0")
    changes = iter(range(1, 100))

    def change(_: str, path: str) -> None:
        if path.startswith("models/m/"):
            s3.put("models/m/1/model.onnx", b"%d" % next(changes))

    s3.fault = change
    copy = open_copy()
    assert copy.update() == {"m": "s3://bucket/models/m: changes while it is copied; it is copied once that ends"}
    assert files(copy) == {"quiet/1/model.onnx": b"q"}


@pytest.mark.long
@pytest.mark.parametrize("what", ["unreachable", "emptied", "refused"])
def test_a_store_that_cannot_be_read_changes_nothing(what: str, s3: S3Server, open_copy: Open) -> None:
    s3.put("models/m/1/model.onnx", b"m1")
    copy = open_copy()
    copy.update()
    match what:
        case "emptied":
            s3.delete("models/m/1/model.onnx")
        case "refused":
            s3.fault = lambda *_: 403
        case _:
            s3.stop()
    with pytest.raises(ModelLoadError, match=r"^s3://bucket/models: (cannot be read|not found)") as caught:
        copy.update()
    assert "\n" not in str(caught.value)
    assert "the-secret" not in str(caught.value)
    assert files(copy) == {"m/1/model.onnx": b"m1"}


def test_what_no_server_uses_makes_room(memory: MemoryStore, open_copy: Open, tmp_path: Path) -> None:
    memory.put("models/m/1/model.onnx", b"1" * 1000)
    other = tmp_path / "cache" / "repository" / "objects" / "not-ours"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"o" * 5000)
    copy = open_copy("memory://bucket/models", max_bytes=2500)
    copy.update()
    for version in (2, 3, 4):
        memory.put(f"models/m/{version}/model.onnx", b"%d" % version * 1000)
        assert copy.update(serving={("m", version - 1)}) == {}
        copy.update(serving={("m", version)})
        stored = [path.stat().st_size for path in (tmp_path / "cache").glob("*/objects/*") if path != other]
        assert sum(stored) <= 2500
    memory.put("models/m/5/model.onnx", b"5" * 2000)
    failure = copy.update(serving={("m", 4)})["m"]
    assert "has room for 1.5 KiB beside what servers use; raise --storage-gib" in failure
    assert files(copy) == {"m/4/model.onnx": b"4" * 1000}
    memory.put("models/small/1/model.onnx", b"s")  # others go on
    assert list(copy.update(serving={("m", 4)})) == ["m"]
    assert files(copy)["small/1/model.onnx"] == b"s"
    assert other.exists()


def test_the_files_of_a_killed_server_are_given_up(memory: MemoryStore, open_copy: Open, tmp_path: Path) -> None:
    memory.put("models/m/1/model.onnx", b"1" * 1000)
    killed = open_copy("memory://bucket/models")
    killed.update()
    killed._cache._lock.release()  # as the system does
    memory.put("other/m/1/model.onnx", b"2" * 1000)
    assert open_copy("memory://bucket/other", max_bytes=1500).update() == {}
    assert not killed.path.exists()


def test_of_models_that_are_not_asked_for_only_the_names_show(memory: MemoryStore, open_copy: Open) -> None:
    for version in (1, 2):
        memory.put(f"models/m/{version}/model.onnx", b"m")
    memory.put("models/e/config.pbtxt", b'platform: "ensemble"')
    copy = open_copy("memory://bucket/models")
    copy.update({})
    assert sorted(str(path.relative_to(copy.path)) for path in copy.path.rglob("*") if ".incoming" not in str(path)) == [
        "e",
        "e/config.pbtxt",
        "m",
        "m/1",
        "m/2",
    ]
    declared = config_from_json('{"version_policy": {"specific": {"versions": [1]}}}', copy.path / "m")
    assert isinstance(declared, DeclaredConfig)
    copy.update({"m": declared, "e": None})
    assert files(copy) == {"m/1/model.onnx": b"m", "e/config.pbtxt": b'platform: "ensemble"'}
    copy.update({}, arriving={"m", "e"})
    assert "m/1/model.onnx" in files(copy)
    copy.update({}, serving={("e", 1)})
    assert files(copy) == {"e/config.pbtxt": b'platform: "ensemble"'}


def test_one_file_comes_with_those_beside_it(memory: MemoryStore, open_copy: Open) -> None:
    for name in ("model.onnx", "model.onnx.data", "other.onnx", "model.onnx.d/x"):
        memory.put(f"models/{name}", name.encode())
    copy = open_copy("memory://bucket/models/model.onnx")
    assert copy.update() == {}
    assert copy.path.read_bytes() == b"model.onnx"
    assert sorted(path.name for path in copy.path.parent.iterdir() if path.is_file()) == ["model.onnx", "model.onnx.data"]
    memory.put("models/model.onnx", b"new")
    copy.update()
    assert copy.path.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://absent-bucket/models", "s3://absent-bucket/models: cannot be read: not found"),
        ("s3://bucket/absent", "s3://bucket/absent: not found; expected a model repository there"),
        ("s3://bucket/models/m", "it looks like one model's own folder: give the URL of the folder above"),
        ("s3://bucket/models/absent.onnx", "not found; expected a model file there"),
    ],
)
def test_a_url_without_models_is_a_clear_error(url: str, message: str, s3: S3Server, open_copy: Open) -> None:
    s3.put("models/m/1/model.onnx", b"m")
    with pytest.raises(ModelLoadError) as caught:
        open_copy(url).update()
    assert message in str(caught.value)


def test_keys_that_lead_elsewhere_are_passed_over(memory: MemoryStore, open_copy: Open) -> None:
    for key in ("m/1/model.onnx", "m/../../x", "../x/1/model.onnx", "m/1//model.onnx", "m/1/a\\..\\b"):
        memory.put(f"models/{key}", b"h")
    copy = open_copy("memory://bucket/models")
    copy.update()
    assert files(copy) == {"m/1/model.onnx": b"h"}


def test_a_folder_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="cannot hold copies from object storage: .*; choose another folder"):
        RepositoryCopy(ObjectStorage(url="memory://x", folder=tmp_path / "file" / "below"))


def test_a_copy_is_logged_in_one_line(memory: MemoryStore, open_copy: Open, caplog: pytest.LogCaptureFixture) -> None:
    memory.put("models/m/1/model.onnx", b"m")
    memory.put("models/m/config.pbtxt", b"")
    with caplog.at_level(logging.INFO):
        open_copy("memory://bucket/models").update()
    assert [record.getMessage().partition(" in 2 files from memory://bucket/models in ")[0] for record in caplog.records] == [
        "m: copied 0.0 KiB"
    ]
