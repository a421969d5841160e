"""A process that owns memory on a device and lets others open it, as a client does.

python -m tests.serve.cuda_emulator.owner LIBRARY BYTES DEVICE

Prints the memory's handle in hexadecimal digits, then answers lines: `read OFFSET BYTES` with what lies there, `write OFFSET
DIGITS` with an empty line. Ends at the end of its input.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

HANDLE_BYTES = 64


class Owner:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.handle = bytes.fromhex(self._line())

    def read(self, offset: int, size: int) -> bytes:
        self._say(f"read {offset} {size}")
        return bytes.fromhex(self._line())

    def write(self, offset: int, data: bytes) -> None:
        self._say(f"write {offset} {data.hex()}")
        self._line()

    def _say(self, line: str) -> None:
        given = cast("IO[str]", self._process.stdin)
        given.write(f"{line}\n")
        given.flush()

    def _line(self) -> str:
        line = cast("IO[str]", self._process.stdout).readline()
        assert line, "the owner of the memory has ended"
        return line


@contextmanager
def owner(library: str, size: int, device_id: int = 0) -> Iterator[Owner]:
    """A process that owns `size` bytes on a device of a driver."""
    command = [sys.executable, "-m", __name__, library, str(size), str(device_id)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Owner(process)  # leaving closes its input


def main(library: str, size: int, device_id: int) -> None:
    driver = ctypes.CDLL(library)
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    handle = ctypes.create_string_buffer(HANDLE_BYTES)

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def call(name: str, *arguments: object) -> None:
        code = getattr(driver, name)(*arguments)
        assert code == 0, f"{name} gave {code}"

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), device_id)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxPushCurrent_v2", context)
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    call("cuIpcGetMemHandle", handle, pointer)
    say(handle.raw.hex())
    for line in sys.stdin:
        what, offset, rest = line.split()
        at = ctypes.c_uint64(pointer.value + int(offset))
        if what == "read":
            buffer = ctypes.create_string_buffer(int(rest))
            call("cuMemcpyDtoH_v2", buffer, at, ctypes.c_size_t(int(rest)))
            say(buffer.raw.hex())
        else:
            data = bytes.fromhex(rest)
            call("cuMemcpyHtoD_v2", at, data, ctypes.c_size_t(len(data)))
            say("")
    call("cuMemFree_v2", pointer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
