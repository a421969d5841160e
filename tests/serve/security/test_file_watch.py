from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from serve.security.file_watch import FileWatch

WAIT_S = 20.0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes with names")
def test_a_pipe_does_not_change_and_files_beside_it_do(tmp_path: Path) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.touch()
    changes: list[str] = []

    async def watch() -> None:
        both_changed = asyncio.Event()
        watches = [
            FileWatch([pipe], 0.001, lambda: changes.append("pipe")),
            FileWatch([pipe, file], 0.001, both_changed.set),
        ]
        # Both ends are open here, so that nobody waits.
        end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        os.write(end, b"token")
        os.utime(pipe, (1, 1))
        file.write_text("another")
        for one in watches:
            one.start()
        async with asyncio.timeout(WAIT_S):
            await both_changed.wait()
            both_changed.clear()
            file.write_text("and another one")  # so many looks later the first watch has looked more than once
            await both_changed.wait()
        for one in watches:
            one.close()
        os.close(end)

    asyncio.run(watch())
    assert changes == []
