"""A headless Chromium, driven by the DevTools protocol over a pipe: no port and no driver."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 60.0
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-sandbox",  # a container's root has no user namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
)
# What `key` presses: key -> (code, number of Windows, text)
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Tab": ("Tab", 9, ""),
    "Escape": ("Escape", 27, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    " ": ("Space", 32, " "),
}


# Two descriptors become 3 and 4, whatever they were, and the rest of the words is run with them.
PIPES = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """A tab.

    Attributes:
        problems: what its console was told of as an error or a warning, exceptions and refused
            resources among them.
    """

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int):
        self.problems: list[str] = []
        self._process, self._write, self._read = process, write, read
        self._received = bytearray()
        self._events: deque[dict[str, Any]] = deque()
        self._numbers = itertools.count(1)
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session: str | None = None
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to an address and wait until it is loaded."""
        self._events.clear()
        self._send("Page.navigate", {"url": url})
        deadline = time.monotonic() + TIMEOUT_S
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._take(deadline)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self._send(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            raise AssertionError(f"{script}: {text}")
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = TIMEOUT_S) -> Any:
        """The value of an expression once it is true; true where it is an element of the page."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"((one) => one instanceof Element || one)({script})")):
            if time.monotonic() > deadline:
                raise AssertionError(f"{script} is not true after {seconds} s; {self.problems}")
            time.sleep(0.05)
        return value

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press a key and let it go."""
        code, number, text = KEYS[name]
        event = {
            "key": name,
            "code": code,
            "windowsVirtualKeyCode": number,
            "modifiers": 8 if shift else 0,
        }
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self._send("Input.dispatchKeyEvent", {**event, **down})
        self._send("Input.dispatchKeyEvent", {**event, "type": "keyUp"})

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._send("Input.insertText", {"text": text})

    def click(self, selector: str) -> None:
        """Click into the middle of the first element that fits."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self._send("Input.dispatchMouseEvent", {"type": kind, **at})

    def hover(self, selector: str) -> None:
        """Point at the middle of the first element that fits."""
        x, y = self.middle(selector)
        self._send("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def middle(self, selector: str) -> tuple[float, float]:
        """Of the first element that fits, in pixels of the window."""
        found = self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'nearest'});"
            "const {left, top, width, height} = one.getClientRects()[0];"
            "return [left + width / 2, top + height / 2]; })()"
        )
        return found[0], found[1]

    def size(self, width: int, height: int, *, phone: bool = False, scale: float = 1) -> None:
        """Of the window."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self._send("Emulation.setDeviceMetricsOverride", metrics)
        self._send("Emulation.setTouchEmulationEnabled", {"enabled": phone})

    def media(self, **features: str) -> None:
        """What media queries find, such as `prefers_color_scheme="dark"`."""
        given = [{"name": name.replace("_", "-"), "value": one} for name, one in features.items()]
        self._send("Emulation.setEmulatedMedia", {"features": given})

    def screenshot(self, file: Path) -> None:
        """Write what is seen, as PNG or, by the file's name, WebP."""
        options: dict[str, Any] = {"format": "png"}
        if file.suffix == ".webp":
            options = {"format": "webp", "quality": 90}
        data = self._send("Page.captureScreenshot", options)["data"]
        file.write_bytes(base64.b64decode(data))

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of each element that assistive technology is told of."""
        nodes = self._send("Accessibility.getFullAXTree")["nodes"]
        seen = [node for node in nodes if not node.get("ignored")]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in seen
            if "role" in node
        ]

    def _send(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters or {}}
        if getattr(self, "_session", None) is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._take(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _take(self, deadline: float) -> dict[str, Any]:
        """The next message of the browser; events are kept."""
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise AssertionError(f"the browser says nothing (exit {self._process.poll()})")
            self._received += data
        head, _, rest = self._received.partition(b"\0")
        self._received = rest
        message: dict[str, Any] = json.loads(head)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            self.problems.append(f"exception: {text}")
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            values = [one.get("value", one.get("description")) for one in told["args"]]
            self.problems.append(f"console.{told['type']}: {values}")
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            entry = told["entry"]
            self.problems.append(f"log: {entry['text']} {entry.get('url', '')}")


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A headless browser with a new profile; the test is skipped where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium here ({', '.join(NAMES)}): Debian's package is `chromium`")
    to_browser, from_browser = os.pipe(), os.pipe()
    # the browser reads descriptor 3 and writes descriptor 4, whatever the pipes' numbers are
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PIPES,
            str(to_browser[0]),
            str(from_browser[1]),
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
        ],
        pass_fds=(to_browser[0], from_browser[1]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(process, to_browser[1], from_browser[0])
    finally:
        process.kill()
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
