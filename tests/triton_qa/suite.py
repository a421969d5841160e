"""One suite of Triton's QA: a test file, the server it needs and the environment it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Adds models to a repository: takes the QA's folder and the repository's folder.
Builder = Callable[[Path, Path], None]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Steps of a script `test.sh` of the QA for one test file, as data.

    Attributes:
        name: name of the suite on the command line and in the table.
        tests: the test file, relative to the folder of the sources; one that is not there is of this package's folder `own`.
        sources: what the suite needs: "server" (the QA of the release), "newer" (the QA of a newer one) or "clients" (NVIDIA's
            clients, whose folder is `src/python`).
        models: builders of the model repository.
        methods: names of the methods to run, each with its class where that is needed ("Class::method"); empty for all.
        left_out: methods that are not run, with the reason.
        flags: flags of tritonserver, besides the repository. "{models}" is the repository's path, "{tests}" the test file's
            folder and "{root}" what contains the copy of the QA's folder.
        environment: variables of the test file and of the server, with the same three names.
        repository: the model repository, relative to the test file's folder.
        log: the file of the server's output, relative to the test file's folder.
        ready_path: path that the server answers with status 200 before the first method; empty where it never is ready, then
            any answer is enough, and no model may still be loading.
        has_fresh_servers: whether each method gets a server of its own.
        kills_children_before: the method before which the server's child processes are killed.
        method_seconds: a method that takes longer has failed.
    """

    name: str
    tests: str
    sources: str = "server"
    models: tuple[Builder, ...]
    methods: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    repository: str = "models"
    log: str = "server.log"
    ready_path: str = "/v2/health/ready"
    has_fresh_servers: bool = False
    kills_children_before: str = ""
    method_seconds: float = 90.0
