"""A headless Chromium that is driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 30.0


class Tab:
    """A page of the browser, what it has asked for, and what went wrong on it."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._port = port
        self._socket: WebSocketClientConnection | None = None
        self._count = 0
        self.requests: list[str] = []
        self.errors: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        return self._loop.run_until_complete(self._call(method, parameters))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None, "no page is open"
        self._count += 1
        number = self._count
        await self._socket.write_message(
            json.dumps({"id": number, "method": method, "params": parameters})
        )
        while True:
            received = await asyncio.wait_for(self._socket.read_message(), PATIENCE)
            assert received is not None, "the browser has gone"
            message = json.loads(received)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        kind, found = message.get("method"), message.get("params", {})
        if kind == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif kind == "Network.webSocketCreated":
            self.requests.append(found["url"])
        elif kind == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(found["exceptionDetails"])[:500])
        elif kind == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.errors.append(json.dumps(found["args"])[:500])
        elif kind == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(found["entry"]["text"])

    def open(self, url: str, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Load a page, and wait until it is drawn. The one before is closed."""
        self.close()
        self._socket = self._loop.run_until_complete(_new_page(self._port))
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.screen(width, height, dark)
        self.requests.clear()
        self.errors.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.drawn !== undefined")

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        """Show the page on a screen of this size and kind."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def close(self) -> None:
        """Close the page."""
        if self._socket is not None:
            self.call("Page.close")
            self._socket.close()
            self._socket = None

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.value(condition):
            assert not any("xception" in error for error in self.errors), self.errors
            assert time.monotonic() < end, f"never true: {condition}; {self.errors}"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of an expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True,
                          awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """``mouseMoved``, ``mousePressed`` or ``mouseReleased`` at a place in view."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the button, move, and release it."""
        button = {"button": "left", "clickCount": 1}
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, **button)
        for share in (0.3, 0.6, 1.0):
            x, y = (a + share * (b - a) for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", x, y, button="left", buttons=1)
        self.mouse("mouseReleased", *end, **button)

    def click(self, x: float, y: float, count: int = 1) -> None:
        """Click, once or more often."""
        self.mouse("mouseMoved", x, y)
        for number in range(1, count + 1):
            self.mouse("mousePressed", x, y, button="left", clickCount=number)
            self.mouse("mouseReleased", x, y, button="left", clickCount=number)


@contextmanager
def chromium() -> Iterator[Tab]:
    """A browser with one page, which is closed at the end."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--remote-debugging-port=0", "--remote-allow-origins=*", "--no-first-run",
                "--disable-background-networking", "--disable-dev-shm-usage",
                f"--user-data-dir={folder}", "about:blank",
            ],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            tab = Tab(_port(Path(folder, "DevToolsActivePort"), process))
            yield tab
            tab.close()
            tab._loop.run_until_complete(asyncio.sleep(0.05))  # in which the socket is closed
            tab._loop.close()
        finally:
            process.terminate()
            process.wait()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + PATIENCE
    while not (file.exists() and file.read_text()):
        assert process.poll() is None, "chromium has ended"
        assert time.monotonic() < end, "chromium has not started"
        time.sleep(0.05)
    return int(file.read_text().split()[0])


async def _new_page(port: int) -> WebSocketClientConnection:
    new = f"http://127.0.0.1:{port}/json/new?about:blank"
    answer = await AsyncHTTPClient().fetch(new, method="PUT", body="")
    address = json.loads(answer.body)["webSocketDebuggerUrl"]
    return await websocket_connect(address, max_message_size=2**28)
