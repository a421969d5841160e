"""Models of the Hugging Face Hub by their name: the commit of a revision, its files, and copies in the hub's own cache.

The package huggingface_hub makes the requests, so that HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE hold.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from halfserve.files.object_storage import redacted
from halfserve.installation import install_hint

SCHEME = "hf://"
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
# Revisions with a slash are the hub's own: requests for changes, and conversions.
NAME = re.compile(rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>refs/(?:pr|convert)/\w+|[^@/\s]+))?")
OTHER_KINDS = ("datasets", "spaces", "buckets", "kernels")  # first words of hf:// URLs of what is no model
DEFAULT_REVISION = "main"
RECORDED = "config.json"  # fetched with each look at a revision, so that the cache has a folder of its commit
CHATTY = ("httpx", "httpx2")  # at INFO these log each request
LISTED = 6  # files that an error names


class HubError(Exception):
    """A model of the hub cannot be used; the text is one line with what to do."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """One commit of a model's repository on the hub.

    Attributes:
        name: `ORG/NAME`.
        revision: The branch, tag or commit that was asked for.
        commit: The commit that it stands for, 40 hexadecimal digits.
        endpoint: Address of the hub, without credentials.
        files: Size in bytes of each file, by path; of files in the cache alone where the hub was not asked.
        note: Why the hub was not asked; empty if it was.
    """

    name: str
    revision: str
    commit: str
    endpoint: str
    files: Mapping[str, int]
    note: str = ""

    @property
    def pinned(self) -> str:
        """Its name with the commit as the revision."""
        return f"{self.name}@{self.commit}"

    def listed(self, paths: Sequence[str]) -> str:
        """Return a few of its files, for an error."""
        more = f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
        return ", ".join(paths[:LISTED]) + more if paths else "none"


def model_name(text: str) -> tuple[str, str] | None:
    """Return name and revision of `[hf://]ORG/NAME[@REVISION]`; None for any other text."""
    found = NAME.fullmatch(text.removeprefix(SCHEME).removesuffix("/") if text.startswith(SCHEME) else text)
    if found is None or found["name"].partition("/")[0] in OTHER_KINDS:
        return None
    return found["name"], found["revision"] or DEFAULT_REVISION


def find_model(name: str, revision: str) -> HubModel:
    """Return the commit of a model's revision, and its files.

    Where the hub cannot be asked, as by HF_HUB_OFFLINE, the commit is the one that this machine's cache has for the revision.

    Raises:
        HubError: There is no such model or revision, it may not be read, or it is not in the cache of a machine without the
            hub.
    """
    hub, note = _library(name), ""
    # The folder of the revision's commit in the cache, which then answers for a hub that is away.
    folder_of = partial(hub.snapshot_download, name, revision=revision, allow_patterns=RECORDED)
    with _in_one_line(hub, name, revision):
        try:
            folder = Path(folder_of())
            info = hub.HfApi().model_info(name, revision=folder.name, files_metadata=True)
            files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
        except Exception as error:
            if not _is_away(hub, error):
                raise
            folder = Path(folder_of(local_files_only=True))
            files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
            note = f"{_away(hub, error)}: {revision} is commit {folder.name} as this machine's cache has it"
        endpoint = redacted(hub.constants.ENDPOINT)
        return HubModel(name=name, revision=revision, commit=folder.name, endpoint=endpoint, files=files, note=note)


def fetch_files(model: HubModel, *groups: Sequence[str]) -> Path:
    """Copy files of a model into the cache, group after group, and return the folder that has them.

    If a file of the last group is in the cache, those of the groups before are there too.

    Raises:
        HubError: They cannot be read, or not be written.
    """
    hub = _library(model.name)
    with _in_one_line(hub, model.name, model.revision):
        for paths in groups:
            patterns = [glob.escape(path) for path in paths]
            folder = hub.snapshot_download(
                model.name, revision=model.commit, allow_patterns=patterns, local_files_only=bool(model.note)
            )
    return Path(folder)


def folder_for_results(name: str, key: str) -> Path:
    """Return the folder below HF_HOME for what this program makes of a model, by a key such as its commit; made if missing.

    Raises:
        HubError: It cannot be made.
    """
    hub = _library(name)
    with _in_one_line(hub, name, key):
        root = hub.constants.HF_ASSETS_CACHE
        return Path(hub.cached_assets_path("halfserve", namespace=name, subfolder=key, assets_dir=root))


def _library(model: str) -> ModuleType:
    try:
        import huggingface_hub.constants  # noqa: PLC0415  (an extra, and slow to import)
        import huggingface_hub.errors  # noqa: PLC0415  (see above)
        import huggingface_hub.utils  # noqa: PLC0415  (see above)
    except ModuleNotFoundError:
        raise HubError(f"{model}: what reads models of a hub is not installed; {install_hint('hf-hub')}") from None
    # Its warnings and bars would come between the lines of a command, which says what it fetches by itself.
    huggingface_hub.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]  # (public, by its documentation)
    return huggingface_hub


@contextmanager
def _in_one_line(hub: Any, name: str, revision: str) -> Iterator[None]:
    """Turn every error of the library into one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (the library's client for HTTP has errors of its own)
        raise HubError(_text(hub, error, name, revision)) from None


def _is_away(hub: Any, error: Any) -> bool:
    """Return whether an error of a request says that the hub cannot be asked, and nothing about the model."""
    if isinstance(error, hub.errors.HfHubHTTPError):
        return bool(error.response.status_code >= 500 or error.response.status_code == 429)
    return not isinstance(error, (hub.errors.HFValidationError, hub.errors.LocalEntryNotFoundError))


def _away(hub: Any, error: Any) -> str:
    if isinstance(error, hub.errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids requests to the hub"
    if isinstance(error, hub.errors.HfHubHTTPError):
        return f"{redacted(hub.constants.ENDPOINT)} answered {error.response.status_code}"
    if isinstance(error, hub.errors.LocalEntryNotFoundError):
        return "the hub cannot be asked"
    return f"{redacted(hub.constants.ENDPOINT)} cannot be reached ({_line(error)})"


def _text(hub: Any, error: Any, name: str, revision: str) -> str:
    errors, endpoint, cache, missing = hub.errors, redacted(hub.constants.ENDPOINT), hub.constants.HF_HUB_CACHE, ""
    if isinstance(error, errors.LocalEntryNotFoundError):
        missing = f", and this machine's cache ({cache}) has no whole copy of {name}@{revision}"
        error = error.__cause__ or error.__context__ or error
    token = "give a token that may read it as HF_TOKEN or by `hf auth login`"  # noqa: S105  (advice)
    refusals = {
        errors.HFValidationError: f"{name} is no name that a hub may have: {_line(error)}",
        errors.GatedRepoError: f"{name} is gated; ask for access at {endpoint}/{name}, then {token}",
        errors.RepositoryNotFoundError: f"{endpoint} has no model {name}, or it is private; check the name, or {token}",
        errors.RevisionNotFoundError: f"{name} has no revision {revision!r}; expected a branch, a tag or a commit: "
        f"{endpoint}/{name}/commits/main",
    }
    for kind, text in refusals.items():
        if isinstance(error, kind):
            return text
    if isinstance(error, errors.HfHubHTTPError) and not _is_away(hub, error):
        return f"{endpoint} refuses {name} with {error.response.status_code}; check the token in HF_TOKEN and what it may read"
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        place = error.filename or cache
        return f"{name}: {place} cannot hold a copy: {error.strerror}; make room, or name another folder with HF_HOME"
    cure = "try again later, check the network and HF_ENDPOINT, or set HF_HOME to where a copy is"
    if isinstance(error, errors.OfflineModeIsEnabled):
        cure = "leave HF_HUB_OFFLINE out once, on a machine with a network, or set HF_HOME to where a copy is"
    return f"{_away(hub, error)}{missing}; {cure}"


def _line(error: Exception) -> str:
    return redacted(" ".join(str(error).split())[:300]) or type(error).__name__
