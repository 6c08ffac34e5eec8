"""A server whose every answer is scripted, in a process of its own, on asyncio's streams.

    python fake_server.py '[{"ttft": 0.05, "gaps": [0.01, 0.01]}, {"status": 429}]' [CERTIFICATE or -] [PORT]

It prints its port, answers the n-th completion by the n-th script (from the start again after the last), and notes
when it received each request and sent each token, on time.perf_counter's clock, which all processes of a machine share:
GET /log; POST /scripts begins anew with other scripts. /health and /v1/models are those of an OpenAI-compatible server.

A script (all keys optional): ttft and gaps, seconds before the first and each later token; status with a JSON error
body; framing "chunked", "close" or "length"; usage, the completion tokens it claims (null: no usage); cut, tokens after
which the connection is dropped; done, whether [DONE] comes; error, an event with an error instead of a finish; finish,
the finish_reason; newline, of events; comments between events; piece, bytes per write (events are cut anywhere); merge,
tokens per write; keep_alive; close_idle, drop the connection after the answer without saying so; drop_reused (of the
first script), drop a connection that brings a second request; not_stream, a JSON body instead of a stream; empty_first,
an event without text before the first token, at once.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

MODEL = "fake"
Script = dict[str, Any]


class FakeServer:
    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts
        self.log: list[dict[str, Any]] = []
        self.num_connections = 0

    async def serve(self, certificate: str = "-", port: str = "0") -> None:
        tls = None
        if certificate != "-":
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(certificate)
        server = await asyncio.start_server(self.connection, "127.0.0.1", int(port), backlog=4096, ssl=tls)
        print(server.sockets[0].getsockname()[1], flush=True)
        async with server:
            await server.serve_forever()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        num_requests = 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lower = head.lower()
                length = int(lower.split("content-length:")[1].split("\r")[0]) if "content-length:" in lower else 0
                body = await reader.readexactly(length)
                received = time.perf_counter()
                num_requests += 1
                if num_requests > 1 and self.scripts and self.scripts[0].get("drop_reused"):
                    break
                if not await self.answer(writer, head, body, received) or "connection: close" in lower:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter, head: str, body: bytes, received: float) -> bool:
        """Whether the connection stays."""
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            await self.get(writer, path)
            return True
        if path == "/scripts":
            self.scripts, self.log = json.loads(body), []
            writer.write(plain(200, b"{}"))
            await writer.drain()
            return True
        script = self.scripts[len(self.log) % len(self.scripts)]
        asked = json.loads(body)
        entry: dict[str, Any] = {"received": received, "body": asked, "head": head, "sent": []}
        self.log.append(entry)
        if script.get("status", 200) != 200 or script.get("not_stream"):
            content = json.dumps(
                {"error": {"message": script.get("message", "scripted"), "code": script.get("status")}}
            )
            writer.write(plain(script.get("status", 200), content.encode()))
            await writer.drain()
            return True
        return await Answer(script, writer, entry, is_chat="/chat/" in path).send()

    async def get(self, writer: asyncio.StreamWriter, path: str) -> None:
        found: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]},
            "/log": {"requests": self.log, "num_connections": self.num_connections},
        }
        known = path in found
        writer.write(plain(200 if known else 404, json.dumps(found.get(path)).encode()))
        await writer.drain()


def plain(status: int, content: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


class Answer:
    """One scripted stream."""

    def __init__(self, script: Script, writer: asyncio.StreamWriter, entry: dict[str, Any], is_chat: bool) -> None:
        self.script = script
        self.writer = writer
        self.entry = entry
        self.is_chat = is_chat
        self.framing = script.get("framing", "chunked")
        self.newline = script.get("newline", "\n")
        self.pending = b""

    async def send(self) -> bool:
        script, gaps = self.script, self.script.get("gaps", [])
        num_tokens, moment = len(gaps) + 1, self.entry["received"]
        merge = script.get("merge", 1)
        await self.write(self.head(num_tokens))
        if script.get("empty_first"):
            await self.write(self.framed(self.event({"role": "assistant", "content": ""})))
        for i, gap in enumerate([script.get("ttft", 0.0), *gaps]):
            if i == script.get("cut"):
                self.writer.transport.abort()
                return False
            moment += gap
            await asyncio.sleep(max(0.0, moment - time.perf_counter()))
            finish = script.get("finish", "length") if i == num_tokens - 1 else None
            self.pending += self.token(i, None if "error" in script else finish)
            if (i + 1) % merge == 0 or i == num_tokens - 1:
                if i == num_tokens - 1:
                    self.pending += self.framed(self.tail(num_tokens)) + self.end()
                data, self.pending = self.pending, b""
                self.entry["sent"].append(time.perf_counter())
                await self.write(data)
        if script.get("close_idle"):
            self.writer.transport.abort()
        return bool(script.get("keep_alive", True)) and self.framing != "close" and not script.get("close_idle")

    def token(self, index: int, finish: str | None) -> bytes:
        text = f"t{index} "
        comments = f": keep-alive{self.newline}{self.newline}" if self.script.get("comments") else ""
        return self.framed(comments + self.event({"content": text}, text, finish))

    def event(self, delta: dict[str, Any], text: str = "", finish: str | None = None) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": delta} if self.is_chat else {"text": text}
        return f"data: {json.dumps({'choices': [choice]})}{self.newline}{self.newline}"

    def tail(self, num_tokens: int) -> str:
        parts = []
        usage = self.script.get("usage", num_tokens)
        if "error" in self.script:
            parts.append(json.dumps({"error": {"message": self.script["error"]}}))
        elif usage is not None:
            counts = {"prompt_tokens": 7, "completion_tokens": usage, "total_tokens": 7 + usage}
            parts.append(json.dumps({"choices": [], "usage": counts}))
        if self.script.get("done", True):
            parts.append("[DONE]")
        return "".join(f"data: {part}{self.newline}{self.newline}" for part in parts)

    def head(self, num_tokens: int) -> bytes:
        lines = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream; charset=utf-8"]
        if self.framing == "chunked":
            lines.append("Transfer-Encoding: chunked")
        elif self.framing == "length":
            last = num_tokens - 1
            finish = self.script.get("finish", "length")
            size = sum(len(self.token(i, finish if i == last else None)) for i in range(num_tokens))
            lines.append(f"Content-Length: {size + len(self.tail(num_tokens))}")
        if not self.script.get("keep_alive", True) or self.framing == "close":
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def framed(self, text: str) -> bytes:
        data = text.encode()
        return b"%x\r\n%s\r\n" % (len(data), data) if self.framing == "chunked" and data else data

    def end(self) -> bytes:
        return b"0\r\n\r\n" if self.framing == "chunked" else b""

    async def write(self, data: bytes) -> None:
        piece = self.script.get("piece") or len(data)
        for start in range(0, len(data), piece):
            self.writer.write(data[start : start + piece])
            await self.writer.drain()
            if piece < len(data):
                await asyncio.sleep(0)


# -- from a test


class Running:
    """A fake server that has been started."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def log(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.base_url}/log") as response:
            found: dict[str, Any] = json.load(response)
        return found

    def play(self, scripts: Sequence[Script]) -> None:
        """Begin anew with these scripts."""
        request = urllib.request.Request(f"{self.base_url}/scripts", json.dumps(scripts).encode())
        urllib.request.urlopen(request).close()


@contextmanager
def fake_server(*scripts: Script, certificate: str | None = None) -> Iterator[Running]:
    """A server with these scripts: the one of this process, begun anew, or with a certificate one of its own.

    certificate: a PEM file with key and certificate, for https.
    """
    if certificate is None:
        running = shared_server()
        running.play(scripts)
        yield running
        return
    with start(json.dumps(scripts), certificate) as process:
        try:
            yield Running(f"https://127.0.0.1:{read_port(process)}")
        finally:
            process.kill()


@cache
def shared_server() -> Running:
    process = start("[]")
    atexit.register(process.communicate)
    atexit.register(process.kill)
    return Running(f"http://127.0.0.1:{read_port(process)}")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(Path(__file__)), *arguments], stdout=subprocess.PIPE, text=True)


def read_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


if __name__ == "__main__":
    asyncio.run(FakeServer(json.loads(sys.argv[1])).serve(*sys.argv[2:]))
