"""A headless Chromium that tests look through, click and type in, by DevTools' protocol over two pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None and os.environ.get("RAYSIM_REQUIRE_BROWSER"):  # where these tests must not be skipped unnoticed
    raise RuntimeError("RAYSIM_REQUIRE_BROWSER is set, but neither chromium nor google-chrome is on the PATH.")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


class Browser:
    """One tab. Every message of its console is in `console`."""

    def __init__(self, reads: int, writes: int):
        self._in, self._out = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (reply := self._read()).get("id") != number:
            self._events.append(reply)
        assert "error" not in reply, reply
        return reply["result"]

    def _read(self) -> dict[str, Any]:
        found = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser has gone"
            found += byte
        return dict(json.loads(found))

    @property
    def console(self) -> list[str]:
        """What scripts, and the browser itself, have complained of."""
        return [
            str(event["params"])
            for event in self._events
            if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        ]

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False, media: str = "") -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", media=media, features=theme)
        self._events.clear()
        self._call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """Put the mouse on the first element of that selector, so far to its right and down; returns where that is."""
        box = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.x, b.y, b.width, b.height] }})(document.querySelector({json.dumps(selector)}))"
        )
        at = box[0] + x * box[2], box[1] + y * box[3]
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
        self.run("new Promise(requestAnimationFrame)")
        return at

    def click(self, selector: str) -> None:
        x, y = self.move(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.run("new Promise(requestAnimationFrame)")

    def choose(self, selector: str, value: str) -> None:
        """Pick an entry of a <select>."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{place}.value = {json.dumps(value)}; {place}.dispatchEvent(new Event('change'))")
        self.run("new Promise(requestAnimationFrame)")

    def picture(self, path: Path, whole: bool = True) -> None:
        """A screenshot of the page as PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in that folder."""
    theirs_in, writes = os.pipe()
    reads, theirs_out = os.pipe()
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars"
    command = f'exec "$0" {flags} --remote-debugging-pipe "$1" 3<&{theirs_in} 4>&{theirs_out} 2>/dev/null'
    process = subprocess.Popen(
        ["bash", "-c", command, str(CHROMIUM), f"--user-data-dir={profile}"], pass_fds=(theirs_in, theirs_out)
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(reads, writes)
    finally:
        process.kill()
        process.wait()
