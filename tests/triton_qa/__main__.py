"""Run Triton's own QA, its files unchanged, against this server, and beside a real Triton where there is one.

    python -m tests.triton_qa SOURCES [SUITE ...] [--triton COMMAND]

SOURCES is a checkout of triton-inference-server/server, release 24.10, which is not part of this repository. The QA's test
files name the ports 8000 to 8002 and regions of shared memory, so runs at the same time each need namespaces of their own
(`unshare --net --mount --pid`). Python models stand in for those of the QA's C++ backends, and ONNX models for those that its
generators write. The QA's checks in scripts of the shell are left out: what counts are the methods of its test files.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tests.triton_qa.report import SuiteReport, show
from tests.triton_qa.runner import SuiteRun
from tests.triton_qa.suites import SUITES

OURS = [sys.executable, "-m", "halfserve", "triton", "--"]
HTTP_PORT = 8000


def main(
    sources: Annotated[Path, typer.Argument(help="Checkout of triton-inference-server/server.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[SUITE]...", help="Suites to run; all without a name.")] = None,
    triton: Annotated[str, typer.Option(help="Command that starts a real Triton; the flags follow it.")] = "",
    only_triton: Annotated[bool, typer.Option("--only-triton", help="Leave this server out.")] = False,
    save: Annotated[Path | None, typer.Option(help="JSON file of the results.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder that keeps each suite's models and logs.")] = None,
) -> None:
    """Run the suites, print a table and each method that fails."""
    qa = sources.absolute() / "qa"
    if not qa.is_dir():
        raise typer.BadParameter(f"{sources} has no folder qa, expected a checkout of triton-inference-server/server")
    known = {suite.name: suite for suite in SUITES}
    for name in names or ():
        if not any(suite.startswith(name) for suite in known):
            raise typer.BadParameter(f"there is no suite {name!r}, expected the start of: {', '.join(known)}")
    servers = {} if only_triton else {"here": OURS}
    if triton:
        servers["triton"] = shlex.split(triton)
    reports = []
    with tempfile.TemporaryDirectory() as scratch:
        for suite in SUITES:
            if names and not any(suite.name.startswith(name) for name in names):
                continue
            found = {}
            for server, command in servers.items():
                work = (keep.absolute() if keep else Path(scratch)) / suite.name / server
                work.mkdir(parents=True)
                found[server] = SuiteRun(suite, qa=qa, work=work, command=command, http_port=HTTP_PORT).run()
            reports.append(SuiteReport(suite=suite.name, methods=found))
            show(reports[-1:])
            if save:
                save.write_text(json.dumps([report.as_json() for report in reports], indent=1))
    show(reports, has_methods=False)


if __name__ == "__main__":
    typer.run(main)
