"""ServerConfig: how the HTTP server listens, whom it lets in and what it refuses. Flag names follow vLLM."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_engine.errors import ConfigError
from lean_engine.text.reasoning import REASONING_PARSERS
from lean_engine.text.tool_calls import check_tool_call_parser

GENERATION_CONFIGS = ("auto", "vllm")
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of `lean-engine serve` beside the engine's."""

    host: str = "0.0.0.0"
    port: int = 8000  # 0 = any free one
    uds: str | None = None  # path of a Unix socket, instead of host and port
    root_path: str = ""  # where a proxy mounts the server
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # of clients: 0 = none, 1 = optional, 2 = required
    api_key: tuple[str, ...] = ()  # any of them opens everything; () = open to all
    allowed_origins: tuple[str, ...] = ("*",)  # CORS, as the next three
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    served_model_name: tuple[str, ...] = ()  # the first is named in responses; () = the model as it was given
    generation_config: str = "auto"  # sampling defaults: the model's generation_config.json, or "vllm": none
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)  # sampling defaults over those
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    enable_auto_tool_choice: bool = True  # False: tools only with tool_choice "required" or a name
    tool_call_parser: str | None = None  # None = what the chat template shows
    reasoning_parser: str | None = None  # None = no answer is divided
    return_tokens_as_token_ids: bool = False  # in log-probabilities: "token_id:123" instead of the token's text
    stream_interval: int = 1  # tokens per streamed event
    max_queued_requests: int | None = None  # answers that wait; what comes then is refused with 429
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    request_timeout: float = 0.0  # seconds from a request to the end of its answer; 0 = none
    client_timeout: float = 60.0  # seconds for a client to send a header, a body, or to take what it is sent
    watchdog_timeout: float = 300.0  # seconds without a completed step after which /health says 503
    shutdown_timeout: float = 25.0  # seconds that open requests have after SIGTERM
    disable_ui: bool = False  # no page at /
    disable_access_log: bool = False
    disable_log_stats: bool = False

    def __post_init__(self) -> None:
        self._number("port", 0, MAX_PORT)
        self._number("ssl_cert_reqs", 0, 2)
        self._number("stream_interval", 1)
        self._number("max_body_bytes", 1)
        self._number("max_header_bytes", 1024)
        if self.max_queued_requests is not None:
            self._number("max_queued_requests", 0)
        for name in ("request_timeout", "shutdown_timeout"):
            self._number(name, 0)
        for name in ("client_timeout", "watchdog_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be above 0 seconds")
        if self.generation_config not in GENERATION_CONFIGS:
            raise ConfigError(
                f"generation_config is {self.generation_config!r}, must be one of: {', '.join(GENERATION_CONFIGS)}"
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path is {self.root_path!r}, must begin with / and not end with it")
        for name in ("api_key", "served_model_name"):
            if "" in getattr(self, name):
                raise ConfigError(f"{name} holds an empty string")
        check_tool_call_parser(self.tool_call_parser)
        if self.reasoning_parser is not None and self.reasoning_parser not in REASONING_PARSERS:
            known = ", ".join(REASONING_PARSERS)
            raise ConfigError(f"reasoning_parser is {self.reasoning_parser!r}, must be one of: {known}")
        self._check_tls()

    def _number(self, name: str, low: float, high: float | None = None) -> None:
        value = getattr(self, name)
        expected = f"at least {low}" if high is None else f"from {low} to {high}"
        if not low <= value < float("inf") or (high is not None and value > high):
            raise ConfigError(f"{name} is {value!r}, must be {expected}")

    def _check_tls(self) -> None:
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} is given without ssl_certfile; TLS needs a certificate")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"ssl_cert_reqs is {self.ssl_cert_reqs}, which needs ssl_ca_certs to check clients with")
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name} is {path!r}, which is no file")

    def check_tls_files(self) -> None:
        """ConfigError where a file does not hold what it should."""
        if self.ssl_certfile is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ssl_certfile {self.ssl_certfile}: TLS cannot be set up: {error}") from None
