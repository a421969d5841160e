"""Write `*_pb2.py` and its type stub `*_pb2.pyi` for each `.proto` file of this folder: `python -m halfserve.protos.generate`.

The modules register their descriptors in the pool of protos/pool.py instead of protobuf's default one, which is why protoc's
own Python output is not used.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
FILES = ("protos/model_config.proto", "protos/inference.proto")

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
    """What each generated file must say: path relative to the root -> text.

    Raises:
        RuntimeError: protoc does not accept a .proto file; protoc has printed where and why.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        descriptors = output / "descriptors.binpb"
        arguments = ["protoc", f"-I{ROOT}", f"--pyi_out={output}", f"--descriptor_set_out={descriptors}", *FILES]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc refused the .proto files; see its lines above")
        files = FileDescriptorSet.FromString(descriptors.read_bytes()).file
        texts = {f"{Path(name).with_suffix('')}_pb2.pyi": _stub(output, name) for name in FILES}
    for file in files:
        imports = "".join(f"import {_module(name)}  # noqa: F401  (the pool needs it first)\n" for name in file.dependency)
        literal = _bytes_literal(file.SerializeToString(deterministic=True))
        texts[f"{Path(file.name).with_suffix('')}_pb2.py"] = MODULE.format(name=file.name, imports=imports, literal=literal)
    return texts


def _stub(output: Path, name: str) -> str:
    text = (output / f"{Path(name).with_suffix('')}_pb2.pyi").read_text()
    return text.replace("from protos import", "from halfserve.protos import")  # protoc knows the file's path alone


def _module(name: str) -> str:
    return f"halfserve.{Path(name).with_suffix('')}_pb2".replace("/", ".")


def _bytes_literal(data: bytes) -> str:
    return "\n".join(f"        {data[i : i + 64]!r}" for i in range(0, len(data), 64))


def main() -> None:
    """Write every file that is not as it should be and name it."""
    for path, text in generated_files().items():
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text:
            (ROOT / path).write_text(text)
            sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
