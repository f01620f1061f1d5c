"""The page of a run that goes on, served to browsers on this machine: it replaces its content without reloading.

Only the page and its CSV files are served, only to 127.0.0.1, and only to requests that name this address.
"""

import hashlib
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .page import FIGURES, Page

HOST = "127.0.0.1"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class LiveServer:
    """Serves the newest page in the background until it is closed.

    Parameters
    ----------
    port : of 127.0.0.1; 0 chooses a free one.
    """

    def __init__(self, port: int = 0):
        self._server = _PageServer((HOST, port), _Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://{HOST}:{self._server.server_address[1]}/"

    def show(self, page: Page) -> None:
        """Serve this page from now on."""
        csvs = {f"/{FIGURES}/{name}": (text.encode(), "text/csv") for name, text in page.csvs.items()}
        self._server.seen.clear()
        self._server.files = {"/": (page.html.encode(), "text/html"), **csvs}

    def wait_until_seen(self, seconds: float) -> bool:
        """Wait until the page that is shown now was fetched; False if that takes longer."""
        return self._server.seen.wait(seconds)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any):
        self.files: dict[str, tuple[bytes, str]] = {}  # replaced as a whole, never changed
        self.seen = threading.Event()
        super().__init__(*arguments)


class _Handler(BaseHTTPRequestHandler):
    server: _PageServer
    server_version, sys_version = "fedloom", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(HTTPStatus.FORBIDDEN)  # another site's name that leads here
            return
        found = self.server.files.get(self.path.partition("?")[0])
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body, kind = found
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        known = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if known else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        if not known:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and not known:
            self.wfile.write(body)
        if with_body and kind == "text/html":
            self.server.seen.set()

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing: the terminal belongs to the run."""
