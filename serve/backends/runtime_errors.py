"""What a runtime's exception says, in one line that can be shown to anybody."""

from __future__ import annotations

import re

# Around what CUDA said stand a C++ signature, this machine's name and the paths of the machine that built the runtime:
# "... CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=a ; file=/b/c.cc ; line=1 ; expr=d();".
OF_CUDA = re.compile(r"\b(?:CUDA|CUBLAS|CUDNN\w*|CUFFT|CURAND|CUSPARSE|NCCL) failure \d+: [^;\n]*[^;\s]")
# "/onnxruntime_src/a/b.cc:1 void c::D::E(int, const f::G&) ", where the runtime checks something.
WHERE = re.compile(r"/onnxruntime_src/\S+:\d+ [^()\n]*\([^()\n]*\) (?:const )?")
OF_OPTION = re.compile(r"(?:Unknown|Failed to parse) provider option[^\n]*")


def reason_of(error: Exception) -> str:
    """The first line, or of that what matters."""
    text = str(error).strip() or type(error).__name__
    found = OF_OPTION.search(text) or OF_CUDA.search(text)
    return WHERE.sub("", text.splitlines()[0]) if found is None else found[0]


def is_about_an_option(error: Exception) -> bool:
    """Whether a provider does not know an option, or not its value."""
    return OF_OPTION.search(str(error)) is not None
