"""`halfserve conformance`: check a running server against the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import grpc
import typer

from halfserve.conformance import grpc_checks, rest_checks
from halfserve.conformance.checks import CheckResult, ConformanceCheck, Outcome, ViolationError, run_check
from halfserve.conformance.http2_checks import http2_checks
from halfserve.conformance.results import as_json, as_junit, lines, summary
from halfserve.conformance.target_models import WIDTHS, TargetModel
from halfserve.files.atomic_files import atomic_file, checked_output

CONNECT_SECONDS = 10.0
FAILED_EXIT_CODE = 1
Target = TypeVar("Target")


class ConformanceTargetError(Exception):
    """The server cannot be asked: it is not there, or it has no model to ask."""


EXIT_CODES: dict[type[Exception], int] = {ConformanceTargetError: 3, OSError: 3}


def conformance(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the server's gRPC port; - skips gRPC.")],
    rest: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server's REST port.")] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A model to check; may be repeated; by default all that the server lists."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write results as JSON.")] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write results as JUnit XML.")] = None,
    failures_only: Annotated[bool, typer.Option("--failures-only", help="Print only the checks that fail.")] = False,
) -> None:
    """Check a running server of any maker against the Open Inference Protocol (KServe v2), over gRPC and REST.

    Each check names the section of the protocol, and passes, fails, or says what the server does not offer. All inputs are 1,
    in the shapes of the metadata. The exit code is 1 if a check fails, and 3 if the server cannot be asked.

    Example: halfserve conformance localhost:8001 --rest localhost:8000 --junit conformance.xml
    """
    for option, file in (("--json", json_file), ("--junit", junit_file)):
        if file is not None:
            checked_output(file, option)
    results: list[CheckResult] = []
    for check in conformance_checks(address if address != "-" else "", rest, model or []):
        results.append(run_check(check))
        if not failures_only or results[-1].outcome is Outcome.FAIL:
            typer.echo(lines(results[-1]))
    typer.echo(summary(results))
    target = " and ".join(part for part in (address, rest) if part and part != "-")
    for file, text in ((json_file, as_json), (junit_file, as_junit)):
        if file is not None:
            with atomic_file(file) as opened:
                opened.write(text(target, results).encode())
    if any(result.outcome is Outcome.FAIL for result in results):
        raise typer.Exit(FAILED_EXIT_CODE)


def conformance_checks(address: str, rest: str, names: Sequence[str]) -> Iterator[ConformanceCheck]:
    """Yield the checks of a server at its two addresses, each of which may be empty.

    Raises:
        ConformanceTargetError: a port does not answer, or there is no model to ask.
    """
    if not address and not rest:
        raise ConformanceTargetError("expected the address of a gRPC port, or --rest HOST:PORT")
    if address:
        host, port = _host_and_port(address)
        with grpc.insecure_channel(address) as channel:
            try:
                grpc.channel_ready_future(channel).result(CONNECT_SECONDS)
            except grpc.FutureTimeoutError:
                raise ConformanceTargetError(f"no gRPC server answers at {address}") from None
            target = grpc_checks.GrpcTarget(channel)
            yield from grpc_checks.grpc_checks(
                target, _models(target, names, grpc_checks.listed_models, grpc_checks.described_model)
            )
        yield from http2_checks(host, port)
    if rest:
        asked = rest_checks.RestTarget(*_host_and_port(rest))
        yield from rest_checks.rest_checks(asked, _models(asked, names, rest_checks.listed_models, rest_checks.described_model))


def _models(
    target: Target,
    names: Sequence[str],
    listed: Callable[[Target], list[str]],
    described: Callable[[Target, str], TargetModel],
) -> list[TargetModel]:
    """Return the models to ask: the named ones, or the first listed model of each set of data types."""
    found: dict[str, TargetModel] = {}
    for name in names or listed(target):
        try:
            made = described(target, name)
        except (grpc.RpcError, ViolationError) as error:
            if names:
                text = error.details() if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call) else str(error)
                raise ConformanceTargetError(f"the model {name!r} has no metadata: {text}") from None
            continue
        is_known = all(tensor.datatype in WIDTHS for tensor in (*made.inputs, *made.outputs))
        if names or (made.inputs and made.outputs and is_known):
            found.setdefault(name if names else made.datatypes, made)
    if not found:
        raise ConformanceTargetError(
            "the server lists no model with inputs and outputs; name one by --model, or serve the identity model of the guide"
        )
    return list(found.values()) if names else sorted(found.values(), key=lambda model: model.rank)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConformanceTargetError(f"{address!r} is no address, expected HOST:PORT")
    return host.strip("[]"), int(port)
