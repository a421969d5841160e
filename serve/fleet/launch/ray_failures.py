"""Reasons why Ray cannot be started or reached, in one line with the cure."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._common.utils import get_default_ray_temp_dir

from halfserve.serve.fleet.launch.cluster_arguments import ClusterError

STARTING = "Ray cannot be started"
OPEN_FILES = 1024  # least limit of a process; with fewer, and on a full disk, Ray starts and its workers wait without end
FREE_BYTES = 100 * 2**20  # least free space on the disk of Ray's folder
LOG_BYTES = 2**16  # read from the end of each log
FATAL_CHARACTERS = 200
OTHER_FOLDER = "set RAY_TMPDIR to another folder"
# Texts of Ray's logs, and the reason with its cure.
LOGGED = (
    (
        r"Failed to start the grpc server\. The specified port is (\d+)",
        r"port \1 is taken; end the program that listens there, or unset the variable RAY_..._PORT that names the port",
    ),
    (r"Too many open files", "the limit on open files is too low; raise it with `ulimit -n 65536`"),
    (r"No space left on device", f"the disk of its folder is full; free space there, or {OTHER_FOLDER}"),
)
# Texts of its exceptions alone: its logs may hold them without harm.
SAID = (
    *LOGGED,
    (
        r"AF_UNIX path length cannot exceed (\d+) bytes",
        rf"the path of its sockets is longer than \1 bytes; {OTHER_FOLDER}, such as /tmp",
    ),
    (r"\[Errno \d+\] ([^:\n]+): '([^'\n]+)'", rf"it cannot write to \2: \1; {OTHER_FOLDER}"),
    (
        r"Version mismatch:.*?Ray: (\S+)\s+Python: (\S+).*?Ray: (\S+)\s+Python: (\S+)",
        r"it runs Ray \1 on Python \2, and this is Ray \3 on Python \4; install the same versions here",
    ),
    (
        r"No node info found",
        "it has no node on this machine; end what is left of it with `ray stop`, or run this command on one of its machines",
    ),
    (
        r"the minimum allowed is (\d+) bytes",
        r"too little memory is free for its object store, which takes \1 bytes; end other programs, or raise the memory limit",
    ),
    (
        r"[Tt]imed out (?:during startup|waiting for file|after \d+ seconds while waiting for node)",
        "its processes did not start in time, which happens on a busy machine; try again when other programs need fewer cores",
    ),
)


@contextmanager
def explained(what: str, hint: str = "") -> Iterator[None]:
    """Turn each exception that Ray raises within into a ClusterError, one line that begins with `what`.

    What Ray's libraries write to descriptor 2 meanwhile is dropped; Ray's logs say more. `hint` is for an unknown reason.

    Raises:
        ClusterError: Ray raised an exception.
    """
    began_s = time.time()
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except Exception as error:  # Ray raises plain ones too
        raise ClusterError(f"{what}: {reason(_chain(error), began_s, hint)}") from error
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def check_machine() -> None:
    """Check what Ray needs of this machine beside memory.

    Raises:
        ClusterError: the limit on open files is too low, or the disk of Ray's folder is full.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # Ray raises its limit to this
    if files != resource.RLIM_INFINITY and files < OPEN_FILES:
        raise ClusterError(
            f"{STARTING}: the limit on open files is {files}, expected {OPEN_FILES} or more; raise it with `ulimit -n 65536`"
        )
    folder = Path(get_default_ray_temp_dir())
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if free < FREE_BYTES:
        raise ClusterError(
            f"{STARTING}: the disk of {folder} has {free / 2**20:.0f} MiB free, expected {FREE_BYTES / 2**20:.0f} or more; "
            f"free space there, or {OTHER_FOLDER}"
        )


def reason(text: str, began_s: float, hint: str = "") -> str:
    """Return the reason of a failure, in one line with the cure.

    Args:
        text: Ray's exception or output.
        began_s: time.time() when Ray was called; logs that were written since belong to the failure.
        hint: ends the line if the reason is unknown.
    """
    folder = Path(get_default_ray_temp_dir())
    logs = _logs(folder, began_s)
    for causes, said in ((LOGGED, "\n".join(logs.values())), (SAID, text)):
        for pattern, cause in causes:
            if found := re.search(pattern, said, re.DOTALL):
                return found.expand(cause)
    return _unknown(text, logs, hint)


def last_line(message: str) -> str:
    """Last line of an error that may contain tracebacks, without the class of its exception."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    kind, separator, text = last.partition(": ")
    return text if separator and kind.rpartition(".")[2].endswith("Error") else last


def _chain(error: BaseException) -> str:
    """Texts of an exception and its causes, the exception's own as the last."""
    texts = [str(error)]
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
        texts.insert(0, str(error))
    return "\n".join(texts)


def _logs(folder: Path, since_s: float) -> dict[Path, str]:
    """Return the ends of the logs of Ray's last session that were written since a time."""
    found = {}
    for path in sorted((folder / "session_latest" / "logs").glob("*.[eo][ru][rt]")):
        try:
            if path.stat().st_mtime >= since_s:
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - LOG_BYTES))
                    found[path] = file.read().decode(errors="replace")
        except OSError:
            continue  # another user's
    return found


def _unknown(text: str, logs: dict[Path, str], hint: str) -> str:
    line = last_line(text) + hint
    for path, content in logs.items():
        if fatal := re.search(r"Check failed: (.*)", content):
            return f"{line}; {path} says: {fatal[1][:FATAL_CHARACTERS]}"
    return f"{line}; its logs are in {next(iter(logs)).parent}" if logs else line
