"""Write `*_pb2.py` and its type stub `*_pb2.pyi` for each `.proto` file of this folder: `python -m halfserve.protos.generate`.

The modules register their descriptors in the pool of protos/pool.py instead of protobuf's default one, which is why protoc's
own Python output is not used.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
# As other languages' protoc is called: `protoc -I protos inference.proto`.
FILES = ("model_config.proto", "inference.proto", "cluster.proto", "agent.proto")

MODULE = '''\
"""Generated from {name} by protos/generate.py; not to be edited by hand."""

{imports}from halfserve.protos.pool import add_file

globals().update(
    add_file(
{literal}
    )
)
'''


def generated_files() -> dict[str, str]:
    """Return the expected content of each generated file: path relative to the root -> text.

    Raises:
        RuntimeError: protoc does not accept a .proto file; protoc has printed where and why.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        descriptors = output / "descriptors.binpb"
        arguments = ["protoc", f"-I{ROOT / 'protos'}", f"--pyi_out={output}", f"--descriptor_set_out={descriptors}", *FILES]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc refused the .proto files; see its lines above")
        files = FileDescriptorSet.FromString(descriptors.read_bytes()).file
        texts = {f"{_path(name)}.pyi": _stub(output, name) for name in FILES}
    for file in files:
        imports = "".join(f"import {_module(name)}  # noqa: F401  (the pool needs it first)\n" for name in file.dependency)
        literal = _bytes_literal(file.SerializeToString(deterministic=True))
        texts[f"{_path(file.name)}.py"] = MODULE.format(name=f"protos/{file.name}", imports=imports, literal=literal)
    return texts


def _stub(output: Path, name: str) -> str:
    text = (output / f"{Path(name).stem}_pb2.pyi").read_text()
    # protoc knows only the file's path, not its package.
    return re.sub(r"^import (\w+_pb2) as", r"from halfserve.protos import \1 as", text, flags=re.MULTILINE)


def _path(name: str) -> str:
    return f"protos/{Path(name).stem}_pb2"


def _module(name: str) -> str:
    return f"halfserve.{_path(name)}".replace("/", ".")


def _bytes_literal(data: bytes) -> str:
    return "\n".join(f"        {data[i : i + 64]!r}" for i in range(0, len(data), 64))


def main() -> None:
    """Rewrite every file that differs from its expected content, and print its name."""
    for path, text in generated_files().items():
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text:
            (ROOT / path).write_text(text)
            sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
