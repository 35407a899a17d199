"""Limits for connections, with uvicorn and a small application."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from finetune.web import connections
from finetune.web.connections import ConnectionLimits, limit_log_rate

uvicorn = pytest.importorskip("uvicorn", reason="Gradio is not installed: pip install '.[demo]'")

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer 200 after the body has arrived."""
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server with at most four connections."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.1)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(answer, log_level="warning", lifespan="off")
    config.load()
    config.http_protocol_class = ConnectionLimits(config.http_protocol_class)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()
    server.should_exit = server.force_exit = True
    thread.join()


def connect(address: tuple[str, int], content: bytes) -> socket.socket:
    client = socket.create_connection(address, timeout=5)
    client.sendall(content)
    time.sleep(0.05)  # so that the connections have an order
    return client


def is_closed(client: socket.socket) -> bool:
    """True if the server closes the connection within a moment."""
    client.settimeout(0.2)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_the_longest_waiting_connection_makes_room(address: tuple[str, int]) -> None:
    body = connect(address, HEAD + b"1")
    heads = [connect(address, b"POST / HT") for _ in range(3)]
    honest = connect(address, HEAD + b"12")
    assert honest.recv(12) == b"HTTP/1.1 200"
    assert [is_closed(client) for client in (body, *heads)] == [False, True, False, False]
    for client in (body, *heads, honest):
        client.close()


def test_slow_requests_are_closed(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.0)
    head, body = connect(address, b"POST / HT"), connect(address, HEAD + b"1")
    time.sleep(0.3)
    assert [is_closed(client) for client in (head, body)] == [True, False]
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.0)
    time.sleep(0.3)
    assert is_closed(body)
    for client in (head, body):
        client.close()


def test_log_lines_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    with limit_log_rate():
        for number in range(1000):
            logging.getLogger("asyncio").error("socket.accept() %d", number)
    assert 1 <= len(caplog.records) <= 100
