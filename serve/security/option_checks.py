"""What settings ask for, and whether that makes sense."""

from __future__ import annotations

from pathlib import Path

from serve.security.errors import SecurityError
from serve.security.options import ClientLimits, SecurityOptions, TlsOptions


def files_of(options: SecurityOptions) -> list[Path]:
    """All files that are asked for."""
    of_tls = [] if options.tls is None else files_of_tls(options.tls)
    return of_tls if options.token_file is None else [*of_tls, options.token_file]


def files_of_tls(options: TlsOptions) -> list[Path]:
    """Those that encryption takes."""
    return [path for path in (options.certificate, options.key, options.client_authorities) if path is not None]


def check_options(options: SecurityOptions) -> None:
    """Check that settings make sense together; the files are not looked at.

    Raises:
        SecurityError: they do not.
    """
    if options.admin_port is not None and options.admin_socket is not None:
        raise SecurityError("an admin port and an admin socket are both asked for; expected one of the two")
    if options.client_limits is not None:
        _check_limits(options.client_limits)


def _check_limits(limits: ClientLimits) -> None:
    for name in ("requests_per_s", "burst", "max_concurrent"):
        value = getattr(limits, name)
        if value is not None and not value > 0:
            raise SecurityError(f"the client limit {name} is {value:g}, expected more than 0; leave it out for no limit")
    if limits.burst is not None and limits.requests_per_s is None:
        raise SecurityError("the client limit burst means nothing without requests_per_s; give both")
