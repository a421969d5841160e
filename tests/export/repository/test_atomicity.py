from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

from export.certificate.certificate import Certificate
from export.repository.model_version_writer import write_model_version
from tests.export.onnx_files import sums

Certify = Callable[[onnx.ModelProto], Certificate]

# Reads every version again and again until it has seen as many as it is told; prints each one that is not whole.
READER = textwrap.dedent("""
    import hashlib, json, pathlib, sys
    repository, wanted, seen = pathlib.Path(sys.argv[1]), int(sys.argv[2]), set()
    print("ready", flush=True)
    while len(seen) < wanted:
        for version in [path for path in repository.glob("[!.]*/[0-9]*") if path.name.isdigit()]:
            try:
                certificate = json.loads((version / "certificate.json").read_bytes())
                digest = hashlib.sha256((version / "model.onnx").read_bytes()).hexdigest()
                whole = digest == certificate["onnx_sha256"] and (version / "fp32" / "model.onnx").stat().st_size > 1000
                whole = whole and "onnxruntime_onnx" in (version.parent / "config.pbtxt").read_text()
            except (OSError, ValueError) as error:
                whole = repr(error)
            if whole is not True:
                print(version, whole, flush=True)
            seen.add(version)
""")


def test_a_reader_in_another_process_never_sees_half_a_version(tmp_path: Path, certify: Certify) -> None:
    half, twin = sums(2, 4096, dtype=np.float16), sums(2, 4096)
    certificate = certify(half)
    command = [sys.executable, "-c", READER, str(tmp_path), "40"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        for index in range(40):
            write_model_version(tmp_path, f"m{index % 4}", half, certificate, max_batch_size=0, fp32_twin=twin)
        rest, _ = reader.communicate(timeout=60)
    assert (rest, reader.returncode) == ("", 0)


def test_a_full_disk_leaves_nothing(tmp_path: Path, certify: Certify) -> None:
    (tmp_path / "certificate.json").write_bytes(certify(sums(2, 4096, dtype=np.float16)).to_bytes())
    program = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        import numpy as np
        from export.certificate.certificate import read_certificate
        from export.errors import ExportError
        from export.repository.model_version_writer import write_model_version
        from tests.export.onnx_files import sums
        certificate = read_certificate(Path(sys.argv[2]).read_bytes())
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # room for the fp16 model, not for its twin
        half, twin = sums(2, 4096, dtype=np.float16), sums(2, 4096)
        try:
            write_model_version(sys.argv[1], "m", half, certificate, max_batch_size=0, fp32_twin=twin)
        except ExportError as error:
            sys.exit(str(error))
    """)
    command = [sys.executable, "-c", program, str(tmp_path / "models"), str(tmp_path / "certificate.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == f"cannot write to the repository {tmp_path / 'models'}: File too large\n"
    assert list((tmp_path / "models").iterdir()) == []
