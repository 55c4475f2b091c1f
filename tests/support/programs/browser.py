"""A headless Chromium, driven by chromedriver's protocol (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's reference, by the protocol."""
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Browser:
    """One window of a browser."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def command(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a command of the protocol; return its value."""
        response = self._http.request(method, f"/session/{self._session}{path}", json=body)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def open(self, address: str) -> None:
        """Load a page, and wait for it."""
        self.command("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what the body of a function returns in the page."""
        return self.command("POST", "/execute/sync", {"script": script, "args": arguments})

    def text(self, selector: str) -> str:
        """Return the text of the first element that `selector` finds."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        """Click on an element, as a user does."""
        self.command("POST", f"/element/{self._element(selector)}/click", {})

    def type(self, selector: str, text: str, *, instead: bool = False) -> None:
        """Type into a field, or give a file's path to a field for files. `instead` empties the field first."""
        if instead:
            self.command("POST", f"/element/{self._element(selector)}/clear", {})
        self.command("POST", f"/element/{self._element(selector)}/value", {"text": text})

    def wait(self, condition: Callable[[], Any], seconds: float = 300) -> Any:
        """Return the first true value of `condition`; fails after `seconds`."""
        until = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < until, self.run("return document.body.innerText")
            time.sleep(0.05)
        return found

    def errors(self) -> list[str]:
        """Return the errors and warnings in the browser's console since the last call."""
        return [entry["message"] for entry in self.command("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path, width: int, height: int = 0) -> None:
        """Write a PNG of the page in a window of this width in pixels; of the whole page without a height."""
        phone = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", phone)
        whole = height or self.run("return Math.ceil(document.documentElement.getBoundingClientRect().height)")
        self.devtools("Emulation.setDeviceMetricsOverride", {**phone, "height": whole})
        path.write_bytes(base64.b64decode(self.command("GET", "/screenshot")))

    def devtools(self, method: str, parameters: dict[str, Any]) -> Any:
        """Send a command of Chromium's own protocol."""
        return self.command("POST", "/goog/cdp/execute", {"cmd": method, "params": parameters})

    def _element(self, selector: str) -> str:
        found = self.command("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])


@contextmanager
def opened_browser(folder: Path) -> Iterator[Browser]:
    """Yield a browser whose user data is in the new folder `folder`; skips the test without chromedriver."""
    if (driver := shutil.which("chromedriver")) is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            port = next(
                found[1] for line in running.stdout if (found := re.search(r"successfully on port (\d+)", line))
            )
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
                options = {"args": [*_FLAGS, f"--user-data-dir={folder}"]}
                wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "WARNING"}}
                made = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
                assert "sessionId" in made, made
                browser = Browser(http, made["sessionId"])
                yield browser
                browser.command("DELETE", "")
        finally:
            running.terminate()
