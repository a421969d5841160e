"""Model repositories in object storage: opened by fsspec, with one-line errors that contain no credentials.

The layout is that of a folder. A store cannot rename, so a single object makes a version visible: its model file, which a
writer puts last. A version folder without a model file is unfinished, and readers ignore it.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from halfserve.installation import install_hint

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")  # at least two letters: C:\ is a drive
USER_INFO = re.compile(r"(?<=://)[^/\s'\"]+@")
QUERY = re.compile(r"(?<=\w)\?[^\s'\"]*=[^\s'\"]*")
HIDDEN = "***"
MD5 = re.compile(r'"?([0-9a-f]{32})"?')

# By protocol: the extra that installs the package for it, and the usual sources of credentials.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure", "hf": "hf-hub"}
CREDENTIALS = {
    "s3": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hf-hub": "HF_TOKEN",
}
TAGS = ("ETag", "etag", "blob_id", "generation", "md5Hash", "LastModified", "last_modified", "mtime", "created")
MAX_TEXT = 500  # most characters of a client's error: a proxy may answer with a page
TRIES = 3  # attempts to read a range, beyond those of the store's own client, which does not notice a body that ends early
PAUSE_S = 0.2  # pause before the second attempt, in seconds; doubled before the next
# Report an unreachable store after seconds: botocore would try 5 times for 60 s each, and s3fs that 5 times over.
S3_CONFIG = {"connect_timeout": 5, "read_timeout": 30, "retries": {"mode": "standard", "max_attempts": 3}}


class StorageError(Exception):
    """An object store cannot be used as requested; the text is one line without credentials."""


class ObjectExistsError(StorageError):
    """An object that must be new exists already."""


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """One object of a store."""

    path: str  # path below the repository's URL, with "/" between its parts
    size: int  # size in bytes
    tag: str  # changes with the content of the path: the ETag, or the store's equivalent


def is_url(text: str) -> bool:
    """Return whether it is a URL such as s3://bucket/models, and not a path."""
    return URL.match(text) is not None


def redacted(text: str) -> str:
    """Replace user, password and query of every URL in the text by ***."""
    return QUERY.sub(f"?{HIDDEN}", USER_INFO.sub(f"{HIDDEN}@", text))


class ObjectStore:
    """A folder of an object store, or one file and the objects beside it whose names begin with its name. Thread-safe.

    Every method raises StorageError, one line, where the store cannot do what it asks for.
    """

    def __init__(self, url: str, *, file_suffixes: Sequence[str] = ()) -> None:
        """Open without any request to the store. A URL with one of `file_suffixes` is a single file.

        Raises:
            StorageError: The URL is not valid, or the package that opens it is not installed.
        """
        self.url = redacted(url).rstrip("/")  # without credentials, for messages
        self._protocol = re.split(r"::|://", url, maxsplit=1)[0].lower()
        # Errors of the store's client may quote these secrets.
        found = [found[0].rstrip("@") for found in USER_INFO.finditer(url)] + [found[0][1:] for found in QUERY.finditer(url)]
        parts = [part for text in found for part in (text, text.partition(":")[2], *re.findall(r"=([^&]+)", text))]
        self._secrets = sorted({secret for part in parts for secret in (part, unquote(part)) if len(secret) > 3}, key=len)
        self._fs, root = self._opened(url)
        self.file = ""  # the name of the one file; "" for a folder
        self._root = root.rstrip("/")
        if self._root.endswith(tuple(file_suffixes)):
            self._root, _, self.file = self._root.rpartition("/")

    def _opened(self, url: str) -> tuple[Any, str]:
        try:
            from fsspec import config  # noqa: PLC0415  (an extra)
            from fsspec.core import url_to_fs  # noqa: PLC0415  (an extra)
        except ModuleNotFoundError:
            raise StorageError(self._missing("fsspec")) from None
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if self._protocol in {"file", "local"}:
            options["auto_mkdir"] = True
        try:
            if self._extra == "s3":
                from halfserve.files.s3_files import S3Files  # noqa: PLC0415  (needs an extra)

                options["config_kwargs"] = {**S3_CONFIG, **config.conf.get("s3", {}).get("config_kwargs", {})}
                return S3Files.opened(url, options)
            fs, root = url_to_fs(url, **options)
        except ImportError as error:
            raise StorageError(self._missing(getattr(error.__cause__, "name", None) or str(error))) from None
        except Exception as error:  # noqa: BLE001  (implementations raise what they want)
            expected = "expected s3://, gs://, az://, hf:// or another that fsspec knows"
            raise StorageError(f"{self.url}: cannot be opened: {self._line(error)}; {expected}") from None
        return fs, root

    @property
    def _extra(self) -> str:
        return EXTRAS.get(self._protocol, "")

    def _missing(self, package: str) -> str:
        if self._extra:
            install = install_hint(self._extra)
        else:
            install = f"run: pip install {package} filelock" if package == "fsspec" else f"run: pip install {package}"
        return f"{self.url}: what opens {self._protocol}:// is not installed; {install}"

    def objects(self) -> dict[str, StoredObject]:
        """Everything in the folder now, by path; for a single file, it and what is beside it; StorageError if nothing is."""
        with self._told("cannot be read"):
            if self.file:
                self._fs.invalidate_cache()
                found = {info["name"]: info for info in self._fs.ls(self._root, detail=True)}
            else:
                found = self._found(self._root)
        objects = {
            path: StoredObject(path=path, size=int(info.get("size") or 0), tag=_tag(info))
            for name, info in found.items()
            if (path := self._below(name)).startswith(self.file) and path and info.get("type", "file") == "file"
        }
        if not objects or (self.file and self.file not in objects):
            raise StorageError(f"{self.url}: not found; expected {'a model file' if self.file else 'a model repository'} there")
        return objects

    def paths_below(self, folder: str) -> list[str]:
        """Paths of the objects in a folder, relative to it; empty if the folder does not exist."""
        with self._told("cannot be read", folder):
            try:
                found = self._found(f"{self._root}/{folder}")
            except FileNotFoundError:
                if self._extra == "s3":  # in S3 this means that the bucket is missing
                    raise
                return []
        return sorted(path.removeprefix(f"{folder}/") for name in found if (path := self._below(name)))

    def _found(self, root: str) -> dict[str, dict[str, Any]]:
        """Details of the objects below a path in the store, by the name there."""
        self._fs.invalidate_cache()
        found: dict[str, dict[str, Any]] = self._fs.find(root, detail=True, **({"on_error": "raise"} if self._walks else {}))
        return found

    @property
    def _walks(self) -> bool:
        """Whether the implementation lists folder by folder, and would skip folders that it cannot read."""
        from fsspec.asyn import AsyncFileSystem  # noqa: PLC0415  (an extra)
        from fsspec.spec import AbstractFileSystem  # noqa: PLC0415  (an extra)

        kind = type(self._fs)
        if isinstance(self._fs, AsyncFileSystem):
            return kind._find is AsyncFileSystem._find  # noqa: SLF001  (what an implementation overrides)
        return bool(kind.find is AbstractFileSystem.find)

    def _below(self, name: str) -> str:
        """Return the path below the root; "" for names outside of it, and for placeholders of folders."""
        inside = name.startswith(f"{self._root}/") and not name.endswith("/")
        return name[len(self._root) + 1 :] if inside else ""

    def read_ranges(self, ranges: Sequence[tuple[StoredObject, int, int]]) -> list[bytes]:
        """Read ranges of bytes (object, first byte, byte after the last one), several times if one does not come in full."""
        done: dict[int, bytes] = {}
        failure: tuple[StoredObject, BaseException] | None = None
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            todo = [number for number in range(len(ranges)) if number not in done]
            with self._told("cannot be read"):
                answers = self._fs.cat_ranges(
                    [f"{self._root}/{ranges[number][0].path}" for number in todo],
                    [ranges[number][1] for number in todo],
                    [ranges[number][2] for number in todo],
                    on_error="return",
                )
            for number, answer in zip(todo, answers, strict=True):
                stored, start, end = ranges[number]
                if isinstance(answer, BaseException):
                    failure = stored, answer
                elif len(answer) != end - start:
                    failure = stored, EOFError(f"{len(answer)} bytes came, expected {end - start}")
                else:
                    done[number] = bytes(answer)
            if len(done) == len(ranges):
                return [done[number] for number in range(len(ranges))]
            if failure is not None and isinstance(failure[1], FileNotFoundError | PermissionError):
                break
        assert failure is not None  # noqa: S101  (something is not done)
        raise StorageError(f"{self.url}/{failure[0].path}: cannot be read: {self._line(failure[1])}")

    def is_intact(self, stored: StoredObject, copy: Path) -> bool:
        """Return whether a copy has the content that the object's tag promises; True if the tag says nothing about the content.

        S3's ETag is the MD5 of an object that was written in one piece, unless the object is encrypted with a KMS or client
        key. OSError if the copy cannot be read.
        """
        promised = MD5.fullmatch(stored.tag) if self._extra == "s3" else None
        if promised is None:
            return True
        with copy.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        return digest == promised[1] or self._has_other_tag(stored)

    def _has_other_tag(self, stored: StoredObject) -> bool:
        """Return whether an object's ETag is not an MD5, although it looks like one."""
        bucket, key, _ = self._fs.split_path(f"{self._root}/{stored.path}")
        with self._told("cannot be read", stored.path):
            head = self._fs.call_s3("head_object", Bucket=bucket, Key=key)
        return "SSECustomerAlgorithm" in head or head.get("ServerSideEncryption", "AES256") != "AES256"

    def read(self, path: str) -> bytes:
        """Read a small object."""
        with self._told("cannot be read", path):
            return bytes(self._fs.cat_file(f"{self._root}/{path}"))

    @contextmanager
    def opened(self, path: str) -> Iterator[BinaryIO]:
        """Open a large object of which only parts are read."""
        with self._told("cannot be read", path), self._fs.open(f"{self._root}/{path}", "rb") as file:
            yield file

    def put(self, source: Path, path: str, *, new: bool = False) -> None:
        """Write an object completely or not at all; with `new`, ObjectExistsError if it exists."""
        with self._told("cannot be written", path):
            target = f"{self._root}/{path}"
            try:
                exists = new and self._fs.exists(target)
                if not exists:
                    self._fs.put_file(str(source), target, **({"mode": "create"} if new else {}))
            except FileExistsError:
                exists = True
            except Exception as error:
                if not new or not _knows_no_conditions(error):
                    raise
                self._fs.put_file(str(source), target)  # then only the check before guards against other writers
            if exists:
                raise ObjectExistsError(f"{self.url}/{path}: exists")

    def remove(self, path: str) -> None:
        """Remove an object."""
        with self._told("cannot be removed", path):
            self._fs.rm_file(f"{self._root}/{path}")

    @contextmanager
    def _told(self, what: str, path: str = "") -> Iterator[None]:
        """Turn every error of the implementation into one line that begins with `what`."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001  (implementations raise what they want)
            raise StorageError(f"{self.url}{path and '/'}{path}: {what}: {self._line(error)}") from None

    def _line(self, error: BaseException) -> str:
        """Return the text of an error as one line without credentials, with advice if there is any."""
        text = " ".join(str(error).split()) or type(error).__name__
        for secret in reversed(self._secrets):
            text = text.replace(secret, HIDDEN)
        text = textwrap.shorten(redacted(text), MAX_TEXT, placeholder=" ...")
        if isinstance(error, FileNotFoundError):
            return f"not found ({text})"
        named = type(error).__name__
        if (isinstance(error, PermissionError) or "Credential" in named) and self._extra:
            return f"{text}; give credentials that may do that: {CREDENTIALS[self._extra]}"
        return text if isinstance(error, OSError | EOFError) else f"{named}: {text}"


def _knows_no_conditions(error: BaseException) -> bool:
    """Return whether an S3-compatible store answered (501) that it does not support conditional writes."""
    answer = getattr(error.__cause__ or error, "response", None) or {}
    return bool(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == 501)


def _tag(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in TAGS if info.get(key) is not None), "")
