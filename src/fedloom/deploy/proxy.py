"""Authenticating reverse proxy: the only port of a fleet's server that devices can reach.

Flower's own port also starts runs and registers keys without asking for credentials, so it stays on the loopback
interface. The proxy passes on requests that come over TLS, with a registered key, to Flower's interface for devices.
"""

import base64
import http.client
import json
import logging
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

from ..engines import Refusal
from ..flower.versions import VERSION, explain_versions, is_compatible
from ..runs.state import RunState

logger = logging.getLogger(__name__)

DEVICE_PATHS = "/v1/fleet/"
ECHO = "/fedloom/echo"  # returns the request body, so that a device can measure its bandwidth
MAX_ECHO = 4 << 20  # bytes
HELLO = "/fedloom/hello"  # a device states name and version, and gets the server's version and authority
MAX_HELLO = 4096  # bytes
KEY_HEADER = "flwr-public-key"
TLS_HANDSHAKE = b"\x16"  # first byte of a TLS connection
CHUNK = 1 << 18  # bytes
DRAIN_TIMEOUT = 1.0  # seconds
IDLE_TIMEOUT = 120.0  # seconds
MAX_CONNECTIONS = 1024
LOG_INTERVAL = 10.0  # seconds in which the same rejection of the same peer is logged once
HOP_HEADERS = frozenset(("connection", "keep-alive", "host", "transfer-encoding", "content-length"))


@dataclass
class ProxyConfig:
    """Where the proxy connects to, which keys it accepts, and the file in which it logs rejected connections."""

    upstream: tuple[str, int]
    log: Path
    tls: ssl.SSLContext | None = None  # towards devices; None: plain HTTP, on the loopback interface only
    upstream_tls: ssl.SSLContext | None = None
    is_registered: Callable[[str], bool] | None = None  # takes a public key as PEM; None: accept everyone
    authority: Path | None = None  # the certificate that devices trust
    _logged: dict[tuple[str, str], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def log_rejection(self, peer: str, code: str, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._logged.get((peer, code), -LOG_INTERVAL) < LOG_INTERVAL:
                return
            self._logged[peer, code] = now
            if len(self._logged) > MAX_CONNECTIONS:
                self._logged = {key: when for key, when in self._logged.items() if now - when < LOG_INTERVAL}
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"code": code, "reason": f"{peer}: {reason}", "time": time.time()}) + "\n")

    def greet(self, peer: str, body: bytes) -> bytes:
        """The answer to a device's hello: the server's version, and the authority's certificate, maybe renewed."""
        try:
            hello = dict(json.loads(body))
        except (ValueError, TypeError):
            hello = {}
        name, version = str(hello.get("name", ""))[:60], hello.get("fedloom")
        if not is_compatible(version):
            self.log_rejection(peer, "VERSION", f"{name}: {explain_versions(version, is_server=True)}")
            logger.warning("%s is refused: %s", name, explain_versions(version, is_server=True))
        elif version != VERSION:
            logger.info("%s: %s", name, explain_versions(version, is_server=True))
        certificate = self.authority.read_text("ascii") if self.authority else ""
        return json.dumps({"fedloom": VERSION, "authority": certificate}).encode()

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.upstream
        if self.upstream_tls is None:
            return http.client.HTTPConnection(host, port, timeout=IDLE_TIMEOUT)
        return http.client.HTTPSConnection(host, port, timeout=IDLE_TIMEOUT, context=self.upstream_tls)


def start_proxy(address: tuple[str, int], config: ProxyConfig) -> "AuthProxy":
    """Serve in a background thread until `shutdown`."""
    proxy = AuthProxy(address, config)
    threading.Thread(target=proxy.serve_forever, args=(0.2,), name="proxy", daemon=True).start()
    return proxy


def read_rejected_connections(log: Path, state: RunState) -> Iterator[Refusal]:
    """Connections that were rejected since the last call; the position in the log is part of the run's state."""
    if not log.exists():
        return
    with log.open("rb") as file:
        file.seek(state.proxy_log_offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            state.proxy_log_offset += len(line)
            rejection: dict[str, Any] = json.loads(line)
            yield Refusal("", rejection["code"], rejection["reason"])


class AuthProxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], config: ProxyConfig) -> None:
        super().__init__(address, _Handler)
        self.config = config
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Runs in the connection's own thread, TLS handshake included, so that slow peers do not block others."""
        with self._slots, suppress(OSError):
            request.settimeout(IDLE_TIMEOUT)
            connection = self._accept(request, client_address[0])
            if connection is not None:
                with connection:  # the base class closes only the socket it accepted
                    _Handler(connection, client_address, self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections: the device opens a new one."""

    def _accept(self, request: socket.socket, peer: str) -> socket.socket | None:
        tls = self.config.tls
        if tls is None:
            return request
        first = request.recv(1, socket.MSG_PEEK)
        if first and first != TLS_HANDSHAKE:
            self.config.log_rejection(peer, "PLAINTEXT", "connection without TLS")
            return None
        try:
            return tls.wrap_socket(request, server_side=True) if first else None
        except ssl.SSLEOFError:  # connection lost
            return None
        except ssl.SSLError as error:
            self.config.log_rejection(peer, "TLS", _reason(error))
            return None


class _Handler(BaseHTTPRequestHandler):
    """One connection with any number of requests."""

    protocol_version = "HTTP/1.1"
    server: AuthProxy

    def setup(self) -> None:
        super().setup()
        self.upstream: http.client.HTTPConnection | None = None

    def handle(self) -> None:
        try:
            super().handle()
        except ssl.SSLEOFError:
            return
        except ssl.SSLError as error:  # in TLS 1.3 the device's rejection of our certificate arrives only here
            self.server.config.log_rejection(self.client_address[0], "TLS", _reason(error))

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        if self.upstream is not None:
            self.upstream.close()

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self._reject(411, "FORMAT", "no Content-Length")
        elif self.path == ECHO and int(length) <= MAX_ECHO:
            self._respond(200, [], self.rfile.read(int(length)))
        elif not self._is_for_devices(int(length)):
            self._reject(403, "NOT_FOR_DEVICES", f"{self.path[:60]} is not for devices")
        elif not self._has_registered_key():
            self._reject(403, "UNREGISTERED", "the key is not registered in this fleet")
        elif self.path == HELLO:
            self._respond(200, [], self.server.config.greet(self.client_address[0], self.rfile.read(int(length))))
        else:
            self._forward(int(length))

    def do_GET(self) -> None:
        self._reject(403, "NOT_FOR_DEVICES", f"{self.path[:60]} is not for devices")

    do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log accepted requests."""

    def _is_for_devices(self, length: int) -> bool:
        is_flower = self.path.startswith(DEVICE_PATHS) and ".." not in self.path
        return is_flower or (self.path == HELLO and length <= MAX_HELLO)

    def _has_registered_key(self) -> bool:
        is_registered = self.server.config.is_registered
        if is_registered is None:
            return True
        try:
            return is_registered(base64.b64decode(self.headers[KEY_HEADER], validate=True).decode("ascii"))
        except (TypeError, ValueError):
            return False

    def _forward(self, length: int) -> None:
        try:
            response = self._send_upstream(length)
        except (OSError, http.client.HTTPException):  # the SuperLink is down; devices retry
            self.close_connection = True
            self._respond(503, [], b"")
            self._drain(length)
            return
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP_HEADERS]
        self._respond(response.status, headers, response.read())

    def _send_upstream(self, length: int) -> http.client.HTTPResponse:
        self.upstream = self.upstream or self.server.config.connect()
        try:
            self.upstream.putrequest("POST", self.path, skip_host=True, skip_accept_encoding=True)
            self.upstream.putheader("Host", "{}:{}".format(*self.server.config.upstream))
            self.upstream.putheader("Content-Length", str(length))
            for name, value in self.headers.items():
                if name.lower() not in HOP_HEADERS:
                    self.upstream.putheader(name, value)
            self.upstream.endheaders()
            for part in self._read_body(length):
                self.upstream.send(part)
            return self.upstream.getresponse()
        except BaseException:
            self.upstream.close()
            self.upstream = None
            raise

    def _read_body(self, length: int) -> Iterator[bytes]:
        while length:
            part = self.rfile.read(min(CHUNK, length))
            if not part:
                raise ConnectionError("the connection ended in the middle of a message")
            length -= len(part)
            yield part

    def _reject(self, status: int, code: str, reason: str) -> None:
        self.close_connection = True
        self.server.config.log_rejection(self.client_address[0], code, reason)
        self._respond(status, [], reason.encode())
        length = self.headers.get("Content-Length", "")
        self._drain(int(length) if length.isdigit() else 0)

    def _drain(self, length: int) -> None:
        """Read the rest of the body: a peer that is cut off while sending may never see the response."""
        self.wfile.flush()
        self.connection.settimeout(DRAIN_TIMEOUT)
        with suppress(OSError):
            for _ in zip(self._read_body(length), range(MAX_ECHO // CHUNK), strict=False):
                pass

    def _respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _reason(error: ssl.SSLError) -> str:
    return f"TLS handshake failed: {(error.reason or str(error)).replace('_', ' ').lower()}"
