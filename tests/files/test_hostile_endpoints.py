"""Addresses of served models that answer as they should not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest


@contextmanager
def server(reply: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[dict]]]:
    """An HTTP server on this machine, and the headers of what it was asked."""
    request_headers: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request_headers.append(dict(self.headers))
            reply(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(HTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # a client that has read enough hangs up

    served = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{served.server_port}/v1", request_headers
    finally:
        served.shutdown()
        served.server_close()


def answer(body: bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


class TestAnEndpoint:
    def evaluate(self, mpu: Callable, root: Path, url: str):
        return mpu("eval", "base", "--benchmark", "qa", "--forget", "forget.jsonl", "--endpoint", url, check=False,
                   cwd=root)  # fmt: skip

    def test_its_key_goes_nowhere_else(self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not the key of another service, not over http to another machine, not on to where it redirects."""
        monkeypatch.setenv("OPENAI_API_KEY", "of another service")
        with (
            server(answer(b"{}")) as (other, other_headers),
            server(answer(b"", 302, Location=f"{other}/x")) as (url, headers),
        ):
            result = self.evaluate(mpu, root, url)
            assert result.is_one_error
            assert "redirects to" in result.err
            assert "Authorization" not in headers[0]
            monkeypatch.setenv("MPU_ENDPOINT_KEY", "secret")
            self.evaluate(mpu, root, url)
            assert headers[-1]["Authorization"] == "Bearer secret"
            assert other_headers == []
        result = self.evaluate(mpu, root, "http://192.0.2.1/v1")
        assert "is not sent over http" in result.err

    @pytest.mark.parametrize(
        ("first", "drip"),
        [
            (b"", b"H"),
            (b"HTTP/1.1 200 OK\r\n", b"X"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
            (b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\n", b"x"),
            (b"HTTP/1.1 302 No\r\nContent-Length: 100000\r\n\r\n", b"x"),
        ],
        ids=["status", "headers", "body", "chunks", "refusal", "redirect"],
    )
    def test_the_limit_of_a_request_is_for_all_of_it(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch, first: bytes, drip: bytes
    ) -> None:
        """However slowly the server sends whichever part: here a few bytes each 0.2 s, where a second is allowed."""
        monkeypatch.setattr("mpu_cli.lab.endpoint.REQUEST_SECONDS", 1.0)
        ended = threading.Event()

        def reply(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(first)
            while not ended.wait(0.2):
                handler.wfile.write(drip)

        with server(reply) as (url, _):
            started = time.monotonic()
            result = self.evaluate(mpu, root, url)
            seconds = time.monotonic() - started
            ended.set()
        assert result.is_one_error
        assert "no complete reply within 1 s" in result.err
        assert seconds < 10

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "body",
        [
            b"[]", b"null", b'{"data": 1}', b'{"data": [{"id": "m"}], "choices": [{"index": "x"}]}', b"\xff\xfe",
            b'{"data": [{"id": "m"}], "choices": 3}', b"[" * 100_000, b" " * (8 << 20),
            b'{"data": [{"id": "m"}], "choices": [' + b",".join([b'{"logprobs": {"token_logprobs": {}}}'] * 6) + b"]}",
            b'{"data": [{"id": "m"}], "choices": [' + b",".join([b'{"logprobs": []}'] * 6) + b"]}",
            b'{"data": [{"id": "m"}], "choices": [' + b",".join([b"null"] * 6) + b"]}",
        ],
        ids=range(11),
    )  # fmt: skip
    def test_malformed_replies_are_one_error(self, mpu: Callable, root: Path, body: bytes) -> None:
        with server(answer(body)) as (url, _):
            result = self.evaluate(mpu, root, url)
        assert result.status == 1
        assert result.is_one_error, result.err
        assert "unexpected" not in result.err
