"""Keys, request ids, CORS, the access log, the proxy's path."""

import json
import logging
from collections.abc import Callable, Iterator

import pytest
from live_server import Live

Start = Callable[..., Live]


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    server = Live(api_key=("first-key", "schlüssel"))
    yield server
    server.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_everything_but_health_needs_a_key(locked: Live) -> None:
    assert locked.request("/health")[0] == 200
    for path in (
        "/v1/models",
        "/metrics",
        "/version",
        "/openapi.json",
        "/nothing",
        "//health",
        "/health/",
        "/Health",
    ):
        status, body, headers = locked.request(path)
        assert status == 401, path
        assert body["error"]["type"] == "AuthenticationError"
        assert headers["www-authenticate"] == "Bearer"
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/reset_prefix_cache"):
        assert locked.request(path, b"")[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        bearer(""),
        bearer("first-ke"),
        bearer("first-key2"),
        bearer("FIRST-KEY"),
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"X-Api-Key": "first-key"},
    ],
)
def test_wrong_keys(locked: Live, headers: dict[str, str]) -> None:
    assert locked.request("/v1/models", headers=headers)[0] == 401


def test_each_key_opens(locked: Live) -> None:
    for header in ("Bearer first-key", "bearer first-key", "Bearer schlüssel".encode().decode("latin-1")):
        assert locked.request("/v1/models", headers={"Authorization": header})[0] == 200


def test_a_request_id_comes_back_and_names_the_answer(live: Live) -> None:
    _, body, headers = live.request("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "abc-1"})
    assert headers["x-request-id"] == "abc-1"
    assert body["id"] == "cmpl-abc-1"
    _, body, headers = live.request("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": "mine"})
    assert body["id"] == "cmpl-mine"
    made = {live.request("/health", headers={"X-Request-Id": bad})[2]["x-request-id"] for bad in ("", "x" * 300, "ü")}
    assert len(made) == 3
    assert all(len(i) == 32 for i in made)


def test_the_same_request_id_twice_at_once_is_two_requests(live: Live) -> None:
    body = {"prompt": ["a", "a"], "max_tokens": 3, "request_id": "same"}
    assert live.request("/v1/completions", body)[0] == 200


def test_cors(live: Live, start: Start) -> None:
    asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    status, _, headers = live.request("/v1/completions", headers=asked, method="OPTIONS")
    assert status == 200
    assert headers["access-control-allow-origin"] == "*"
    strict = start(allowed_origins=("http://b.example",), api_key=("k",))
    assert strict.request("/v1/completions", headers=asked, method="OPTIONS")[0] == 400
    other = {**asked, "Origin": "http://b.example"}
    status, _, headers = strict.request("/v1/completions", headers=other, method="OPTIONS")
    assert status == 200
    assert headers["access-control-allow-origin"] == "http://b.example"


def test_behind_a_proxy_that_mounts_it(start: Start) -> None:
    server = start(root_path="/llm", api_key=("k",))
    assert server.url.endswith("/llm")
    origin = server.url.removesuffix("/llm")
    import urllib.request

    with urllib.request.urlopen(f"{origin}/health", timeout=10) as response:
        assert response.status == 200


def test_the_access_log_has_a_line_per_request_and_no_prompt(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(disable_access_log=False)
    with caplog.at_level(logging.INFO, logger="lean_engine.access"):
        server.request(
            "/v1/completions?secret=query", {"prompt": "secret text", "max_tokens": 2}, {"X-Request-Id": "r1"}
        )
        server.request("/nothing%0ax")
        server.wait_until(lambda: len(caplog.records) == 2)
    first, second = (json.loads(r.getMessage()) for r in caplog.records)
    assert {k: first[k] for k in ("request_id", "method", "path", "status", "completion_tokens")} == {
        "request_id": "r1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "completion_tokens": 2,
    }
    assert first["prompt_tokens"] > 0
    assert first["seconds"] > 0
    assert second["status"] == 404
    assert "secret" not in caplog.text


def test_an_internal_error_is_a_500_without_details(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live.http.service.metrics, "exposition", lambda: 1 / 0)
    status, body, _ = live.request("/metrics")
    assert status == 500
    assert "ZeroDivision" not in body["error"]["message"]
    assert "ZeroDivisionError" in caplog.text
