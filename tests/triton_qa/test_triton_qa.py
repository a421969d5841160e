from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.triton_qa.__main__ import OURS
from tests.triton_qa.onnx_models import add_sub
from tests.triton_qa.report import SuiteReport
from tests.triton_qa.repository import SQUARE
from tests.triton_qa.runner import Method, SuiteRun
from tests.triton_qa.suite import Suite

METHODS = """
import os, unittest
import numpy as np
from helper import SUM
import tritonclient.http as httpclient

class Sums(unittest.TestCase):
    def ask(self, model="onnx_int32_int32_int32"):
        client = httpclient.InferenceServerClient(os.environ["ADDRESS"])
        inputs = [httpclient.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        for tensor in inputs:
            tensor.set_data_from_numpy(np.ones((1, 16), np.int32))
        return client.infer(model, inputs).as_numpy("OUTPUT0")

    def test_passes(self):
        self.assertTrue((self.ask() == SUM).all())

    def test_fails(self):
        self.assertEqual(int(self.ask()[0, 0]), 3)

    def test_text(self):
        with self.assertRaises(Exception) as caught:
            self.ask("unknown")
        self.assertIn("in other words", str(caught.exception))

    def test_text_that_is_caught(self):
        try:
            self.assertEqual("one reason", "another")
        except Exception as ex:
            self.assertTrue(False, f"unexpected error {ex}")

    def test_sums_that_are_caught(self):
        try:
            self.assertEqual(1, 2)
        except Exception as ex:
            self.assertIn("reason", f"unexpected error {ex}")

    def test_slow(self):
        import time
        time.sleep(60)

    def test_skipped(self):
        self.skipTest("not here")

class TestWrittenForPytest:
    def test_last(self):
        assert SUM == 2
"""


def qa(folder: Path) -> Path:
    (folder / "L0_sums").mkdir()
    (folder / "L0_sums" / "sums_test.py").write_text(METHODS)
    (folder / "common").mkdir()
    (folder / "common" / "helper.py").write_text("SUM = 2\n")
    return folder


@pytest.mark.long
def test_each_method_of_a_suite_has_its_outcome(tmp_path: Path, free_port: int) -> None:
    suite = Suite(
        name="sums",
        tests="L0_sums/sums_test.py",
        models=(add_sub("int32", "int32", "int32"), SQUARE),
        flags=(f"--http-port={free_port}", "--grpc-port=0", "--allow-metrics=false", "--http-address=127.0.0.1"),
        left_out={"test_text": "it would fail"},
        environment={"ADDRESS": f"127.0.0.1:{free_port}"},
        method_seconds=10,
    )
    (tmp_path / "qa").mkdir()
    (tmp_path / "work").mkdir()
    methods = SuiteRun(suite, qa=qa(tmp_path / "qa"), work=tmp_path / "work", command=OURS, http_port=free_port).run()
    caught = {method.name: method.is_text for method in methods if method.name.endswith("_caught")}
    assert caught == {"Sums.test_text_that_is_caught": True, "Sums.test_sums_that_are_caught": False}
    found = {method.name: (method.outcome, method.error) for method in methods if method.name not in caught}
    assert found == {
        "Sums.test_passes": ("passed", ""),
        "Sums.test_fails": ("failed", "2 != 3"),
        "Sums.test_text": ("skipped", "it would fail"),
        "Sums.test_slow": ("failed", "the method did not end in time"),
        "Sums.test_skipped": ("skipped", "not here"),
        "TestWrittenForPytest.test_last": ("passed", ""),
    }


@pytest.mark.long
def test_methods_fail_with_the_log_of_a_server_that_does_not_start(tmp_path: Path) -> None:
    suite = Suite(name="sums", tests="L0_sums/sums_test.py", methods=("test_passes", "Sums.test_fails"), models=())
    (tmp_path / "qa").mkdir()
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-c", "raise SystemExit('no models')"]
    methods = SuiteRun(suite, qa=qa(tmp_path / "qa"), work=tmp_path / "work", command=command, http_port=9).run()
    assert [method.name for method in methods] == ["Sums.test_fails", "Sums.test_passes"]
    assert {method.error for method in methods} == {"the server did not start: no models"}


def test_methods_that_triton_fails_are_not_counted() -> None:
    passed, failed = (Method(name=name, outcome=name) for name in ("passed", "failed"))
    text = Method(name="text", outcome="failed", is_text=True)
    on_triton = [
        Method(name=name, outcome=outcome) for name, outcome in (("passed", "passed"), ("failed", "failed"), ("text", "passed"))
    ]
    report = SuiteReport(suite="sums", methods={"here": [passed, failed, text], "triton": on_triton})
    assert report.counts() == {"methods": 3, "triton": 2, "here": 1, "text": 1, "failed": 0, "skipped": 0}
