"""`lean-engine serve`: the HTTP server.

Every flag can also come from an environment variable (LEAN_ENGINE_ and its name in capitals) and from a YAML file; the
command line goes before the environment, and that before the file.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lean_engine.checkpoint import DEFAULT_MODEL
from lean_engine.cli.options import RUNNING, Command, Decorator, Option, engine_options, flag, gather, size
from lean_engine.cli.terminal import progress_bar
from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError
from lean_engine.server.config import ServerConfig

if TYPE_CHECKING:
    from lean_engine.llm import LLM

EXAMPLES = (
    "lean-engine serve",
    "lean-engine serve Qwen/Qwen3-0.6B --port 8080 --max-model-len 8K --served-model-name qwen",
    "LEAN_ENGINE_API_KEY=secret lean-engine serve --config serve.yaml",
)
ENVIRONMENT = "LEAN_ENGINE"
Names = tuple[str, ...]  # the type of a flag that may be repeated


class JsonType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no type argument
    """A JSON value of one kind; a configuration file gives it as it is."""

    def __init__(self, kind: type[list[Any]] | type[dict[str, Any]], name: str) -> None:
        self.kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                self.fail(f"{value!r} is not JSON", param, ctx)
        if isinstance(value, tuple):  # the default
            return value
        is_right = isinstance(value, self.kind) and (self.kind is dict or all(isinstance(v, str) for v in value))
        if not is_right:
            self.fail(f"{value!r} is not a JSON {self.name}", param, ctx)
        return tuple(value) if self.kind is list else value


JSON_LIST = JsonType(list, "list of strings")
JSON_OBJECT = JsonType(dict, "object")

SERVER_FLAGS: dict[str, tuple[Any, str, str]] = {  # field of ServerConfig → type, section of the help, help
    "host": (str, "Listening", "Address to listen on; 127.0.0.1 admits this machine only."),
    "port": (int, "Listening", "Port to listen on; 0 = any free one, which is printed."),
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


def read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Make the values of a YAML file the defaults of the other flags."""
    if path is None:
        return
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read as YAML: {error}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {path}: holds a {type(content).__name__}, must be a mapping of flags to values")
    params = {p.name: p for p in ctx.command.params if p.name not in (None, "config", "help")}
    defaults: dict[str, Any] = {}
    for key, value in (content or {}).items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in params:
            raise ConfigError(f"--config {path}: unknown key {key!r}; keys are the flags without their dashes")
        if value is not None:
            defaults[name] = checked_value(params[name], value, f"--config {path}: {key}")
    ctx.default_map = defaults


def checked_value(param: click.Parameter, value: Any, where: str) -> Any:
    """A value of the file, of the kind that the flag has; what it says is checked as on the command line."""
    if isinstance(param.type, JsonType):
        return value
    if param.multiple:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float) for item in items):
            raise ConfigError(f"{where} is {value!r}, must be a string or a list of strings")
        return [str(item) for item in items]
    is_switch = isinstance(param.type, click.types.BoolParamType)
    if isinstance(value, bool) is not is_switch or not isinstance(value, bool | str | int | float):
        raise ConfigError(f"{where} is {value!r}, must be {'true or false' if is_switch else 'one value'}")
    return value


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
    if os.environ.get("LEAN_ENGINE_API_KEY") == "":  # click takes an empty variable for an unset one
        raise ConfigError("LEAN_ENGINE_API_KEY is empty, which would open the server to all; unset it or give a key")
    config = ServerConfig(**server_values(server))
    EngineConfig.from_options(engine)  # refuses a bad value before a port is taken
    set_up_logging()
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
        logging.getLogger("lean_engine").warning(
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
