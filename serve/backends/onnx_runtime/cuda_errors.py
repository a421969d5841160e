"""The text of ONNX Runtime's errors on a CUDA device."""

from __future__ import annotations

import re

# CUDA's message is surrounded by a C++ signature, the host name and paths of the build machine:
# "... CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=a ; file=/b/c.cc ; line=1 ; expr=d();".
OF_CUDA = re.compile(r"\b(?:CUDA|CUBLAS|CUDNN\w*|CUFFT|CURAND|CUSPARSE|NCCL) failure \d+: [^;\n]*[^;\s]")
# "/onnxruntime_src/a/b.cc:1 void c::D::E(int, const f::G&) ", from checks inside the runtime.
WHERE = re.compile(r"/onnxruntime_src/\S+:\d+ [^()\n]*\([^()\n]*\) (?:const )?")
# The runtime places no node for which neither CUDA nor the CPU has a kernel; it adds casts around float16 alone.
OF_KERNEL = re.compile(r"Provider type for (?P<operator>\w+) node with name '(?P<node>[^'\n]*)' is not set")
OF_CUDNN = re.compile(r"cuDNN is unavailable", re.IGNORECASE)
OF_OPTION = re.compile(r"(?:Unknown|Failed to parse) provider option[^\n]*")


def reason_of(error: Exception) -> str:
    """Return the essential line of a runtime's exception, safe to show to clients."""
    text = str(error).strip() or type(error).__name__
    found = OF_OPTION.search(text) or OF_CUDA.search(text)
    return WHERE.sub("", text.splitlines()[0]) if found is None else found[0]


def missing_kernel(error: Exception) -> str | None:
    """Return which node has no kernel on CUDA and on the CPU, and what to do; None if the refusal has another reason."""
    found = OF_KERNEL.search(str(error))
    if found is None:
        return None
    return (
        f"node {found['node']!r}: neither its CUDA provider nor its CPU provider has a {found['operator']} kernel for the "
        "node's types, such as bfloat16; convert the float32 model again, with "
        "`halfserve convert SOURCE TARGET --dtype bfloat16 --target any`, which keeps such nodes in float32"
    )


def is_about_cudnn(error: Exception) -> bool:
    """Return whether a session could not be opened because cuDNN is not there."""
    return OF_CUDNN.search(str(error)) is not None


def is_about_an_option(error: Exception) -> bool:
    """Return whether a provider rejects an option."""
    return OF_OPTION.search(str(error)) is not None
