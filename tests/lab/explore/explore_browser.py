"""A headless Chromium, driven by the DevTools protocol over two pipes."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a Chromium with an empty profile in `folder`."""

    def __init__(self, folder: Path):
        ours, theirs = os.pipe(), os.pipe()  # (theirs read, we write), (we read, theirs write)
        wiring = f'exec 3<&{ours[0]} 4>&{theirs[1]}; exec "$0" "$@"'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        command = [CHROMIUM, *options, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", wiring, *command],
            pass_fds=(ours[0], theirs[1]),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self.to, self.by = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self.count, self.session, self.rest = 0, None, b""
        self.events: list[dict[str, Any]] = []
        pages = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in pages if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while True:
            while b"\0" not in self.rest:
                more = os.read(self.by.fileno(), 1 << 20)
                assert more, "Chromium ended"
                self.rest += more
            line, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition}: {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def open(self, address: str, wide: int = 1280, high: int = 900, dark: bool = False) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Emulation.setDeviceMetricsOverride", width=wide, height=high, deviceScaleFactor=1, mobile=wide < 600)
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def press(self, key: str) -> None:
        """Press and release a key such as Tab, ArrowLeft, or a space."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        text = {"text": {" ": " ", "Enter": "\r"}[key]} if key in (" ", "Enter") else {}
        code = {"windowsVirtualKeyCode": codes[key], "key": key, "code": "Space" if key == " " else key}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in an <input type="file">."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(file)], nodeId=node)

    def problems(self) -> list[str]:
        """What the console holds: errors and broken rules of the page."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG file."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.to.close()
        self.by.close()
