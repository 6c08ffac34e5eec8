"""`lean-engine serve`: the HTTP server.

Every flag can also come from an environment variable (LEAN_ENGINE_ and its name in capitals) and from a YAML file; the
command line goes before the environment, and that before the file.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from lean_engine.checkpoint import DEFAULT_MODEL
from lean_engine.cli.config_file import (
    ENVIRONMENT,
    JsonType,
    PortType,
    check_environment,
    read_config,
    refuse_two_addresses,
    unknown_variables,
)
from lean_engine.cli.options import RUNNING, Command, Decorator, Option, engine_options, flag, gather, size
from lean_engine.cli.terminal import progress_bar
from lean_engine.config import EngineConfig
from lean_engine.server.config import ServerConfig

if TYPE_CHECKING:
    from lean_engine.llm import LLM

EXAMPLES = (
    "lean-engine serve",
    "lean-engine serve Qwen/Qwen3-0.6B --port 8080 --max-model-len 8K --served-model-name qwen",
    "LEAN_ENGINE_API_KEY=secret lean-engine serve --config serve.yaml",
)
log = logging.getLogger("lean_engine")
Names = tuple[str, ...]  # the type of a flag that may be repeated


JSON_LIST = JsonType(list, "list of strings")
JSON_OBJECT = JsonType(dict, "object")

SERVER_FLAGS: dict[str, tuple[Any, str, str]] = {  # field of ServerConfig → type, section of the help, help
    "host": (str, "Listening", "Address to listen on; 127.0.0.1 admits this machine only."),
    "port": (PortType(), "Listening", "Port to listen on; 0 = any free one, which is printed."),
    "uds": (str, "Listening", "Path of a Unix socket to listen on instead of host and port. Default: none."),
    "root_path": (str, "Listening", "Path under which a proxy mounts the server, such as /llm. Default: none."),
    "ssl_keyfile": (
        str,
        "Listening",
        "TLS: file of the private key, where it is not in the certificate's. Default: none.",
    ),
    "ssl_certfile": (str, "Listening", "TLS: file of the certificate chain; turns on HTTPS. Default: none."),
    "ssl_ca_certs": (
        str,
        "Listening",
        "TLS: file of the authorities that clients' certificates are checked with. Default: none.",
    ),
    "ssl_cert_reqs": (int, "Listening", "TLS: certificates of clients: 0 = none, 1 = optional, 2 = required."),
    "api_key": (Names, "Access", "Key for all but /health and the bare page; may be repeated. Default: open to all."),
    "allowed_origins": (JSON_LIST, "Access", "CORS: origins, as a JSON list. Default: all."),
    "allowed_methods": (JSON_LIST, "Access", "CORS: methods, as a JSON list. Default: all."),
    "allowed_headers": (JSON_LIST, "Access", "CORS: headers, as a JSON list. Default: all."),
    "allow_credentials": (bool, "Access", "CORS: let browsers send credentials."),
    "trust_request_chat_template": (bool, "Access", "Run chat templates that requests bring."),
    "served_model_name": (Names, "Requests", "Name of the model in the API; may be repeated. Default: MODEL."),
    "generation_config": (
        str,
        "Requests",
        "Sampling defaults: auto = the model's generation_config.json, vllm = none.",
    ),
    "override_generation_config": (
        JSON_OBJECT,
        "Requests",
        "Sampling defaults over those, as a JSON object. Default: none.",
    ),
    "default_chat_template_kwargs": (
        JSON_OBJECT,
        "Requests",
        "Variables of chat templates, as a JSON object. Default: none.",
    ),
    "enable_auto_tool_choice": (bool, "Requests", "Let the model choose whether it calls tools. Default: on."),
    "tool_call_parser": (str, "Requests", "Form of tool calls: hermes, llama3_json. Default: the chat template's."),
    "reasoning_parser": (str, "Requests", "Form of reasoning apart from answers: qwen3, deepseek_r1. Default: none."),
    "return_tokens_as_token_ids": (bool, "Requests", "Name tokens as token_id:123 in log-probabilities."),
    "stream_interval": (int, "Requests", "Tokens per streamed event."),
    "max_queued_requests": (
        int,
        "Limits",
        "Answers that may wait; more are refused with 429. Default: any number.",
    ),
    "max_body_bytes": (size, "Limits", "Size of a request's body at most, such as 16MiB."),
    "max_header_bytes": (size, "Limits", "Size of a request's header at most."),
    "request_timeout": (float, "Limits", "Seconds from a request to the end of its answer; 0 = no bound."),
    "client_timeout": (
        float,
        "Limits",
        "Seconds for a client to send a header, to send a body, and to take what waits for it.",
    ),
    "watchdog_timeout": (float, "Limits", "Seconds without a completed step after which /health says 503."),
    "shutdown_timeout": (float, "Limits", "Seconds that open requests have to finish after SIGTERM or Ctrl-C."),
    "disable_ui": (bool, "Access", "No page at / and nothing of what it asks for."),
    "disable_access_log": (bool, "Logging", "No line per request on stderr."),
    "disable_log_stats": (bool, "Logging", "No line about the engine every ten seconds on stderr."),
}
ENGINE = (*RUNNING, "scheduling_policy", "max_logprobs", "seed", "chat_template")


def server_options(function: Any) -> Any:
    """The flags of ServerConfig; the command gets them as one mapping, `server`."""
    return gather("server", tuple(SERVER_FLAGS), [server_option(name) for name in SERVER_FLAGS])(function)


def server_option(name: str) -> Decorator:
    kind, section, text = SERVER_FLAGS[name]
    default = getattr(ServerConfig(), name)
    settings: dict[str, Any] = {"default": default, "help": text, "cls": Option, "section": section}
    if kind is bool:
        settings["is_flag"] = True
    elif kind is Names:
        settings |= {"multiple": True, "default": None}
    else:
        settings |= {"type": kind, "show_default": default not in (None, "", {}) and kind is not JSON_LIST}
    return click.option(flag(name, has_negative=default is True), name, **settings)


@click.command("serve", cls=Command, examples=EXAMPLES, context_settings={"auto_envvar_prefix": ENVIRONMENT})
@click.argument("model", required=False, envvar=f"{ENVIRONMENT}_MODEL")
@click.option(
    "--config",
    is_eager=True,
    expose_value=False,
    callback=read_config,
    cls=Option,
    section="Other",
    help="A YAML file of flags: keys without their dashes, and model. Default: none.",
)
@server_options
@engine_options(*ENGINE)
def command(model: str | None, server: dict[str, Any], engine: dict[str, Any]) -> int:
    """Serve a model over HTTP, with OpenAI's API.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /version, /metrics,
    /reset_prefix_cache, and /openapi.json, which describes them. The URL is printed when the server is ready.

    SIGTERM or Ctrl-C lets open requests finish; a second Ctrl-C ends at once. Every flag is also an environment
    variable, LEAN_ENGINE_ and its name in capitals (LEAN_ENGINE_PORT), and a key of --config. The command line goes
    before the environment, and that before the file.
    """
    check_environment(os.environ)
    refuse_two_addresses(click.get_current_context())
    config = ServerConfig(**server_values(server))
    EngineConfig.from_options(engine)  # refuses a bad value before a port is taken
    set_up_logging()
    for line in unknown_variables(os.environ, ("config", "model", *server, *engine)):
        log.warning("%s", line)
    from lean_engine.server.run import HttpServer, raise_file_limit

    raise_file_limit()
    http = HttpServer(lambda: load(model, engine), config, lambda url: announce(http, url))
    code = http.serve()
    if not http.has_ended:  # the engine's thread loads or hangs, and would keep the process
        sys.stdout.flush()
        os._exit(code)
    return code


def server_values(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def load(model: str | None, engine: Mapping[str, Any]) -> LLM:
    from lean_engine.llm import LLM

    shows_downloads = sys.stderr.isatty() or model in (None, DEFAULT_MODEL)
    with progress_bar("loading") as on_load:
        return LLM(model, on_load=on_load, show_downloads=shows_downloads, **engine)


def announce(http: Any, url: str) -> None:
    """Say that requests are served, and where."""
    names = ", ".join(http.service.model.names)
    click.echo(f"{names} is served at {url}")
    if (
        not http.config.api_key
        and http.config.uds is None
        and http.config.host not in ("127.0.0.1", "::1", "localhost")
    ):
        log.warning(
            "whoever reaches %s:%s may use it; --api-key or --host 127.0.0.1 restricts that",
            http.config.host,
            url.rpartition(":")[2],
        )


def set_up_logging() -> None:
    """Everything goes to stderr; the access log as it is, one JSON object per line."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("lean_engine").setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    access = logging.getLogger("lean_engine.access")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)
    access.propagate = False
