"""Members of a cluster with TLS and tokens, of which one is for one model only."""

from __future__ import annotations

import ssl
import urllib.request
from functools import partial
from operator import eq
from pathlib import Path

import pytest

from halfserve import Client, ModelNotFound, Tls
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.tokens import new_token
from tests.serve.fleet.fleet import WAIT_S, X
from tests.serve.fleet.local_cluster import Watch, local_cluster
from tests.serve.security.guarded import Certificates, write_tokens


@pytest.mark.long
def test_a_token_for_one_model_sees_no_other_one_of_the_cluster(folder: Path, two_models: Path, tmp_path: Path) -> None:
    certificates, root = Certificates(tmp_path), tmp_path / "root.pem"
    root.write_bytes(certificates.trusted)
    roles = [Role.INFER, Role.METRICS]
    made = (new_token("all", roles), new_token("one", roles, models=["mlp"]))
    whole, one = write_tokens(tmp_path / "tokens", *made)
    files = ("--tls-cert", str(certificates.options.certificate), "--tls-key", str(certificates.options.key))
    tls = Tls(authorities=root)
    with local_cluster(folder, two_models) as cluster:
        cluster.start(2, *files, "--token-file", str(tmp_path / "tokens"))
        agent = cluster.agents[0]
        for token, seen in ((whole, {"mlp", "picky"}), (one, {"mlp"})):
            with Watch(agent, token, tls) as watch:
                expected = {each.address: seen for each in cluster.agents}
                # A member that has just started may lack models.
                assert watch.until(partial(eq, expected)) == expected
            with Client(f"cluster://{agent.address}", tls=tls, token=token, timeout_s=WAIT_S) as client:
                client.infer("mlp", {"x": X})
                assert {each.name for each in client.models()} == seen
                assert {each.name for each in client.statistics()} == seen
                assert client.is_ready("picky") == ("picky" in seen)
                for name in {"picky"} - seen:
                    with pytest.raises(ModelNotFound, match="model 'picky' is not served here"):
                        client.statistics(name)
            headers = {"authorization": f"Bearer {token}"}
            request = urllib.request.Request(f"https://{agent.metrics_address}/metrics", headers=headers)
            context = ssl.create_default_context(cadata=certificates.trusted.decode())
            with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:  # noqa: S310  (the test's own URL)
                text = answer.read().decode()
            assert 'nv_inference_count{model="mlp"' in text
            assert ('model="picky"' in text) == ("picky" in seen)
