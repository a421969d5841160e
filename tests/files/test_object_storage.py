"""Object storage as both stages use it: what messages show, and what the store's client leaves to us."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfserve.files.object_storage import ObjectExistsError, ObjectStore, StorageError, is_url, redacted
from halfserve.installation import install_hint
from tests.s3_server import S3Server, s3_server


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("s3://bucket/models", True),
        ("hf://user/repo", True),
        ("simplecache::s3://bucket", True),
        ("models", False),
        ("/models", False),
        ("C:\\models", False),
        ("C:/models", False),
        ("a:b/c", False),
    ],
)
def test_urls_are_told_from_paths(text: str, is_one: bool) -> None:
    assert is_url(text) is is_one


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:pass@host/models", "sftp://***@host/models"),
        ("sftp://me:p@ss@host/models", "sftp://***@host/models"),
        ("failed: https://host/a?sig=abc&x=1 (twice)", "failed: https://host/a?*** (twice)"),
        ("s3://bucket/models", "s3://bucket/models"),
        ("what is it? a=b", "what is it? a=b"),
    ],
)
def test_credentials_do_not_show(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    ("url", "install"),
    [
        ("gs://bucket/models", install_hint("gcs")),
        ("az://container/models?sig=secret", install_hint("azure")),
        ("oci://bucket/models", "pip install ocifs"),
        ("sftp://me:secret@host/models", "pip install paramiko"),
    ],
)
def test_a_missing_implementation_names_its_package(url: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gcsfs", "adlfs", "ocifs", "paramiko"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(StorageError, match="is not installed") as caught:
        ObjectStore(url)
    assert install in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_unknown_protocol_is_one_clear_line() -> None:
    text = "^foo://x/y: cannot be opened: ValueError: Protocol not known: foo; expected s3://, gs://, az://, hf:// or another "
    with pytest.raises(StorageError, match=f"{text}that fsspec knows$"):
        ObjectStore("foo://x/y")


def test_a_clients_error_shows_no_credentials() -> None:
    store = ObjectStore("memory://me:hunter22@host/models?token=abcdefg")

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("GET https://x/y?token=abcdefg as me:hunter22\nsaid hunter22 again, and abcdefg")

    store._fs.find = fails
    with pytest.raises(StorageError) as caught:
        store.objects()
    text = str(caught.value)
    assert "cannot be read: RuntimeError: GET" in text
    assert not [word for word in ("hunter22", "abcdefg", "\n") if word in text]


def test_an_object_that_is_to_be_new_is_not_replaced(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/models")
    source = tmp_path / "source"
    source.write_bytes(b"first")
    store.put(source, "m/1/certificate.json", new=True)
    source.write_bytes(b"second")
    with pytest.raises(ObjectExistsError):
        store.put(source, "m/1/certificate.json", new=True)
    assert store.read("m/1/certificate.json") == b"first"
    assert [(stored.path, stored.size) for stored in store.objects().values()] == [("m/1/certificate.json", 5)]


def test_a_redirect_to_another_host_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = S3Server()
    other.start()
    try:
        with s3_server(monkeypatch) as server:
            server.put("models/m/1/model.onnx", b"m1")
            store = ObjectStore("s3://bucket/models")
            (stored,) = store.objects().values()
            server.fault = lambda _, path: f"{other.url}/bucket/{path}"
            with pytest.raises(
                StorageError, match=r"redirects to 127.0.0.1:\d+, and redirects are not followed; set the bucket's"
            ):
                store.read_ranges([(stored, 0, 2)])
            with pytest.raises(StorageError, match="redirects are not followed"):
                store.objects()
    finally:
        other.stop()
    assert other.requests == []


def test_a_listing_that_repeats_a_part_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (
        b"<ListBucketResult><Name>bucket</Name><Prefix>models/</Prefix><IsTruncated>true</IsTruncated><NextContinuationToken>"
        b"%d</NextContinuationToken><Contents><Key>models/m/1/model.onnx</Key><Size>1</Size></Contents></ListBucketResult>"
    )
    with s3_server(monkeypatch) as server:
        store = ObjectStore("s3://bucket/models")
        server.fault = lambda *_: page % (len(server.requests) % 2)
        with pytest.raises(StorageError, match=r"s3://bucket/models: cannot be read: the store repeats a part of its listing"):
            store.objects()
    assert len(server.requests) == 3
