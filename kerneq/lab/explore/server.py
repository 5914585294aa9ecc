"""The server behind the page: on this machine alone, for those who know the token, one computation at a time."""

import hmac
import http.server
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any, final
from urllib.parse import parse_qsl

from ...settings import ConfigError, Override, build
from ...solution import NonfiniteInputError
from ..data import DataError
from ..evaluate import TrainedRun
from ..run import TrainingError
from ..run.files import to_json
from .page import address, list_pictures, read_pixels, render
from .watching import Controls, certify_pictures, describe_model, watch

LARGEST = 64 * 2**20  # bytes of a picture file
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@final
class RefusedError(Exception):
    """A request that is not served, by a sentence for people."""

    def __init__(self, status: HTTPStatus, sentence: str):
        super().__init__(sentence)
        self.status = status


@final
class Server(http.server.ThreadingHTTPServer):
    """Serves the page about a model at `url`, which has a port that was free and the token in it."""

    daemon_threads = True

    def __init__(self, trained: TrainedRun):
        self.trained, self.pictures = trained, list_pictures(trained)
        offered = [{"title": title, "picture": address(pixels)} for title, pixels in self.pictures]
        self.page = {"model": describe_model(trained), "pictures": offered, "largest": LARGEST}
        self.token, self.computing = secrets.token_urlsafe(), threading.Lock()
        self.tasks: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def run(self) -> None:
        """Serve until Ctrl-C, or None among the tasks; they run in this thread, where Ctrl-C reaches a computation."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        try:
            while (entry := self.tasks.get()) is not None:
                task, answer = entry
                try:
                    answer.set_result(task())
                except Exception as error:  # the thread that waits for it raises it
                    answer.set_exception(error)
        finally:
            self.shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away; anything else is a bug, of which the terminal has the traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def compute(self, task: str, query: str, content: bytes) -> dict[str, Any]:
        """Return a solve, or a certificate, of the picture that the query chooses, or of the file `content`."""
        asked: dict[str, Any] = {key: Override(value) for key, value in parse_qsl(query)}
        chosen = asked.pop("picture", "")
        controls = build(Controls, asked)
        if chosen and not (re.fullmatch("[0-9]{1,3}", chosen) and int(chosen) < len(self.pictures)):
            raise ConfigError(f"`picture` must be a number below {len(self.pictures)}, got {chosen:.20}.")
        if not self.computing.acquire(blocking=False):
            raise RefusedError(HTTPStatus.CONFLICT, "Another computation is running, and there is one at a time: wait.")
        try:
            answer: Future[dict[str, Any]] = Future()
            self.tasks.put((lambda: self._perform(task, controls, chosen, content), answer))
            return answer.result()
        finally:
            self.computing.release()

    def _perform(self, task: str, controls: Controls, chosen: str, content: bytes) -> dict[str, Any]:
        pixels = self.pictures[int(chosen)][1] if chosen else read_pixels(self.trained, content)
        if task == "certify":
            return {"certificate": certify_pictures(self.trained, [pixels], controls.width)[0]}
        return watch(self.trained, pixels, controls) | {"picture": address(pixels)}


@final
class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request; what goes wrong is one sentence, as JSON."""

    server: Server
    server_version, sys_version = "kerneq", ""
    timeout = 20  # seconds for a request to arrive

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: the requests are those of one's own browser."""

    def do_GET(self) -> None:
        nonce, kind, status = secrets.token_urlsafe(), "application/json", HTTPStatus.OK
        try:
            kind, body = self._route(nonce)
        except (RefusedError, ConfigError, DataError, NonfiniteInputError, TrainingError) as error:
            status = error.status if isinstance(error, RefusedError) else HTTPStatus.BAD_REQUEST
            body = to_json({"problem": str(error)}).encode()
        self.send_response(status)
        told = {"Content-Type": kind, "Content-Length": str(len(body)), "Content-Security-Policy": POLICY.format(nonce)}
        for name, value in (HEADERS | told).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def _route(self, nonce: str) -> tuple[str, bytes]:
        """Return the kind and the bytes of the answer, to a request with the token that is meant for this server.

        A page from elsewhere whose name was made to lead here (DNS rebinding) has another name in `Host`.
        """
        if self.headers.get("Host") not in [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]:
            raise RefusedError(HTTPStatus.FORBIDDEN, "This server answers at 127.0.0.1 only.")
        path, _, query = self.path.partition("?")
        _, token, *rest = [*path.split("/"), ""]
        if not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            raise RefusedError(HTTPStatus.FORBIDDEN, "The address needs the token that kerneq explore printed.")
        if self.command == "GET" and rest == ["", ""]:
            return "text/html; charset=utf-8", render(self.server.page, nonce)
        if self.command == "POST" and rest[0] in ("solve", "certify"):
            return "application/json", to_json(self.server.compute(rest[0], query, self._read())).encode()
        raise RefusedError(HTTPStatus.NOT_FOUND, "There is nothing at this address.")

    def _read(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > LARGEST:
            sentence = f"A picture file must say its size, which may be {LARGEST // 2**20} MB: save it smaller."
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)
        return self.rfile.read(int(length))  # where less arrives the picture is broken
