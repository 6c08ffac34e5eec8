"""Headless Chromium, driven through chromedriver by the W3C WebDriver protocol: no package is needed for it.

Debian: apt-get install chromium chromium-driver.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name of an element reference
KEYS = {"Enter": "\ue007", "Shift": "\ue008", "Escape": "\ue00c", "Right": "\ue014", "Down": "\ue015", "Tab": "\ue004"}
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb")


def missing() -> str | None:
    """Why no browser can be driven here; None where one can."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not installed (apt-get install chromium chromium-driver)" if lacking else None


class BrowserError(Exception):
    """What chromedriver said."""


class Browser:
    """One window.

    Args:
        profile: a new directory for the browser's own files.
        device_scale: physical pixels per CSS pixel.
    """

    def __init__(self, profile: Path, device_scale: float = 1) -> None:
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._base = f"http://127.0.0.1:{self._read_port()}"
        arguments = [*FLAGS, f"--user-data-dir={profile}", f"--force-device-scale-factor={device_scale}"]
        options = {"args": arguments, "binary": shutil.which("chromium"), "perfLoggingPrefs": {"enableNetwork": True}}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        try:
            answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end_driver()
            raise
        self._base += f"/session/{answer['sessionId']}"

    def _read_port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                return int(line.rstrip(".\n").rpartition(" ")[2])
        raise BrowserError("chromedriver did not start")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise BrowserError(json.load(error)["value"]["message"].partition("\n")[0]) from None

    def close(self) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._end_driver()

    def _end_driver(self) -> None:
        self._driver.terminate()
        self._driver.wait(10)
        if self._driver.stdout is not None:
            self._driver.stdout.close()

    # -- the page

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def resize(self, width: int, height: int, is_dark: bool = False, is_still: bool = False) -> None:
        """The size of the page itself in CSS pixels, and what its media queries say."""
        size = {"width": width, "height": height, "deviceScaleFactor": 0, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if is_still else "no-preference"},
        ]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def devtools(self, command: str, **params: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def run(self, script: str, *args: Any) -> Any:
        """The value that a script returns; it finds the arguments in `arguments`."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        """The text that the first such element shows; "" where there is none."""
        text: str = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return text

    def count(self, selector: str) -> int:
        count: int = self.run("return document.querySelectorAll(arguments[0]).length", selector)
        return count

    def click(self, selector: str) -> None:
        self._call("POST", f"/element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Type into an element; keys of KEYS may be in the text."""
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def hover(self, selector: str, x: int = 0, y: int = 0) -> None:
        """Move the pointer to so many CSS pixels from an element's middle."""
        origin = {ELEMENT: self._find(selector)}
        move = {"type": "pointerMove", "duration": 0, "x": x, "y": y, "origin": origin}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._call("POST", "/actions", {"actions": [pointer]})

    def _find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        reference: str = found[ELEMENT]
        return reference

    def wait(self, condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        """What the condition gives once that is true."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"it did not happen in {seconds:g} s"
            time.sleep(0.03)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    # -- what happened behind it

    def console(self) -> list[str]:
        """Messages of the console since the last look, refused and failed requests among them."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [f"{entry['level']} {entry['message']}" for entry in entries]

    def requested_urls(self) -> list[str]:
        """Addresses of all requests since the last look."""
        entries = self._call("POST", "/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in entries]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
