"""An OpenAI-compatible server for tests: it answers well, or in one of the bad ways that servers have."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STALL_S = 1.5


@dataclass
class Seen:
    """What a server was asked. `wishes` are the words before the colon in the last user turns or raw prompts."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    keys: set[str | None] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    delay_s: float = 0.0


def reply(text: str, **changes: Any) -> dict[str, Any]:
    """A completion as servers send it."""
    message = {"role": "assistant", "content": text} | changes.pop("message", {})
    choice = {"index": 0, "message": message, "text": text, "finish_reason": "stop"} | changes
    return {"id": "x", "choices": [choice], "usage": {"completion_tokens": 3}}


# A wish says how the server behaves; `wish` and `wish2` do so on the first attempt or the first two, `wish!` always.
GARBAGE: dict[str, bytes] = {
    "nojson": b"<html>busy</html>",
    "empty": b"",
    "half": b'{"choices": [{"message": {"cont',
    "object": b"{}",
    "list": b"[1, 2]",
    "nochoice": b'{"choices": []}',
    "null": json.dumps(reply("", message={"content": None})).encode(),
    "number": json.dumps(reply("", message={"content": 7})).encode(),
    "blank": json.dumps(reply(" \n")).encode(),
    "nofinish": json.dumps(reply("good", finish_reason=None)).encode(),
    "latin": b'{"choices": "\xe9\xff"}',
    "deep": b"[" * 100_000,
}


class Handler(BaseHTTPRequestHandler):
    seen: Seen
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *given: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "test-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        with self.seen.lock:
            self.seen.bodies.append(body)
            self.seen.attempts[asked] += 1
            self.seen.keys.add(self.headers.get("Authorization"))
            attempt = self.seen.attempts[asked]
        time.sleep(self.seen.delay_s)
        wish = asked.partition(":")[0]
        lasts = 10**9 if wish.endswith("!") else int(wish[-1]) if wish[-1:].isdigit() else 1
        if attempt <= lasts and self._misbehave(wish.rstrip("!0123456789")):
            return
        self._send(200, json.dumps(reply(f"good {len(body.get('messages', ()))} {asked}")).encode())

    def _misbehave(self, wish: str) -> bool:
        """Whether this was a way to misbehave."""
        if wish in GARBAGE:
            self._send(200, GARBAGE[wish])
        elif wish in STATUS:
            self._send(STATUS[wish], f"refused: your key is {self.headers.get('Authorization')}".encode())
        elif wish == "stall":
            time.sleep(STALL_S)
            self.close_connection = True
        elif wish == "drip":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(int(2 * STALL_S / 0.1)):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)
            self.close_connection = True
        elif wish == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices"')
            self.close_connection = True
        elif wish == "length":
            self._send(200, json.dumps(reply("half an ans", finish_reason="length")).encode())
        else:
            return False
        return True

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


STATUS = {"crash": 500, "busy": 429, "gateway": 502, "toolong": 400, "nokey": 401, "nomodel": 404}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def serving() -> Iterator[tuple[str, Seen]]:
    """A server on a free port: its URL and what it has seen."""
    seen = Seen()
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
