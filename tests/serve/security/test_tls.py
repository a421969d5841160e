from __future__ import annotations

import datetime as dt
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme

from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import SecurityError, SecurityOptions
from halfserve.serve.security.tls import ServerTls
from halfserve.serve.transports.transport import TransportName
from tests.serve.running_server import RunningServer, few_files
from tests.serve.security.guarded import WATCH_S, Certificates, guarded_server, infer

EXPIRED = dt.timedelta(days=-1)


@contextmanager
def channel_to(server: RunningServer, trusted: bytes, client: trustme.LeafCert | None = None) -> Iterator[grpc.Channel]:
    key = None if client is None else client.private_key_pem.bytes()
    chain = None if client is None else client.cert_chain_pems[0].bytes()
    credentials = grpc.ssl_channel_credentials(trusted, key, chain)
    address = f"localhost:{server.address.rpartition(':')[2]}"
    # Channels to one address share their connection unless they are told not to.
    with grpc.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def shown_by(server: RunningServer) -> str:
    """The certificate that a new connection meets."""
    host, _, port = server.address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=60).strip()


def test_calls_are_encrypted_and_plain_ones_are_not_answered(certificates: Certificates, transport: TransportName) -> None:
    with guarded_server(SecurityOptions(tls=certificates.options), transport) as (server, _):
        with channel_to(server, certificates.trusted) as channel:
            assert infer(channel) == 2
        with grpc.insecure_channel(server.address) as plain, pytest.raises(grpc.RpcError) as refused:
            infer(plain)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_clients_without_a_certificate_are_refused(
    certificates: Certificates, tmp_path: Path, transport: TransportName
) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    tls = replace(certificates.options, client_authorities=tmp_path / "clients.pem")
    with guarded_server(SecurityOptions(tls=tls), transport) as (server, _):
        with channel_to(server, certificates.trusted, ours.issue_cert("alice@example.org")) as channel:
            assert infer(channel) == 2
        for stranger in (None, theirs.issue_cert("mallory@example.org")):
            with channel_to(server, certificates.trusted, stranger) as channel, pytest.raises(grpc.RpcError) as refused:
                infer(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("key_type", trustme.KeyType)
def test_a_new_certificate_is_shown_and_connections_stay(
    certificates: Certificates, transport: TransportName, key_type: trustme.KeyType
) -> None:
    options = SecurityOptions(tls=certificates.options, watch_s=WATCH_S)
    with guarded_server(options, transport) as (server, _), channel_to(server, certificates.trusted) as channel:
        assert infer(channel) == 2
        old = shown_by(server)
        certificates.renew(key_type=key_type)
        while shown_by(server) == old:
            pass
        assert infer(channel) == 2
        assert (
            shown_by(server)
            == certificates.options.certificate.read_text().partition("-----END")[0] + "-----END CERTIFICATE-----"
        )


def test_files_that_do_not_fit_leave_the_certificate_as_it_was(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ServerTls(certificates.options)
    context = tls.context("h2")
    certificates.options.key.write_bytes(trustme.CA().issue_cert("localhost").private_key_pem.bytes())
    assert not tls.reload()
    assert "does not belong to certificate" in caplog.text
    assert "new connections still get the previous certificate" in caplog.text
    certificates.renew(valid_for=EXPIRED)
    assert not tls.reload()
    assert "has expired" in caplog.text
    certificates.renew()
    assert tls.reload()
    assert tls.context("h2") is context


@pytest.mark.parametrize("spare", [0, 1])
def test_a_certificate_that_cannot_be_loaded_for_want_of_files_is_taken_later(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, spare: int
) -> None:
    tls = ServerTls(certificates.options)
    tls.context("h2")
    certificates.renew()
    with few_files(spare):
        assert not tls.reload()
    assert tls.is_stale
    assert "Too many open files" in caplog.text
    assert "new connections still get the previous certificate" in caplog.text
    assert tls.reload(again=True)
    assert not tls.is_stale


def test_a_client_authority_that_is_taken_away_is_warned_of(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients = tmp_path / "clients.pem"
    first, second = trustme.CA().cert_pem.bytes(), trustme.CA().cert_pem.bytes()
    clients.write_bytes(first)
    tls = ServerTls(replace(certificates.options, client_authorities=clients))
    tls.context("h2")
    clients.write_bytes(first + second)
    assert tls.reload()
    assert not caplog.text
    clients.write_bytes(second)
    assert tls.reload()
    assert "was removed from its file; its clients that connected before may resume sessions until" in caplog.text


def test_client_authorities_come_and_go(certificates: Certificates, tmp_path: Path) -> None:
    clients = tmp_path / "clients.pem"
    first, second = trustme.CA(), trustme.CA()
    clients.write_bytes(first.cert_pem.bytes())
    options = SecurityOptions(tls=replace(certificates.options, client_authorities=clients), watch_s=3600)
    with guarded_server(options) as (server, security):

        def is_let_in(authority: trustme.CA) -> bool:
            with channel_to(server, certificates.trusted, authority.issue_cert("alice@example.org")) as channel:
                try:
                    return infer(channel) == 2
                except grpc.RpcError:
                    return False

        assert (is_let_in(first), is_let_in(second)) == (True, False)
        for there, expected in (((first, second), (True, True)), ((second,), (False, True))):
            clients.write_bytes(b"".join(authority.cert_pem.bytes() for authority in there))
            server.call(security.reload)
            assert (is_let_in(first), is_let_in(second)) == expected


def test_certificates_that_cannot_be_used_are_refused_with_the_reason(certificates: Certificates, tmp_path: Path) -> None:
    options = certificates.options
    (tmp_path / "text").write_text("hello")
    sealed = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nMII=\n-----END ENCRYPTED PRIVATE KEY-----\n"
    (tmp_path / "sealed").write_bytes(sealed)
    (tmp_path / "hollow").write_bytes(b"-----BEGIN CERTIFICATE-----\nMII=\n-----END CERTIFICATE-----\n")
    for wrong, text in (
        (
            replace(options, certificate=tmp_path / "none"),
            "none cannot be read: No such file or directory; expected a PEM file",
        ),
        (replace(options, certificate=tmp_path / "text"), "text is not of this kind; expected a PEM file with"),
        (
            replace(options, key=options.certificate),
            "server.pem is not of this kind; expected a PEM file with 'PRIVATE KEY",
        ),
        (replace(options, key=tmp_path / "sealed"), "sealed is encrypted; expected a key without a pass phrase"),
        (replace(options, certificate=tmp_path / "hollow"), "cannot be used: "),
        (replace(options, client_authorities=tmp_path / "hollow"), "TLS client authorities"),
    ):
        with pytest.raises(SecurityError) as refused:
            Security(SecurityOptions(tls=wrong), print)
        assert text in str(refused.value)


@pytest.mark.parametrize(("valid_for_days", "text"), [(-1, "has expired; put a valid one there"), (-8.99, "has expired")])
def test_a_certificate_that_has_expired_is_refused(certificates: Certificates, valid_for_days: float, text: str) -> None:
    certificates.renew(valid_for=dt.timedelta(days=valid_for_days))
    with pytest.raises(SecurityError, match=text):
        ServerTls(certificates.options)


def test_a_certificate_that_expires_soon_is_warned_of(certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    ServerTls(certificates.options)
    assert not caplog.text
    certificates.renew(valid_for=dt.timedelta(days=3.5))
    tls = ServerTls(certificates.options)
    assert "server.pem expires in 3 days" in caplog.text
    tls.look_at_clock()
    assert len(caplog.records) == 1, "the same is not said again"
    certificates.renew()
    assert tls.reload()
    tls.look_at_clock()
    assert len(caplog.records) == 1


def test_old_versions_of_tls_are_not_spoken(certificates: Certificates) -> None:
    assert ServerTls(certificates.options).context("h2").minimum_version is ssl.TLSVersion.TLSv1_2
