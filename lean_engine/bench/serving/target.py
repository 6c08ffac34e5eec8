"""The server under load: its address, the requests' bytes, and what it says about itself."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from lean_engine import __version__
from lean_engine.bench.serving.connection import Address, describe
from lean_engine.bench.serving.http import ProtocolError, ResponseParser
from lean_engine.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BACKENDS = {"openai": COMPLETIONS, "vllm": COMPLETIONS, "openai-chat": CHAT}  # vLLM's names → the endpoint
GET_TIMEOUT = 10.0  # seconds
Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or the messages of a chat
Headers = Mapping[str, str]


class ServerError(Exception):
    """The server cannot be reached, or its answer cannot be used."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what all of them carry."""

    base_url: str  # http://host:port, without a / at the end
    endpoint: str  # path
    model: str  # as the server calls it
    headers: Headers = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # fields of every request, over all others
    ignore_eos: bool = False
    checks_certificate: bool = True

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    @property
    def address(self) -> Address:
        return address_of(self.base_url, self.checks_certificate)

    def request(self, prompt: Prompt, max_tokens: int, **more: Any) -> bytes:
        """A streaming completion, head and body. more: further fields of the body."""
        body: dict[str, Any] = {"model": self.model}
        if not self.is_chat:
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body |= {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return post(self.base_url, self.endpoint, self.headers, {**body, **more, **self.extra_body})


def make_target(backend: str, base_url: str, endpoint: str | None, model: str, **more: Any) -> Target:
    """A target of one of the BACKENDS; more: fields of Target.

    Raises:
        ConfigError: the backend does not speak this endpoint, or the address is none.
    """
    check_url(base_url)
    path = BACKENDS[backend] if endpoint is None else endpoint
    kind = "/chat/completions" if BACKENDS[backend] == CHAT else "/completions"
    if not path.startswith("/") or not path.endswith(kind) or (kind == "/completions" and path.endswith(CHAT)):
        raise ConfigError(f"endpoint is {path!r}; of the backend {backend} it must end in {BACKENDS[backend]}")
    return Target(base_url.rstrip("/"), path, model, **more)


def check_url(url: str) -> SplitResult:
    """Its parts.

    Raises:
        ConfigError: it is not http://HOST[:PORT] or https://….
    """
    parts = urlsplit(url)
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 80) > 0
    except ValueError:  # a port that is no number
        is_good = False
    if not is_good or parts.query or parts.fragment:
        raise ConfigError(f"base URL is {url!r}, must be like http://127.0.0.1:8000")
    return parts


def address_of(base_url: str, checks_certificate: bool = True) -> Address:
    parts = check_url(base_url)
    assert parts.hostname is not None
    if parts.scheme == "http":
        return Address(parts.hostname, parts.port or 80)
    context = ssl.create_default_context()
    if not checks_certificate:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return Address(parts.hostname, parts.port or 443, context)


def post(base_url: str, path: str, headers: Headers, body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body, separators=(",", ":")).encode()
    kind = {"Content-Type": "application/json", "Content-Length": str(len(content)), "Accept": "text/event-stream"}
    return head("POST", base_url, path, {**kind, **headers}) + content


def head(method: str, base_url: str, path: str, headers: Headers) -> bytes:
    parts = urlsplit(base_url)
    lines = [f"{method} {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
    agent = {"User-Agent": f"lean-engine/{__version__}"}
    lines += [f"{name}: {value}" for name, value in {**agent, **headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


# -- what a server says about itself


async def fetch(base_url: str, path: str, headers: Headers, checks_certificate: bool = True) -> tuple[int, bytes]:
    """GET a small resource over a connection of its own: status and body.

    Raises:
        ServerError: there was no answer; names the address.
    """
    address = address_of(base_url, checks_certificate)
    parser, body = ResponseParser(), b""
    try:
        async with asyncio.timeout(GET_TIMEOUT):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.tls)
            try:
                writer.write(head("GET", base_url, path, {"Connection": "close", **headers}))
                while not parser.is_complete:
                    data = await reader.read(65536)
                    if not data:
                        break
                    body += parser.feed(data)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ProtocolError) as error:
        raise ServerError(f"no server at {base_url}: {describe(error)}") from None
    if not parser.close():
        raise ServerError(f"{base_url}{path}: the answer was cut")
    return parser.status, body


async def first_model(base_url: str, headers: Headers, checks_certificate: bool = True) -> tuple[str, str]:
    """The name of the first model that the server lists, and what it was loaded from (the name, if it does not say).

    Raises:
        ServerError: it lists none.
    """
    status, body = await fetch(base_url, "/v1/models", headers, checks_certificate)
    if status != 200:
        raise ServerError(f"{base_url}/v1/models: HTTP {status}; give --model")
    try:
        entry = json.loads(body)["data"][0]
        return str(entry["id"]), str(entry.get("root") or entry["id"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ServerError(f"{base_url}/v1/models lists no model; give --model") from None
