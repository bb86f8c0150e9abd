"""A headless Chromium, driven over its debugging pipe: no driver program, no package, no network port."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SECONDS = 60.0
"""Longest wait for an answer; a start on a busy machine takes a few."""
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--disable-sync",
    "--force-color-profile=srgb", "--disable-extensions",
)  # fmt: skip
LAUNCH = """
import os, sys
from fcntl import F_DUPFD, fcntl
ends = [fcntl(int(end), F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from file 3 and writes answers to file 4."""


class Browser:
    """One page of one browser. `complaints`: errors and warnings of its console; `requested`: every address it asked
    for."""

    def __init__(self) -> None:
        if CHROMIUM is None:
            raise FileNotFoundError("no Chromium on this machine")
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self._number = 0
        self._session: str | None = None
        self._waiting: deque[dict[str, Any]] = deque()
        self._read = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        launch = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out)]
        self._process = subprocess.Popen(
            [*launch, CHROMIUM, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._in, False)
        self._attach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._profile.cleanup()

    def _attach(self) -> None:
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        limit = time.monotonic() + SECONDS
        while b"\0" not in self._read:
            try:
                more = os.read(self._in, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise TimeoutError("Chromium does not answer") from None
                time.sleep(0.005)
                continue
            if not more:
                raise ConnectionError("Chromium has gone")
            self._read += more
        first, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(first))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(parameters["entry"]))
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])

    def open(self, path: Path) -> None:
        """A page from disk, until it is loaded."""
        self.ask("Page.navigate", url=path.resolve().as_uri())
        limit = time.monotonic() + SECONDS
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.protocol") != "file:":
            if time.monotonic() > limit:
                raise TimeoutError(f"{path} does not load")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]["exception"]["description"]))
        return result["result"].get("value")

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page a size and a colour scheme, and let it draw."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as PNG."""
        parameters: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
            parameters["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return b64decode(self.ask("Page.captureScreenshot", **parameters)["data"])

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key, down and up."""
        codes = {
            "Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
            "ArrowRight": 39, "ArrowDown": 40,
        }  # fmt: skip
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key],
                modifiers=8 if shift else 0, **text,
            )  # fmt: skip

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        """Move the pointer, and click."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def evaluate(expression: str) -> Any:
    """In an empty page of a browser of its own."""
    with Browser() as browser:
        return browser.evaluate(expression)
