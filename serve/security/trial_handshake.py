"""Try a certificate and its key out before clients do: a TLS handshake within memory."""

from __future__ import annotations

import ssl

from serve.security.errors import SecurityError

END = "-----END CERTIFICATE-----"
REASONS = {9: "is not valid yet", 10: "has expired"}  # OpenSSL's X509_V_ERR numbers


def end_of(server: ssl.SSLContext, certificate: str, name: str) -> float:
    """Shake hands with a server that has its certificate and key loaded; when its certificate ends, in seconds since the epoch.

    Args:
        server: asks clients for no certificate.
        certificate: PEM; the first is the server's.
        name: of the certificate's file, for the texts of errors.

    Raises:
        SecurityError: a client could not accept the certificate, whatever it trusts.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # The certificate itself is trusted here, wherever it comes from: its dates and its purpose are what is tried.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=certificate.partition(END)[0] + END + "\n")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there)
    try:
        _shake_hands(asking, server.wrap_bio(there, back, server_side=True))
    except ssl.SSLCertVerificationError as error:
        reason = REASONS.get(error.verify_code, f"cannot be a server's ({error.verify_message})")
        raise SecurityError(f"TLS certificate {name} {reason}; put a valid one there") from None
    except ssl.SSLError as error:
        raise SecurityError(f"TLS certificate {name} cannot be used: {error.reason}; put a valid one there") from None
    shown = asking.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _shake_hands(*ends: ssl.SSLObject) -> None:
    left = list(ends)
    while left:
        left = [end for end in left if not _is_done(end)]


def _is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
