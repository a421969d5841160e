"""A real headless Chromium, driven over two pipes with the DevTools protocol: https://chromedevtools.github.io/devtools-protocol/"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # a container's root cannot make one; only this test's own server is visited
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WAIT_MS = 20_000


def find_chromium() -> str | None:
    """The browser's program; None where there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Tab:
    """One page. Everything that went wrong in it is in `complaints`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Visit an address."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)

    def read(self, expression: str) -> Any:
        """The value of a JavaScript expression, waited for where it is a promise."""
        result = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value. The page itself looks, at each of its frames."""
        return self.read(
            f"""new Promise((resolve, reject) => {{
              const end = performance.now() + {WAIT_MS};
              const look = () => {{
                let value;
                try {{ value = {condition}; }} catch (error) {{ value = null; }}
                if (value) resolve(value);
                else if (performance.now() > end) reject(new Error({json.dumps(condition)} + " in " + document.body.innerText));
                else setTimeout(look, 20);
              }};
              look();
            }})"""
        )

    def screenshot(self, path: Path) -> None:
        """The whole page, as PNG."""
        image = self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(image["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from, 2**16)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[Tab]:
    """A browser with one tab, its profile in an empty folder."""
    inward, to_browser = os.pipe()
    from_browser, outward = os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    line = f'exec "$@" 3<&{inward} 4>&{outward}'
    command = ["bash", "-c", line, "bash", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    environment = {**os.environ, "HOME": str(profile)}
    process = subprocess.Popen(
        command, pass_fds=(inward, outward), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(inward)
    os.close(outward)
    try:
        tab = Tab(to_browser, from_browser)
        yield tab
        tab._session = None
        tab._call("Browser.close")
    finally:
        os.close(to_browser)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser)
