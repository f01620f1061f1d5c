"""The live page: served on loopback only, changed in place, and nothing else."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from fedloom.reporting.live import LiveServer
from fedloom.reporting.page import Page


@pytest.fixture
def server() -> Iterator[LiveServer]:
    served = LiveServer()
    served.show(Page("<p>one</p>", {"a.csv": "x\n1\n"}))
    yield served
    served.close()


def ask(server: LiveServer, path: str = "", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    request = urllib.request.Request(
        server.address + path, headers={key.replace("_", "-"): v for key, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", error.headers


def test_live_server_is_on_loopback_only(server: LiveServer) -> None:
    assert urlsplit(server.address).hostname == "127.0.0.1"
    assert server._server.server_address[0] == "127.0.0.1"


def test_live_server_shows_the_newest_page(server: LiveServer) -> None:
    status, text, headers = ask(server)
    assert (status, text) == (200, "<p>one</p>")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    server.show(Page("<p>two</p>", {}))
    assert ask(server)[1] == "<p>two</p>"


def test_live_server_unchanged_page_is_not_sent_again(server: LiveServer) -> None:
    tag = ask(server)[2]["ETag"]
    assert ask(server, If_None_Match=tag)[0] == 304
    server.show(Page("<p>two</p>", {}))
    assert ask(server, If_None_Match=tag)[0] == 200


@pytest.mark.parametrize(("path", "status"), [("figures/a.csv", 200), ("figures/b.csv", 404), ("../etc/passwd", 404)])
def test_live_server_serves_only_the_page_and_its_csvs(server: LiveServer, path: str, status: int) -> None:
    assert ask(server, path)[0] == status


def test_live_server_refuses_other_names_for_its_address(server: LiveServer) -> None:
    assert ask(server, Host="evil.example")[0] == 403


def test_live_server_knows_whether_the_page_was_seen(server: LiveServer) -> None:
    assert not server.wait_until_seen(0.01)
    ask(server, "figures/a.csv")
    assert not server.wait_until_seen(0.01)
    ask(server)
    assert server.wait_until_seen(1)
    server.show(Page("<p>two</p>", {}))
    assert not server.wait_until_seen(0.01)
