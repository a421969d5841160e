"""Run Triton's own QA, its files unchanged, against this server, and beside a real Triton where there is one.

    python -m tests.triton_qa SOURCES [SUITE ...] [--newer SOURCES] [--clients SOURCES] [--triton COMMAND]

SOURCES is a checkout of triton-inference-server/server, release 24.10, which is not part of this repository; `--newer` is one
of a later release, and `--clients` one of triton-inference-server/client, whose example clients run as they are. The QA's test
files name the ports 8000 to 8002 and regions of shared memory, so runs at the same time each need namespaces of their own:

    unshare --net --mount --pid --fork bash -c "ip link set lo up; mount -t tmpfs none /dev/shm; COMMAND"

`--part 1/3` runs one of three parts, and `--save FILE` keeps its results; without suites,
`python -m tests.triton_qa --table FILE --table FILE` prints one table of the parts' files.

Python models stand in for those of the QA's C++ backends, and ONNX models for those that its generators write. The QA's checks
in scripts of the shell are left out: what counts are the methods of its test files, and the exit status of each example client.
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
from tests.triton_qa.suite import Suite
from tests.triton_qa.suites import SUITES

OURS = [sys.executable, "-m", "halfserve", "triton", "--"]
HTTP_PORT = 8000


def main(
    sources: Annotated[Path | None, typer.Argument(help="Checkout of triton-inference-server/server.")] = None,
    names: Annotated[list[str] | None, typer.Argument(metavar="[SUITE]...", help="Suites to run; all without a name.")] = None,
    newer: Annotated[Path | None, typer.Option(help="Checkout of a later release, for the suites of its own.")] = None,
    clients: Annotated[Path | None, typer.Option(help="Checkout of triton-inference-server/client.")] = None,
    part: Annotated[str, typer.Option(help="The part to run of equal parts, such as 1/3.")] = "1/1",
    table: Annotated[list[Path] | None, typer.Option(help="Print one table of saved results, and run nothing.")] = None,
    triton: Annotated[str, typer.Option(help="Command that starts a real Triton; the flags follow it.")] = "",
    only_triton: Annotated[bool, typer.Option("--only-triton", help="Leave this server out.")] = False,
    save: Annotated[Path | None, typer.Option(help="JSON file of the results.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder that keeps each suite's models and logs.")] = None,
) -> None:
    """Run the suites, print a table and each method that fails."""
    if table:
        show([SuiteReport.from_json(report) for file in table for report in json.loads(file.read_text())], has_methods=False)
        return
    folders = _folders(sources, newer, clients)
    chosen = _part(part, _named(names or []))
    servers = {} if only_triton else {"here": OURS}
    if triton:
        servers["triton"] = shlex.split(triton)
    reports = []
    with tempfile.TemporaryDirectory() as scratch:
        for suite in chosen:
            if suite.sources not in folders:
                print(f"{suite.name:34}  left out, as it needs --{suite.sources}")
                continue
            found = {}
            for server, command in servers.items():
                if server == "triton" and suite.sources == "newer":
                    continue  # release 2.51 lacks what these suites test
                work = (keep.absolute() if keep else Path(scratch)) / suite.name / server
                work.mkdir(parents=True)
                run = SuiteRun(suite, qa=folders[suite.sources], work=work, command=command, http_port=HTTP_PORT)
                found[server] = run.run()
            if not found:
                continue
            reports.append(SuiteReport(suite=suite.name, methods=found))
            show(reports[-1:])
            if save:
                save.write_text(json.dumps([report.as_json() for report in reports], indent=1))
    show(reports, has_methods=False)


def _folders(server: Path | None, newer: Path | None, clients: Path | None) -> dict[str, Path]:
    """Return the folder of the test files in each of the sources that are there."""
    if server is None:
        raise typer.BadParameter("expected a checkout of triton-inference-server/server, or --table FILE")
    found = {}
    for name, sources, inner in (("server", server, "qa"), ("newer", newer, "qa"), ("clients", clients, "src/python")):
        if sources is not None:
            found[name] = sources.absolute() / inner
            if not found[name].is_dir():
                raise typer.BadParameter(f"{sources} has no folder {inner}, expected a checkout of Triton's {name} sources")
    return found


def _named(names: list[str]) -> list[Suite]:
    """Return the suites whose names begin with one of these; all without a name."""
    for name in names:
        if not any(suite.name.startswith(name) for suite in SUITES):
            raise typer.BadParameter(
                f"no suite begins with {name!r}, expected the start of: {', '.join(s.name for s in SUITES)}"
            )
    return [suite for suite in SUITES if not names or suite.name.startswith(tuple(names))]


def _part(part: str, suites: list[Suite]) -> list[Suite]:
    """Return each n-th suite, as "2/3" asks for the second of three parts."""
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 0 < int(number) <= int(count)):
        raise typer.BadParameter(f"part is {part!r}, expected a number and a count, such as 1/3")
    return suites[int(number) - 1 :: int(count)]


if __name__ == "__main__":
    typer.run(main)
