"""The proxy in front of a fleet's server: what it forwards, and what it rejects for which reason."""

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

import fedloom
from fedloom.deploy import device
from fedloom.deploy import proxy as proxies
from fedloom.deploy.device import check_server
from fedloom.deploy.keys import Authority
from fedloom.deploy.processes import find_free_port
from fedloom.deploy.proxy import MAX_ECHO, AuthProxy
from fedloom.deploy.registry import FleetRegistry, read_bundle, renew
from fedloom.deploy.server import start_fleet_proxy
from fedloom.flower import versions
from fedloom.recipe.errors import RecipeError
from tests.real_fleet import enroll_fleet


class Stub(BaseHTTPRequestHandler):
    """Stands in for Flower's port: returns what it was sent."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        summary = json.dumps({"path": self.path, "length": len(body), "mark": self.headers.get("X-Mark")}).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(summary)))
        self.send_header("X-Back", "yes")
        self.end_headers()
        self.wfile.write(summary)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def registry(tmp_path: Path) -> FleetRegistry:
    port = find_free_port()
    return enroll_fleet(tmp_path / "fleet", f"127.0.0.1:{port}", "a:large", "b")


@pytest.fixture
def proxy(registry: FleetRegistry) -> Iterator[AuthProxy]:
    authority = Authority(registry.folder)
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    stub.daemon_threads = True
    inner = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inner.load_cert_chain(authority.server_certificate, authority.server_key)
    stub.socket = inner.wrap_socket(stub.socket, server_side=True)
    threading.Thread(target=stub.serve_forever, args=(0.02,), daemon=True).start()
    proxy = start_fleet_proxy(registry, stub.server_port)
    yield proxy
    proxy.shutdown()
    proxy.server_close()
    stub.shutdown()
    stub.server_close()


@contextmanager
def connect(registry: FleetRegistry, authority: Path | None = None) -> Iterator[http.client.HTTPSConnection]:
    trust = ssl.create_default_context(cafile=str(authority or registry.folder / "ca.crt"))
    with closing(http.client.HTTPSConnection("127.0.0.1", registry.port, timeout=10, context=trust)) as connection:
        yield connection


def headers(registry: FleetRegistry, name: str = "a") -> dict[str, str]:
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_ssh_private_key((registry.folder / "devices" / name / "key").read_bytes(), None)
    pem = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    return {"flwr-public-key": base64.b64encode(pem).decode(), "X-Mark": "mine"}


def read_rejections(registry: FleetRegistry) -> list[tuple[str, str]]:
    path = registry.folder / "proxy.jsonl"
    rejections = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    return [(rejection["code"], rejection["reason"]) for rejection in rejections]


@pytest.mark.usefixtures("proxy")
def test_proxy_registered_device_is_forwarded(registry: FleetRegistry) -> None:
    with connect(registry) as connection:
        for size in (0, 3, 700_000):
            connection.request("POST", "/v1/fleet/pull-messages", b"x" * size, headers(registry))
            answer = connection.getresponse()
            assert json.loads(answer.read()) == {"path": "/v1/fleet/pull-messages", "length": size, "mark": "mine"}
            assert answer.status == 201 and answer.headers["X-Back"] == "yes"
    assert read_rejections(registry) == []


@pytest.mark.usefixtures("proxy")
@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", "/", "/v1/fleet/../control/x"])
def test_proxy_other_paths_are_rejected(registry: FleetRegistry, path: str) -> None:
    for verb in ("POST", "GET"):
        with connect(registry) as connection:
            connection.request(verb, path, b"" if verb == "POST" else None, headers(registry))
            assert connection.getresponse().status == 403
    assert [code for code, _ in read_rejections(registry)] == [
        "NOT_FOR_DEVICES"
    ]  # twice within seconds is summary of once


@pytest.mark.usefixtures("proxy")
def test_proxy_unknown_or_missing_key_is_rejected(registry: FleetRegistry, tmp_path: Path) -> None:
    other = enroll_fleet(tmp_path / "other", registry.server, "a")
    for sent in (headers(other), {}, {"flwr-public-key": "%%%"}):
        with connect(registry) as connection:
            connection.request("POST", "/v1/fleet/activate-node", b"", sent)
            assert connection.getresponse().status == 403
    assert [code for code, _ in read_rejections(registry)] == ["UNREGISTERED"]


@pytest.mark.usefixtures("proxy")
def test_proxy_plaintext_is_rejected(registry: FleetRegistry) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", registry.port, timeout=10)
    with closing(connection), pytest.raises((http.client.HTTPException, OSError)):
        connection.request("POST", "/v1/fleet/pull-messages", b"", headers(registry))
        connection.getresponse()
    assert [code for code, _ in read_rejections(registry)] == ["PLAINTEXT"]


@pytest.mark.usefixtures("proxy")
def test_proxy_device_with_another_authority_is_logged(registry: FleetRegistry, tmp_path: Path) -> None:
    other = enroll_fleet(tmp_path / "other", registry.server, "a")
    with pytest.raises(ssl.SSLCertVerificationError), connect(registry, other.folder / "ca.crt") as connection:
        connection.request("POST", "/v1/fleet/pull-messages", b"", headers(registry))
    for _ in range(100):
        if read_rejections(registry):
            break
        threading.Event().wait(0.05)
    ((code, reason),) = read_rejections(registry)
    assert code == "TLS" and "unknown ca" in reason


@pytest.mark.usefixtures("proxy")
def test_proxy_echo_returns_the_body_up_to_a_limit(registry: FleetRegistry) -> None:
    with connect(registry) as connection:
        connection.request("POST", "/fedloom/echo", b"abc" * 1000)
        assert connection.getresponse().read() == b"abc" * 1000
    with connect(registry) as connection:
        connection.putrequest("POST", "/fedloom/echo")
        connection.putheader("Content-Length", str(MAX_ECHO + 1))
        connection.endheaders()
        assert connection.getresponse().status == 403


def test_proxy_unreachable_superlink_returns_503(registry: FleetRegistry) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        proxy = start_fleet_proxy(registry, silent.getsockname()[1])
        try:
            with connect(registry) as connection:
                connection.request("POST", "/v1/fleet/pull-messages", b"abc", headers(registry))
                assert connection.getresponse().status == 503
        finally:
            proxy.shutdown()
            proxy.server_close()
    assert read_rejections(registry) == []


@pytest.mark.usefixtures("proxy")
def test_proxy_missing_content_length_is_rejected(registry: FleetRegistry) -> None:
    with connect(registry) as connection:
        connection.putrequest("POST", "/v1/fleet/push-object")
        for name, value in headers(registry).items():
            connection.putheader(name, value)
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        assert connection.getresponse().status == 411


@pytest.mark.usefixtures("proxy")
def test_proxy_concurrent_requests_are_not_blocked_by_a_silent_one(registry: FleetRegistry) -> None:
    silent = socket.create_connection(("127.0.0.1", registry.port))
    statuses: list[int] = []

    def send_request() -> None:
        with connect(registry) as connection:
            connection.request("POST", "/v1/fleet/pull-messages", b"y" * 10_000, headers(registry, "b"))
            statuses.append(connection.getresponse().status)

    threads = [threading.Thread(target=send_request) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    silent.close()
    assert statuses == [201] * 8


@pytest.mark.usefixtures("proxy")
def test_check_server_same_version_changes_nothing(registry: FleetRegistry) -> None:
    folder = registry.folder / "devices" / "a"
    before = (folder / "ca.crt").read_bytes()
    assert check_server(read_bundle(folder)) is False
    assert (folder / "ca.crt").read_bytes() == before and read_rejections(registry) == []


@pytest.mark.usefixtures("proxy")
def test_check_server_other_version_is_refused_on_both_ends(
    registry: FleetRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device has an older version than the server, which runs in this process too."""
    body = {"name": "a", "fedloom": "0.1.9"}
    with connect(registry) as connection:
        connection.request("POST", proxies.HELLO, json.dumps(body), headers(registry))
        answer = json.loads(connection.getresponse().read())
    assert answer["fedloom"] == fedloom.__version__
    ((code, reason),) = read_rejections(registry)
    assert code == "VERSION" and "a: the device has fedloom 0.1.9, the server" in reason
    assert "a is refused: the device has fedloom 0.1.9" in caplog.text
    monkeypatch.setattr(versions, "VERSION", "0.1.9")
    with pytest.raises(RecipeError, match=r"VERSION: the device has fedloom 0\.1\.9, the server.*\n.*pip install"):
        check_server(read_bundle(registry.folder / "devices" / "a"))


@pytest.mark.usefixtures("proxy")
def test_check_server_renewed_authority_is_adopted(registry: FleetRegistry) -> None:
    """The device trusts the old certificate, which proves that the new one comes from its server."""
    folder = registry.folder / "devices" / "a"
    old = (folder / "ca.crt").read_bytes()
    renew(registry, 500, authority=True)  # the running proxy still has the old server certificate
    (folder / "ca.crt").write_bytes(old)
    assert check_server(read_bundle(folder)) is True
    assert (folder / "ca.crt").read_bytes() == (registry.folder / "ca.crt").read_bytes() != old


@pytest.mark.usefixtures("proxy")
def test_proxy_hello_without_a_registered_key_is_rejected(registry: FleetRegistry) -> None:
    for path, sent, status in ((proxies.HELLO, {}, 403), (proxies.HELLO, headers(registry), 200)):
        with connect(registry) as connection:
            connection.request("POST", path, b"no json", sent)
            assert connection.getresponse().status == status
    assert [code for code, _ in read_rejections(registry)] == ["UNREGISTERED", "VERSION"]


def test_check_server_unreachable_server_compares_with_the_enrollment(
    registry: FleetRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    folder = registry.folder / "devices" / "a"
    bundle = read_bundle(folder)
    assert bundle.fedloom == fedloom.__version__
    assert check_server(bundle) is False and not caplog.records
    (folder / "device.json").write_text((folder / "device.json").read_text().replace(bundle.fedloom, "0.1.0"))
    assert check_server(read_bundle(folder)) is False
    assert "when a was enrolled: the device has fedloom" in caplog.text


@pytest.mark.usefixtures("proxy")
def test_check_server_certificate_that_ends_soon_is_named(
    registry: FleetRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "WARN_SECONDS", 400 * device.DAY)
    check_server(read_bundle(registry.folder / "devices" / "a"))
    assert "the server's certificate ends in 364 days" in caplog.text
