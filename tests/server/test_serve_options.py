"""`lean-engine serve`: flags, environment variables and the configuration file."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lean_engine
from lean_engine.cli import run
from lean_engine.cli.serve import SERVER_FLAGS
from lean_engine.server.config import ServerConfig

Serve = Callable[..., Any]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs the command up to the server, and returns the ServerConfig, the engine's options and the model."""
    seen: dict[str, Any] = {}

    class Server:
        has_ended = True

        def __init__(self, load: Callable[[], Any], config: ServerConfig, on_ready: Any) -> None:
            seen["config"] = config
            load()

        def serve(self) -> int:
            return 0

    def llm(model: str | None, **options: Any) -> Any:
        seen.update(model=model, engine={k: v for k, v in options.items() if k not in ("on_load", "show_downloads")})

    monkeypatch.setattr("lean_engine.server.run.HttpServer", Server)
    monkeypatch.setattr("lean_engine.llm.LLM", llm)

    def call(*arguments: str) -> Any:
        assert run(["serve", *arguments]) == 0
        return SimpleNamespace(**seen)

    return call


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    return error


def test_defaults(serve: Serve) -> None:
    found = serve()
    assert found.config == ServerConfig()
    assert found.model is None  # the demo model
    assert found.engine["max_num_seqs"] == 128


def test_every_field_of_the_configuration_is_a_flag() -> None:
    assert set(SERVER_FLAGS) == set(ServerConfig.__dataclass_fields__)


def test_flags(serve: Serve) -> None:
    found = serve(
        *("some/model", "--port", "0", "--api-key", "a", "--api-key", "b", "--served-model-name", "x"),
        *("--allowed-origins", '["http://a"]', "--max-body-bytes", "1MiB", "--max-model-len", "4K"),
        *("--override-generation-config", '{"temperature": 0.5}', "--no-enable-prefix-caching", "--disable-log-stats"),
    )
    assert found.model == "some/model"
    assert found.config.port == 0
    assert found.config.api_key == ("a", "b")
    assert found.config.served_model_name == ("x",)
    assert found.config.allowed_origins == ("http://a",)
    assert found.config.max_body_bytes == 2**20
    assert found.config.override_generation_config == {"temperature": 0.5}
    assert found.config.disable_log_stats
    assert found.engine["max_model_len"] == 4096
    assert found.engine["enable_prefix_caching"] is False


def test_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "MODEL": "env/model",
        "PORT": "1234",
        "API_KEY": "k1 k2",
        "MAX_NUM_SEQS": "3",
        "ENABLE_PREFIX_CACHING": "false",
        "ALLOWED_ORIGINS": '["http://e"]',
        "DISABLE_ACCESS_LOG": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"LEAN_ENGINE_{name}", value)
    found = serve()
    assert found.model == "env/model"
    assert found.config.port == 1234
    assert found.config.api_key == ("k1", "k2")
    assert found.config.allowed_origins == ("http://e",)
    assert found.config.disable_access_log
    assert found.engine["max_num_seqs"] == 3
    assert found.engine["enable_prefix_caching"] is False


def test_an_empty_key_in_the_environment_does_not_open_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAN_ENGINE_API_KEY", "")
    assert "LEAN_ENGINE_API_KEY is empty" in failure(capsys)


def test_the_file_and_what_goes_before_it(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: file/model\nport: 1\nhost: 127.0.0.1\napi-key: [one, 2]\nmax_num_seqs: 7\nseed: 5\n"
        "allowed-origins: ['http://f']\noverride-generation-config: {top_k: 3}\nenable-prefix-caching: false\n"
        "max-model-len: 4K\nkv-cache-memory-bytes: 1GiB\nuds: null\nserved-model-name: only\n"
    )
    found = serve("--config", str(path))
    assert found.model == "file/model"
    assert (found.config.port, found.config.host, found.config.uds) == (1, "127.0.0.1", None)
    assert found.config.api_key == ("one", "2")
    assert found.config.served_model_name == ("only",)
    assert found.config.allowed_origins == ("http://f",)
    assert found.config.override_generation_config == {"top_k": 3}
    assert found.engine["enable_prefix_caching"] is False
    assert found.engine["max_model_len"] == 4096
    assert found.engine["kv_cache_memory_bytes"] == 2**30
    monkeypatch.setenv("LEAN_ENGINE_PORT", "2")
    monkeypatch.setenv("LEAN_ENGINE_SEED", "6")
    monkeypatch.setenv("LEAN_ENGINE_CONFIG", str(path))
    found = serve("given/model", "--port", "3")
    assert found.model == "given/model"
    assert found.config.port == 3
    assert found.engine["seed"] == 6
    assert found.engine["max_num_seqs"] == 7


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot: 1", "unknown key 'prot'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("port: true", "port is True, must be one value"),
        ("port: [1]", "port is [1], must be one value"),
        ("port: x", "'x' is not a valid integer"),
        ("disable-log-stats: maybe", "must be true or false"),
        ("api-key: {a: b}", "must be a string or a list of strings"),
        ("allowed-origins: '*'", "is not JSON"),
        ("allowed-origins: [1]", "is not a JSON list of strings"),
        ("- port", "holds a list"),
        ("port: [", "cannot be read as YAML"),
        ("port: 1\nhost: a\nport: 2", "line 3: the key 'port' stands in line 1 already"),
        ("max-model-len: 1\nmax_model_len: 2", "line 2: the key 'max_model_len' stands in line 1 already"),
        ("override-generation-config:\n  top_k: 1\n  top_k: 2", "line 3: the key 'top_k' stands in line 2 already"),
        ("? [a]\n: 1", "cannot be read as YAML"),
        ("uds: x\nport: 1", "uds in --config and port in --config are both given"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    assert said in failure(capsys, "--config", str(path))


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no.yaml"
    assert f"--config {path}: cannot be read: No such file or directory\n" in failure(capsys, "--config", str(path))


@pytest.mark.parametrize("name", ["host", "port"])
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_unix_socket_beside_an_address_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, source: str
) -> None:
    value = {"host": "0.0.0.0", "port": "8000"}[name]  # the defaults, but asked for
    arguments = ["--uds", str(tmp_path / "socket")]
    if source == "flag":
        arguments += [f"--{name}", value]
    elif source == "environment":
        monkeypatch.setenv(f"LEAN_ENGINE_{name.upper()}", value)
    else:
        (tmp_path / "serve.yaml").write_text(f"{name}: {value}\n")
        arguments += ["--config", str(tmp_path / "serve.yaml")]
    said = failure(capsys, *arguments)
    places = {"flag": f"--{name}", "environment": f"LEAN_ENGINE_{name.upper()}", "file": f"{name} in --config"}
    assert f"--uds and {places[source]} are both given" in said


def test_what_kubernetes_sets_for_a_service_of_this_name_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAN_ENGINE_PORT", "tcp://10.0.0.1:8000")
    assert "enableServiceLinks: false" in failure(capsys)


def warnings_of(serve: Serve, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level("WARNING", logger="lean_engine"):
        serve()
    return [record.getMessage() for record in caplog.records]


def test_an_unknown_variable_is_named_with_the_nearest_known_one(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAN_ENGINE_MAX_MODEL_LENGTH", "4096")
    (said,) = warnings_of(serve, caplog)
    assert said == "LEAN_ENGINE_MAX_MODEL_LENGTH has no effect; the nearest variable is LEAN_ENGINE_MAX_MODEL_LEN"


def test_variables_that_are_known_or_set_by_kubernetes_do_not_warn(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "serve.yaml").write_text("port: 1\n")
    values = {"CACHE": "/x", "CONFIG": str(tmp_path / "serve.yaml"), "MODEL": "m", "MAX_NUM_SEQS": "3", "SEED": "1"}
    values |= {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT_HTTP": "8000", "PORT_8000_TCP": "tcp://10.0.0.1:8000"}
    for name, value in values.items():
        monkeypatch.setenv(f"LEAN_ENGINE_{name}", value)
    assert warnings_of(serve, caplog) == []


def test_every_variable_that_the_package_reads_is_known() -> None:
    """Those of the flags apart: what stands in the sources is what config_file.py knows."""
    from lean_engine.cli.config_file import OTHER_VARIABLES

    package = Path(lean_engine.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"environ[^\n]*?[\"'](LEAN_ENGINE_\w+)", text)}
    assert read - {"LEAN_ENGINE_API_KEY"} == set(OTHER_VARIABLES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--port", "-1"], "port is -1"),
        (["--stream-interval", "0"], "stream_interval is 0"),
        (["--client-timeout", "0"], "client_timeout is 0.0"),
        (["--request-timeout", "nan"], "request_timeout is nan"),
        (["--api-key", ""], "api_key holds an empty string"),
        (["--ssl-keyfile", "x"], "ssl_keyfile is given without ssl_certfile"),
        (["--ssl-certfile", "/nowhere"], "ssl_certfile is '/nowhere', which is no file"),
        (["--root-path", "llm"], "root_path is 'llm'"),
        (["--generation-config", "other"], "generation_config is 'other'"),
        (["--allowed-methods", "GET"], "is not JSON"),
        (["--default-chat-template-kwargs", "[]"], "is not a JSON object"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--host", "no such host"], "cannot listen on host 'no such host'"),
    ],
)
def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in failure(capsys, *arguments)


def test_sampling_defaults_come_from_the_model_and_can_be_overridden(start: Any, tmp_path: Path) -> None:
    import json
    import shutil

    from live_server import MODEL

    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    recommended = {"temperature": 0.3, "top_k": 5, "max_new_tokens": 7, "eos_token_id": [1]}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    server = start(model=model)
    assert server.http.service.model.defaults == {"temperature": 0.3, "top_k": 5, "max_tokens": 7}
    _, body, _ = server.request("/v1/completions", {"prompt": "a", "ignore_eos": True})
    assert body["usage"]["completion_tokens"] == 7
    _, body, _ = server.request("/v1/completions", {"prompt": [5] * 252, "ignore_eos": True})
    assert body["usage"]["completion_tokens"] == 4  # a default is no demand
    neutral = start(model=model, generation_config="vllm", override_generation_config={"top_p": 0.5})
    assert neutral.http.service.model.defaults == {"top_p": 0.5}
