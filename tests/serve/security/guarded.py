"""Real servers behind real guards."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import trustme

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.model import Model
from halfserve.serve.observability.observe_options import ObserveOptions
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.protocol.service import INFER_PATH, SERVICE, Service
from halfserve.serve.security.security import PortSecurity, Security
from halfserve.serve.security.security_options import SecurityOptions, TlsOptions
from halfserve.serve.security.tokens import new_token
from halfserve.serve.transports.transport import Transport, TransportName, make_transport
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import WAIT_S, RunningServer, running_server

WATCH_S = 0.01


@contextmanager
def guarded_server(
    options: SecurityOptions,
    transport: TransportName = TransportName.NGHTTP2,
    *,
    backend: HeldBackend | None = None,
    at_admin: bool = False,
    shared_memory: bool = False,
    observe: ObserveOptions | None = None,
    models: Callable[[], list[Model]] | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[tuple[RunningServer, Security]]:
    """A server of the model "held", or of others, behind its main guard, or behind that of the admin port."""
    made: list[Security] = []

    def make(service: Service, host: str, port: int) -> Transport:
        security = Security(options, service.core.figures.refuse, clock=clock)
        made.append(security)
        guard: PortSecurity | None = security.admin if at_admin else security.main
        return make_transport(transport, service, host, port, guard)

    with running_server(
        models or (lambda: [held_model(backend or HeldBackend())]), make, shared_memory=shared_memory, observe=observe
    ) as server:
        server.call(made[0].start)
        try:
            yield server, made[0]
        finally:
            server.call(made[0].close)


def tokens_in(path: Path, **roles: Role) -> dict[str, str]:
    """Write a file of tokens; the tokens by name."""
    made = {name: new_token(name, [role]) for name, role in roles.items()}
    path.write_text("# who may come in\n\n" + "\n".join(line for _, line in made.values()) + "\n")
    path.chmod(0o600)
    return {name: token for name, (token, _) in made.items()}


def write_tokens(path: Path, *made: tuple[str, str]) -> list[str]:
    """Write a file of what `new_token` makes; the tokens."""
    path.write_text("\n".join(line for _, line in made) + "\n")
    path.chmod(0o600)
    return [token for token, _ in made]


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def infer_request(value: float = 1.0, model: str = "held") -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[np.float32(value).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    return request.SerializeToString()


def call(channel: grpc.Channel, method: str, message: bytes = b"", metadata: Any = None) -> bytes:
    path = method if method.startswith("/") else f"/{SERVICE}/{method}"
    answer: bytes = channel.unary_unary(path)(message, metadata=metadata, timeout=WAIT_S)
    return answer


def infer(channel: grpc.Channel, metadata: Any = None) -> float:
    answer = pb.ModelInferResponse.FromString(call(channel, INFER_PATH, infer_request(), metadata))
    return float(np.frombuffer(answer.raw_output_contents[0], np.float32)[0])


class Clock:
    """A clock that shows what a test wants; it begins when the test does."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Certificates:
    """An authority, and the files that it has signed, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.options = TlsOptions(certificate=folder / "server.pem", key=folder / "server.key")
        self.renew()

    @property
    def trusted(self) -> bytes:
        return self.authority.cert_pem.bytes()

    def renew(
        self, *, valid_for: dt.timedelta = dt.timedelta(days=90), key_type: trustme.KeyType = trustme.KeyType.ECDSA
    ) -> trustme.LeafCert:
        """Another certificate and key in the same files."""
        now = dt.datetime.now(dt.UTC)
        made = self.authority.issue_cert(
            "localhost", "127.0.0.1", not_before=now - dt.timedelta(days=9), not_after=now + valid_for, key_type=key_type
        )
        self.options.key.write_bytes(made.private_key_pem.bytes())
        self.options.certificate.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        return made
