"""Groups of servers with models of their own, which share a directory, and what they keep when servers are replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.models import save_models
from halfserve import Client, ModelNotFound, RetryPolicy
from tests.serve.faults.soaking.clients import ask_affine, ask_flip
from tests.serve.faults.soaking.tally import Tally
from tests.serve.ray_cluster.machines import SERVER, WAIT_S, machines, serving, until

OPTIONS = ("--first-port", "0", "--", "--warm-up-seconds", "0", "--lame-duck-seconds", "0")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_groups_share_a_directory_and_keep_what_was_loaded(tmp_path: Path) -> None:
    save_models(tmp_path)
    random, tally = np.random.default_rng(), Tally()
    with machines([3]) as found:

        def run(name: str, models: str) -> str:
            named = ("--name", name, "--cluster", "house", "--models", models, "--detach")
            return found.done("run", str(tmp_path), *named, *OPTIONS)

        run("numbers", "affine, other*")
        printed = run("pictures", "flip")
        address = printed.strip().rpartition(" ")[2]
        with Client(address, timeout_s=WAIT_S, retries=RetryPolicy(retries=8, wait_for_server=True)) as client:
            ask_affine(client, random, tally)
            ask_flip(client, random, tally)
            status = found.status("house")
            assert {one["group"]: one["models"] for one in status["members"]} == {"numbers": ["affine"], "pictures": ["flip"]}
            refused = found.run("load", "steps", "--name", "house")
            assert "no servers of this cluster are for model 'steps'" in refused.stderr
            found.done("unload", "affine", "--name", "house")
            known = address.rpartition("//")[2].split(",")
            before = serving(known)
            found.kill(SERVER)
            until(lambda: len(now := serving(known)) == 1 and not set(now) - set(before), "end of the killed server")
            until(lambda: found.status("house")["members"][1:], "its successor")
            assert not client.is_ready("affine")
            with pytest.raises(ModelNotFound):
                ask_affine(client, random, tally)
            found.done("load", "affine", "--name", "numbers")
            ask_affine(client, random, tally)
            ask_flip(client, random, tally)
        found.done("stop", "--name", "numbers")
        assert [one["group"] for one in found.status("house")["members"]] == ["pictures"]
        found.done("stop", "--name", "pictures")
        assert "has no cluster 'house'" in found.run("status", "--name", "house").stderr
    assert tally.counted().wrong == []
