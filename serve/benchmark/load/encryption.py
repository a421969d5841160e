"""TLS around a connection's socket."""

from __future__ import annotations

import socket
import ssl

from serve.benchmark.load.order import TlsFiles


def encrypted(plain: socket.socket, host: str, files: TlsFiles) -> ssl.SSLSocket:
    """Shake hands as a client that speaks HTTP/2; the plain socket is closed if that fails.

    Args:
        plain: connected, with a time limit.
        host: whom it is connected to.
        files: certificates.

    Raises:
        OSError: the server's certificate is none that is trusted, a file cannot be read, or the server has no TLS.
    """
    try:
        context = ssl.create_default_context(cafile=files.authorities)
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(plain, server_hostname=files.server_name or host)
    except BaseException:
        plain.close()
        raise
