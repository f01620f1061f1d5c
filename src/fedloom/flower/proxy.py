"""The one door to a fleet's server. Flower's own port also starts runs and registers keys for whoever reaches it, so
it stays on this machine, and devices come through here: over TLS, with a known key, and to what is meant for devices.

Who is turned away is written down, a line for each, for the run to tell of.
"""

import base64
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOR_DEVICES = "/v1/fleet/"
ECHO = "/fedloom/echo"  # what is sent there comes back: by this a device finds out how fast its line is
MOST_ECHO = 4 << 20  # bytes
KEY = "flwr-public-key"
TLS_HELLO = b"\x16"
CHUNK = 1 << 18  # bytes
LINGER = 1.0  # seconds
IDLE = 120.0  # seconds without a word, after which a connection is closed
MOST_AT_ONCE = 1024  # connections
QUIET_FOR = 10.0  # seconds: whoever knocks in the same wrong way again is not written down again
OF_ONE_HOP = frozenset(("connection", "keep-alive", "host", "transfer-encoding", "content-length"))


@dataclass
class ProxyConfig:
    """What the gate needs to know, and where it writes down whom it turned away."""

    upstream: tuple[str, int]
    log: Path
    tls: ssl.SSLContext | None = None  # towards devices; None: on this machine alone, without
    upstream_tls: ssl.SSLContext | None = None
    admits: Callable[[str], bool] | None = None  # a public key, as PEM; None: anybody
    _told: dict[tuple[str, str], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def turn_away(self, peer: str, code: str, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._told.get((peer, code), -QUIET_FOR) < QUIET_FOR:
                return
            self._told[peer, code] = now
            if len(self._told) > MOST_AT_ONCE:
                self._told = {who: when for who, when in self._told.items() if now - when < QUIET_FOR}
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"code": code, "reason": f"{peer}: {reason}", "time": time.time()}) + "\n")

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.upstream
        if self.upstream_tls is None:
            return http.client.HTTPConnection(host, port, timeout=IDLE)
        return http.client.HTTPSConnection(host, port, timeout=IDLE, context=self.upstream_tls)


class AuthProxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], porter: ProxyConfig) -> None:
        super().__init__(address, _Visit)
        self.porter = porter
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, handshake and all: nobody's slowness is anybody else's."""
        with self._places, suppress(OSError):
            request.settimeout(IDLE)
            visitor = self._greeted(request, client_address[0])
            if visitor is not None:
                with visitor:  # the caller closes only what it has accepted
                    _Visit(visitor, client_address, self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is the device's to open again."""

    def _greeted(self, request: socket.socket, peer: str) -> socket.socket | None:
        tls = self.porter.tls
        if tls is None:
            return request
        first = request.recv(1, socket.MSG_PEEK)
        if first and first != TLS_HELLO:
            self.porter.turn_away(peer, "PLAINTEXT", "it speaks without TLS")
            return None
        try:
            return tls.wrap_socket(request, server_side=True) if first else None
        except ssl.SSLEOFError:  # its line broke
            return None
        except ssl.SSLError as error:
            self.porter.turn_away(peer, "TLS", _reason(error))
            return None


class _Visit(BaseHTTPRequestHandler):
    """One connection, of any number of requests."""

    protocol_version = "HTTP/1.1"
    server: AuthProxy

    def setup(self) -> None:
        super().setup()
        self.line: http.client.HTTPConnection | None = None

    def handle(self) -> None:
        try:
            super().handle()
        except ssl.SSLEOFError:
            return
        except ssl.SSLError as error:  # in TLS 1.3 a device that does not trust us says so only now
            self.server.porter.turn_away(self.client_address[0], "TLS", _reason(error))

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        if self.line is not None:
            self.line.close()

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self._refuse(411, "FORMAT", "it does not say how long its message is")
        elif self.path == ECHO and int(length) <= MOST_ECHO:
            self._answer(200, [], self.rfile.read(int(length)))
        elif not self.path.startswith(FOR_DEVICES) or ".." in self.path:
            self._refuse(403, "NOT_FOR_DEVICES", f"{self.path[:60]} is not for devices")
        elif not self._known():
            self._refuse(403, "UNREGISTERED", "its key is none of this fleet's")
        else:
            self._pass_on(int(length))

    def do_GET(self) -> None:
        self._refuse(403, "NOT_FOR_DEVICES", f"{self.path[:60]} is not for devices")

    do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Whoever comes as they should is not worth a line."""

    def _known(self) -> bool:
        admits = self.server.porter.admits
        if admits is None:
            return True
        try:
            return admits(base64.b64decode(self.headers[KEY], validate=True).decode("ascii"))
        except (TypeError, ValueError):
            return False

    def _pass_on(self, length: int) -> None:
        try:
            answer = self._asked(length)
        except (OSError, http.client.HTTPException):  # the server is away; devices know how to wait
            self.close_connection = True
            self._answer(503, [], b"")
            self._hear_out(length)
            return
        passed = [(name, value) for name, value in answer.getheaders() if name.lower() not in OF_ONE_HOP]
        self._answer(answer.status, passed, answer.read())

    def _asked(self, length: int) -> http.client.HTTPResponse:
        self.line = self.line or self.server.porter.connect()
        try:
            self.line.putrequest("POST", self.path, skip_host=True, skip_accept_encoding=True)
            self.line.putheader("Host", "{}:{}".format(*self.server.porter.upstream))
            self.line.putheader("Content-Length", str(length))
            for name, value in self.headers.items():
                if name.lower() not in OF_ONE_HOP:
                    self.line.putheader(name, value)
            self.line.endheaders()
            for part in self._body(length):
                self.line.send(part)
            return self.line.getresponse()
        except BaseException:
            self.line.close()
            self.line = None
            raise

    def _body(self, length: int) -> Iterator[bytes]:
        while length:
            part = self.rfile.read(min(CHUNK, length))
            if not part:
                raise ConnectionError("the device left in the middle of its message")
            length -= len(part)
            yield part

    def _refuse(self, status: int, code: str, reason: str) -> None:
        self.close_connection = True
        self.server.porter.turn_away(self.client_address[0], code, reason)
        self._answer(status, [], reason.encode())
        length = self.headers.get("Content-Length", "")
        self._hear_out(int(length) if length.isdigit() else 0)

    def _hear_out(self, length: int) -> None:
        """Who is closed upon in the middle of a message may never see the answer to it."""
        self.wfile.flush()
        self.connection.settimeout(LINGER)
        with suppress(OSError):
            for _ in zip(self._body(length), range(MOST_ECHO // CHUNK), strict=False):
                pass

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _reason(error: ssl.SSLError) -> str:
    said = (error.reason or str(error)).replace("_", " ").lower()
    return f"no agreement on TLS: {said}"


def opened(address: tuple[str, int], porter: ProxyConfig) -> AuthProxy:
    """At work in a thread of its own until it is shut down."""
    gate = AuthProxy(address, porter)
    threading.Thread(target=gate.serve_forever, args=(0.2,), name="gate", daemon=True).start()
    return gate
