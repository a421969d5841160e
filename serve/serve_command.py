"""`halfserve serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from halfserve.option_groups import takes_option_groups
from halfserve.serve.engine.backend import Trust
from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.errors import FailedPreconditionError, ModelLoadError, errors_as_in_triton
from halfserve.serve.engine.resource_limits import FEWEST_FILES, allow_more, most_files
from halfserve.serve.fleet.launch.supervision import become_supervisor, check_room
from halfserve.serve.fleet.member.handover import LOST_DEVICE_CODE
from halfserve.serve.fleet.member.supervisor_link import SupervisorLink, take_over
from halfserve.serve.hub_models import place_of
from halfserve.serve.log_handler import LineFormat, log_to_standard_error
from halfserve.serve.options.as_triton import AsTriton
from halfserve.serve.options.computing import Batching, Computing, Ending
from halfserve.serve.options.listening import Listening
from halfserve.serve.options.models import Models, more_places
from halfserve.serve.options.observing import Observing
from halfserve.serve.options.securing import Securing
from halfserve.serve.process import ignore_hang_up, leave_at_once, leave_threads_behind
from halfserve.serve.security.security_options import SecurityError
from halfserve.serve.server import LostDeviceError, ServerOptions, addresses
from halfserve.serve.startup_report import StartupReport, log_restart, log_start, print_json, print_text, report_startup
from halfserve.serve.storage.storage_options import ObjectStorage
from halfserve.serve.transports.listening import BindError
from halfserve.serve.transports.transport import TransportName

logger = logging.getLogger(__name__)

EXIT_CODES: dict[type[Exception], int] = {ModelLoadError: 1, BindError: 1, FailedPreconditionError: 1, SecurityError: 1}


@takes_option_groups
def serve(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A model repository folder, or one .onnx, .xml or .pt2 file; or the URL of one in object storage, such as "
            "s3://bucket/models, or hf://ORG/NAME of the Hugging Face Hub.",
        ),
    ],
    more_paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Further model repositories, on this disk; a model that two of them contain is not served.",
            show_default=False,
        ),
    ] = None,
    *,
    listening: Listening,
    as_triton: AsTriton,
    models: Models,
    batching: Batching,
    computing: Computing,
    observing: Observing,
    security: Securing,
    ending: Ending,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Serve models over gRPC and REST in batches until SIGTERM or Ctrl-C.

    Speaks KServe v2 (the Open Inference Protocol), so Triton's clients and perf_analyzer work unchanged.

    Example: halfserve serve runs/demo/repository --grpc-port 8001
    """
    _check_open_files()
    link = take_over(os.environ)
    # The worker of a supervisor runs the same command, with a link to the supervisor.
    count = computing.process_count() if link is None else link.given.places
    becomes_supervisor = (ending.supervise or count > 1) and link is None
    if becomes_supervisor:
        _check_supervised("--supervise" if count == 1 else f"--processes {computing.processes}", listening.transport)
    options = ServerOptions(
        path=models.first_place(path),
        more_paths=more_places(path, more_paths or []),
        host=listening.host,
        grpc=listening.grpc,
        grpc_port=listening.grpc_port,
        reuse_ports=listening.reuse_ports,
        placement=computing.placement(count),
        defaults=batching.defaults(),
        compute_slots=computing.compute_slots,
        control=models.control(certificate_key=security.certificate_key, lame_duck_s=ending.lame_duck_seconds),
        observe=observing.observe(link.given.place if link and count > 1 else None),
        max_buffered_bytes=None if listening.max_buffered_mib is None else listening.max_buffered_mib * 2**20,
        drain_s=ending.drain_seconds,
        transport=listening.transport,
        shared_memory=listening.shared_memory,
        shared_memory_mode=listening.shared_memory_mode,
        response_cache_mib=computing.response_cache_mib,
        latencies=as_triton.latencies(),
        forwarded=as_triton.forwarded(),
        name=as_triton.server_name,
        strict_readiness=as_triton.strict_readiness,
        processes=count,
        http=listening.http_options(),
        security=security.security(as_triton),
    )
    log_format = observing.log_format
    ignore_hang_up()
    log_to_standard_error(log_format, options.observe.process)
    report = _report_of(options, link, as_json=as_json or log_format is LineFormat.JSON)
    with _failures_logged_as(log_format):
        replaced = {}
        if isinstance(options.path, ObjectStorage):
            place = place_of(options.path)
            replaced[path] = place.url if isinstance(place, ObjectStorage) else str(place)
            options = replace(options, path=place)
        if becomes_supervisor:
            check_room(count)
            become_supervisor(addresses(options), count, log_format, replaced)
        _check_device(required=computing.require_gpu)
        with errors_as_in_triton(as_triton.triton_errors):
            _run(options, partial(report_startup, report), link, models.trust())


def _report_of(options: ServerOptions, link: SupervisorLink | None, *, as_json: bool) -> Callable[[StartupReport], None]:
    """Return what reports the start: on standard output, or in the log if it is not the first of a supervised server."""
    if link and link.restarts:
        return partial(log_restart, restarts=link.restarts)
    if link and link.given.place > 1:
        return log_start
    return print_json if as_json else partial(print_text, scheme="http" if options.security.tls is None else "https")


@contextmanager
def _failures_logged_as(log_format: LineFormat) -> Iterator[None]:
    """Log why the server cannot start as JSON too: a reader of JSON logs would lose the line of text."""
    try:
        yield
    except tuple(EXIT_CODES) as error:
        if log_format is LineFormat.TEXT:
            raise
        logger.error("%s", error)  # noqa: TRY400  (the text says it all)
        raise typer.Exit(next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))) from None


def _check_open_files() -> None:
    allow_more()
    if most_files() < FEWEST_FILES:
        raise FailedPreconditionError(
            f"the limit of open files is {most_files()}, expected {FEWEST_FILES} or more: each connection is one; "
            "raise it (ulimit -n 4096)"
        )


def _check_device(*, required: bool) -> None:
    """Look for the device that models will need: with --model-control explicit there may be none of them yet."""
    if required and not device_count():
        raise FailedPreconditionError("--require-gpu: there is no CUDA device here (is the NVIDIA driver installed?)")


def _check_supervised(option: str, transport: TransportName) -> None:
    if sys.platform == "win32":
        raise typer.BadParameter(f"{option} needs processes that inherit sockets, which Windows does not have; leave it out")
    if transport is TransportName.GRPCIO:
        raise typer.BadParameter(f"{option} needs --transport nghttp2: grpcio cannot take over sockets; leave one of them out")


def _run(
    options: ServerOptions,
    on_ready: Callable[[StartupReport], None],
    link: SupervisorLink | None,
    trust: Trust,
) -> None:
    # Imported here, so that `halfserve serve --help` does not wait for the runtimes.
    from halfserve.serve.backends.runtimes import probing_runtimes  # noqa: PLC0415  (see above)
    from halfserve.serve.server import serve as serve_until_signal  # noqa: PLC0415  (the command has its name)

    runtimes = probing_runtimes(trust)
    with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
        try:
            runner.run(serve_until_signal(options, runtimes, on_ready, link))
        except LostDeviceError:
            leave_at_once(LOST_DEVICE_CODE)  # the cleanup of a driver that lost its device may never return
    leave_threads_behind()


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  (has no wheel for Windows)
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
