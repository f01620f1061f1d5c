"""The gate in front of a fleet's server: what passes, and who is turned away with which reason."""

import base64
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedloom.deploy.keys import Authority
from fedloom.deploy.proxy import MAX_ECHO, AuthProxy
from fedloom.deploy.registry import FleetRegistry
from fedloom.deploy.server import start_fleet_proxy
from tests.real_fleet import enroll_fleet


class Stub(BaseHTTPRequestHandler):
    """In place of Flower's port: says what it was asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        told = json.dumps({"path": self.path, "length": len(body), "mark": self.headers.get("X-Mark")}).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(told)))
        self.send_header("X-Back", "yes")
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def book(tmp_path: Path) -> FleetRegistry:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    return enroll_fleet(tmp_path / "fleet", f"127.0.0.1:{port}", "a:large", "b")


@pytest.fixture
def gate(book: FleetRegistry) -> Iterator[AuthProxy]:
    made = Authority(book.folder)
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    stub.daemon_threads = True
    inner = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inner.load_cert_chain(made.server_certificate, made.server_key)
    stub.socket = inner.wrap_socket(stub.socket, server_side=True)
    threading.Thread(target=stub.serve_forever, args=(0.02,), daemon=True).start()
    gate = start_fleet_proxy(book, stub.server_port)
    yield gate
    gate.shutdown()
    gate.server_close()
    stub.shutdown()
    stub.server_close()


@contextmanager
def visit(book: FleetRegistry, authority: Path | None = None) -> Iterator[http.client.HTTPSConnection]:
    trust = ssl.create_default_context(cafile=str(authority or book.folder / "ca.crt"))
    with closing(http.client.HTTPSConnection("127.0.0.1", book.port, timeout=10, context=trust)) as line:
        yield line


def headers(book: FleetRegistry, name: str = "a") -> dict[str, str]:
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_ssh_private_key((book.folder / "devices" / name / "key").read_bytes(), None)
    pem = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    return {"flwr-public-key": base64.b64encode(pem).decode(), "X-Mark": "mine"}


def turned_away(book: FleetRegistry) -> list[tuple[str, str]]:
    path = book.folder / "proxy.jsonl"
    said = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    return [(one["code"], one["reason"]) for one in said]


@pytest.mark.usefixtures("gate")
def test_a_known_device_gets_through_as_often_as_it_likes(book: FleetRegistry) -> None:
    with visit(book) as line:
        for size in (0, 3, 700_000):
            line.request("POST", "/v1/fleet/pull-messages", b"x" * size, headers(book))
            answer = line.getresponse()
            assert json.loads(answer.read()) == {"path": "/v1/fleet/pull-messages", "length": size, "mark": "mine"}
            assert answer.status == 201 and answer.headers["X-Back"] == "yes"
    assert turned_away(book) == []


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", "/", "/v1/fleet/../control/x"])
def test_what_is_not_for_devices_is_refused(book: FleetRegistry, path: str) -> None:
    for verb in ("POST", "GET"):
        with visit(book) as line:
            line.request(verb, path, b"" if verb == "POST" else None, headers(book))
            assert line.getresponse().status == 403
    assert [code for code, _ in turned_away(book)] == ["NOT_FOR_DEVICES"]  # twice within seconds is told of once


@pytest.mark.usefixtures("gate")
def test_an_unknown_key_is_refused_and_so_is_none(book: FleetRegistry, tmp_path: Path) -> None:
    other = enroll_fleet(tmp_path / "other", book.server, "a")
    for said in (headers(other), {}, {"flwr-public-key": "%%%"}):
        with visit(book) as line:
            line.request("POST", "/v1/fleet/activate-node", b"", said)
            assert line.getresponse().status == 403
    assert [code for code, _ in turned_away(book)] == ["UNREGISTERED"]


@pytest.mark.usefixtures("gate")
def test_plain_words_at_a_port_for_tls_are_refused(book: FleetRegistry) -> None:
    line = http.client.HTTPConnection("127.0.0.1", book.port, timeout=10)
    with closing(line), pytest.raises((http.client.HTTPException, OSError)):
        line.request("POST", "/v1/fleet/pull-messages", b"", headers(book))
        line.getresponse()
    assert [code for code, _ in turned_away(book)] == ["PLAINTEXT"]


@pytest.mark.usefixtures("gate")
def test_a_device_that_trusts_another_authority_is_told_of(book: FleetRegistry, tmp_path: Path) -> None:
    other = enroll_fleet(tmp_path / "other", book.server, "a")
    with pytest.raises(ssl.SSLCertVerificationError), visit(book, other.folder / "ca.crt") as line:
        line.request("POST", "/v1/fleet/pull-messages", b"", headers(book))
    for _ in range(100):
        if turned_away(book):
            break
        threading.Event().wait(0.05)
    ((code, reason),) = turned_away(book)
    assert code == "TLS" and "unknown ca" in reason


@pytest.mark.usefixtures("gate")
def test_an_echo_by_which_lines_are_measured(book: FleetRegistry) -> None:
    with visit(book) as line:
        line.request("POST", "/fedloom/echo", b"abc" * 1000)
        assert line.getresponse().read() == b"abc" * 1000
    with visit(book) as line:
        line.putrequest("POST", "/fedloom/echo")
        line.putheader("Content-Length", str(MAX_ECHO + 1))
        line.endheaders()
        assert line.getresponse().status == 403


def test_a_server_that_is_away_is_not_the_devices_fault(book: FleetRegistry) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gate = start_fleet_proxy(book, nobody.getsockname()[1])
        try:
            with visit(book) as line:
                line.request("POST", "/v1/fleet/pull-messages", b"abc", headers(book))
                assert line.getresponse().status == 503
        finally:
            gate.shutdown()
            gate.server_close()
    assert turned_away(book) == []


@pytest.mark.usefixtures("gate")
def test_a_message_of_unsaid_length_is_refused(book: FleetRegistry) -> None:
    with visit(book) as line:
        line.putrequest("POST", "/v1/fleet/push-object")
        for name, value in headers(book).items():
            line.putheader(name, value)
        line.putheader("Transfer-Encoding", "chunked")
        line.endheaders()
        assert line.getresponse().status == 411


@pytest.mark.usefixtures("gate")
def test_several_at_once_and_one_that_says_nothing(book: FleetRegistry) -> None:
    silent = socket.create_connection(("127.0.0.1", book.port))
    found: list[int] = []

    def once() -> None:
        with visit(book) as line:
            line.request("POST", "/v1/fleet/pull-messages", b"y" * 10_000, headers(book, "b"))
            found.append(line.getresponse().status)

    threads = [threading.Thread(target=once) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(10)
    silent.close()
    assert found == [201] * 8
