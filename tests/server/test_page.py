"""The page at `/`: what is sent, and, in headless Chromium, what a person sees and does.

The browser's tests need Debian's chromium and chromium-driver and are skipped where those are not installed.
One file, though long: its tests share a browser, which takes seconds to start.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import KEYS, Browser, missing
from live_server import MODEL, Live

from lean_engine.server.page import PAGE, read_page

needs_browser = pytest.mark.skipif(missing() is not None, reason=str(missing()))
COMMON: dict[str, Any] = {"cpu_kernels": "numpy", "override_generation_config": {"ignore_eos": True}}
STEP_SECONDS = 0.02


def make_slow(server: Live) -> Live:
    """Let a step take long enough to be looked at."""
    step = server.engine.step
    server.engine.step = lambda: (time.sleep(STEP_SECONDS), step())[1]
    return server


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    made = make_slow(Live(**COMMON))
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture
def page(browser: Browser, server: Live) -> Iterator[Browser]:
    """The page of `server`, wide and light; afterwards nothing of it is left, and nothing went wrong in it."""
    yield from opened(browser, server)
    assert browser.console() == []
    server.wait_until_idle()


def opened(browser: Browser, server: Live, **look: Any) -> Iterator[Browser]:
    browser.open("about:blank")  # the page before may ask a server that has ended
    browser.console()
    browser.requested_urls()
    browser.resize(**{"width": 1300, "height": 850, **look})
    browser.open(server.url + "/")
    browser.run("sessionStorage.clear(); localStorage.clear()")
    browser.open(server.url + "/")
    browser.wait(lambda: browser.text("#status") == "live" and browser.text("#model"))
    yield browser


def ask(page: Browser, text: str, **settings: Any) -> None:
    """Send a message, with these settings."""
    for name, value in settings.items():
        page.run(
            "const f = document.getElementById(arguments[0]); f.value = arguments[1];"
            "f.dispatchEvent(new Event('input'))", name, str(value),
        )  # fmt: skip
    page.type("#input", text + KEYS["Enter"])


def is_done(page: Browser) -> bool:
    return page.text("#send") == "Send" and page.count(".message.assistant .after") > 0


def the_request(server: Live) -> Any:
    """The one group that the engine works on."""
    (group,) = list(server.engine._groups.values())
    return group


# -- what is sent


def test_page_comes_without_a_key_and_its_data_calls_need_one(start: Callable[..., Live]) -> None:
    server = start(api_key=("secret",), **COMMON)
    assert server.request("/")[0] == 200
    for path in ("/v1/engine/state", "/v1/engine/blocks?first=1"):
        assert server.request(path)[0] == 401
        assert server.request(path, headers={"Authorization": "Bearer secret"})[0] == 200


def test_disable_ui_leaves_no_trace_of_the_page(start: Callable[..., Live]) -> None:
    server = start(disable_ui=True, **COMMON)
    for path in ("/", "/v1/engine/state", "/v1/engine/blocks?first=1"):
        assert server.request(path)[0] == 404


def test_policy_allows_the_one_script_and_style_sheet_and_calls_to_this_server(server: Live) -> None:
    status, text, headers = server.request("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag in ("script", "style"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules[f"{tag}-src"])
        assert text.count(f"<{tag}>") == text.count(f"<{tag}") == 1


def test_page_names_no_address_but_relative_ones_and_has_no_inline_handlers() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {url for url in re.findall(r"https?:[^\s'\"`)]+", text) if url != "http://www.w3.org/2000/svg"} == set()
    assert (
        re.findall(r"""(?:src|href)=["'](?!data:)|["'`]/v1|\son\w+=|style=["']|innerHTML|@import|url\(""", text) == []
    )


def test_page_is_small() -> None:
    assert len(read_page()[0]) < 64 * 1024


@pytest.mark.parametrize("pair", ["ink", "muted", "accent", "danger"])
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(pair: str, theme: int) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", text)
    colours = {name: both[theme] for name, *both in found}
    backgrounds = ["paper", "panel", "sunken"]
    assert all(contrast(colours[pair], colours[behind]) >= 4.5 for behind in backgrounds)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    assert contrast(colours["edge"], colours["panel"]) >= 3
    for kind in ("held", "shared"):
        assert contrast(colours[kind], colours["panel"]) >= 3


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio."""
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("path", "param", "message"),
    [
        ("state?cells=0", "cells", "cells is '0', must be an integer from 1 to 16384"),
        ("state?cells=99999", "cells", "must be an integer from 1 to 16384"),
        ("state?map_version=x", "map_version", "map_version is 'x', must be an integer from 0"),
        ("state?cell=3", "cell", "cell is not a parameter here; known: cells, min_mapped, map_version"),
        ("blocks", "first", "give either first (and last) or request_id"),
        ("blocks?first=1&request_id=a", "first", "give either"),
        ("blocks?first=-1", "first", "must be an integer"),
        ("blocks?first=1&last=999999", "first", "blocks 1 to 999999 are not among the pool's"),
        ("blocks?first=%F0%9F%98%80", "first", "must be an integer"),
    ],
)
def test_a_bad_query_is_refused_by_name(server: Live, path: str, param: str, message: str) -> None:
    status, body, _ = server.request(f"/v1/engine/{path}")
    assert (status, body["error"]["param"]) == (400, param)
    assert message in body["error"]["message"]


def test_state_tells_nothing_of_a_prompt(server: Live) -> None:
    with_words = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 5}
    assert server.request("/v1/chat/completions", with_words)[0] == 200
    status, body, _ = server.request("/v1/engine/state?cells=10")
    assert (status, body["totals"]["num_generated_tokens"] >= 5, body["totals"]["num_finished"] >= 1) == (
        200,
        True,
        True,
    )
    assert "hello" not in json.dumps(body)
    again = server.request(f"/v1/engine/state?cells=10&map_version={body['map']['version']}")[1]
    assert (again["map"]["runs"], again["map"]["version"]) == (None, body["map"]["version"])


def test_looks_leave_no_line_in_the_access_log(start: Callable[..., Live], caplog: pytest.LogCaptureFixture) -> None:
    server = start(disable_access_log=False, **COMMON)
    with caplog.at_level("INFO", logger="lean_engine.access"):
        server.request("/v1/engine/state")
        server.request("/v1/engine/blocks?first=1")
        server.request("/v1/engine/state?cells=0")
        server.request("/version")
        server.wait_until(lambda: '"/version"' in caplog.text)  # a line is written after its response
    logged = [json.loads(record.message) for record in caplog.records if record.name == "lean_engine.access"]
    assert [(line["path"], line["status"]) for line in logged] == [("/v1/engine/state", 400), ("/version", 200)]


# -- what a person sees and does


@needs_browser
def test_an_answer_streams_in_and_its_blocks_and_progress_show(page: Browser, server: Live) -> None:
    empty = page.run("return document.getElementById('map').toDataURL()")
    page.run(
        "window.lengths = []; new MutationObserver(() => {"
        "const t = document.querySelector('.message.assistant .text'); if (t) "
        "lengths.push(t.textContent.length); }).observe(document.getElementById('log'), "
        "{childList: true, subtree: true, characterData: true})"
    )
    ask(page, "hello world", max_tokens=80)
    page.wait(lambda: re.fullmatch(r"\d+ \+ \d+ of \d+", page.text("#requests li .figures")))
    assert page.text("#send") == "Stop"
    assert page.text("#requests li .own:not([hidden])") == "you"
    page.wait(lambda: page.text("#kinds li[data-kind=held] .number") not in ("", "0"))
    page.wait(lambda: page.run("return document.getElementById('map').toDataURL()") != empty)
    page.wait(lambda: page.text("#generated-rate") not in ("–", "0"))
    page.wait(lambda: is_done(page))
    lengths = page.run("return lengths")
    assert len(set(lengths)) > 10, "the answer did not grow"
    assert lengths == sorted(lengths)
    assert "80 tokens" in page.text(".message.assistant .after")
    assert page.text(".message.user .text") == "hello world"
    page.wait(lambda: page.count("#requests li") == 0 and page.text("#running") == "0")
    page.wait(lambda: page.text("#kinds li[data-kind=cached] .number") not in ("", "0"))
    assert page.text("#none").startswith("Nothing runs.")


@needs_browser
def test_everything_that_is_fetched_comes_from_this_server(page: Browser, server: Live) -> None:
    ask(page, "hello", max_tokens=5)
    page.wait(lambda: is_done(page))
    urls = {url for url in page.requested_urls() if not url.startswith(("chrome:", "data:", "chrome-untrusted:"))}
    assert urls
    assert [url for url in urls if not url.startswith(server.url + "/")] == []


@needs_browser
@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_ends_the_request_and_keeps_what_came(page: Browser, server: Live, way: str) -> None:
    ask(page, "hello", max_tokens=100)
    page.wait(lambda: page.text(".message.assistant .text"))
    if way == "button":
        page.click("#send")
    else:
        page.type("#input", KEYS["Escape"])
    page.wait(lambda: is_done(page))
    server.wait_until_idle()
    assert "stopped" in page.text(".message.assistant .after")
    assert page.text(".message.assistant .text")
    ask(page, "again", max_tokens=2)
    page.wait(lambda: page.count(".message.assistant .after") == 2)


@needs_browser
def test_settings_and_the_conversation_so_far_are_sent(page: Browser, server: Live) -> None:
    ask(page, "hello", max_tokens=3)
    page.wait(lambda: is_done(page))
    first = page.run("return messages.map((m) => m.role)")
    assert first == ["user", "assistant"]
    ask(page, "more", temperature=0.5, top_p=0.9, top_k=7, max_tokens=60, seed=11, system="be brief")
    page.wait(lambda: server.engine.has_work())
    group = the_request(server)
    params = group.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.5, 0.9, 7, 60, 11)
    text = server.engine.tokenizer.decode(group.prompt_token_ids, skip_special_tokens=False)
    assert re.search(r"be ?brief.*hello.*more", text, re.DOTALL)
    assert text.count("assistant") >= 2
    page.click("#send")
    page.wait(lambda: page.text("#send") == "Send")


@needs_browser
def test_a_setting_that_is_no_such_number_is_not_sent(page: Browser, server: Live) -> None:
    ask(page, "hello", top_p=1.5)
    assert page.run("return document.getElementById('settings').hidden") is False
    assert page.count(".message") == 0
    assert not server.engine.has_work()


@needs_browser
def test_new_chat_forgets_and_shift_enter_breaks_the_line(page: Browser, server: Live) -> None:
    page.type("#input", "a" + KEYS["Shift"] + KEYS["Enter"] + KEYS["Shift"] + "b")
    assert page.run("return document.getElementById('input').value") == "a\nb"
    ask(page, "", max_tokens=3)
    page.wait(lambda: is_done(page))
    page.click("#new-button")
    assert page.run("return messages.length") == 0
    assert page.count(".message") == 0
    assert page.text("#greeting") == "Ask the model something"


@needs_browser
def test_markup_in_a_message_or_answer_stays_text(page: Browser, server: Live) -> None:
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>", max_tokens=2)
    page.wait(lambda: is_done(page))
    assert page.text(".message.user .text") == "<img src=x onerror=alert(1)><b>bold</b>"
    page.run(
        "render(document.querySelector('.message.assistant .text'), {reasoning: '', content: arguments[0]})",
        "<script>x</script> **fat** `co<de>`\n\n```py\nif a < b:\n    <i>\n```\nend <a href=x>",
    )
    assert page.count("#log img, #log script, #log a, #log i") == 0
    assert page.text(".message.assistant b") == "fat"
    assert page.text(".message.assistant p code") == "co<de>"
    assert page.text(".message.assistant pre") == "if a < b:\n    <i>"


@needs_browser
def test_pointing_at_a_block_says_who_holds_it(page: Browser, server: Live) -> None:
    ask(page, "hello", max_tokens=90)
    page.wait(lambda: page.text("#kinds li[data-kind=held] .number") not in ("", "0"))
    block = the_request(server).first_request.block_table[-1]
    page.run("document.getElementById('map').focus(); point(arguments[0])", block)
    page.wait(lambda: "1 holder" in page.text("#tip"))
    said = page.text("#tip")
    assert f"Block {block} · held" in said
    assert "in the prefix cache" in said
    assert said.splitlines()[-1] == page.text("#requests li .name span")
    page.click("#send")
    page.wait(lambda: page.text("#send") == "Send")


@needs_browser
def test_the_block_map_is_explored_with_the_pointer_and_with_keys(page: Browser, server: Live) -> None:
    width = page.run("return document.getElementById('map').clientWidth")
    height = page.run("return document.getElementById('map').clientHeight")
    page.hover("#map", -width // 2 + 3, -height // 2 + 3)
    page.wait(lambda: "Block 0 · null" in page.text("#tip"))
    page.type("#map", KEYS["Right"] + KEYS["Right"])
    page.wait(lambda: page.text("#tip").startswith("Block 2 · "))
    page.type("#map", KEYS["Down"])
    columns = page.run("return columns")
    page.wait(lambda: page.text("#tip").startswith(f"Block {2 + columns} · "))
    page.hover("header h1")
    page.click("#input")
    page.wait(lambda: page.run("return document.getElementById('tip').hidden"))


@needs_browser
def test_pointing_at_a_request_lights_up_its_blocks(page: Browser, server: Live) -> None:
    ask(page, "hello", max_tokens=90)
    page.wait(lambda: page.count("#requests li[data-status=running]"))
    page.hover("#requests li")
    page.wait(lambda: page.run("return (lit ?? []).length > 0"))
    page.wait(lambda: page.run("return document.querySelector('#requests li').ariaLabel.includes('yours')"))
    page.click("#send")
    page.wait(lambda: page.count("#requests li") == 0)
    assert page.run("return lit") is None


@needs_browser
def test_an_error_is_shown_and_can_be_tried_again(page: Browser, server: Live) -> None:
    ask(page, "hello", max_tokens=100_000)
    page.wait(lambda: is_done(page))
    assert "max_tokens is 100000" in page.text(".message .error")
    assert [line for line in page.console() if "400" not in line] == []
    page.run("document.getElementById('max_tokens').value = 3")
    page.click(".message .after button")
    page.wait(lambda: "3 tokens" in page.text(".message.assistant .after"))
    assert page.count(".message .error") == 0


@needs_browser
def test_nothing_is_asked_while_nobody_looks(browser: Browser, server: Live) -> None:
    (page,) = opened(browser, server, width=360, height=700)
    assert page.run("return document.body.dataset.view") == "chat"
    time.sleep(0.3)
    page.requested_urls()
    time.sleep(1.5)
    assert page.requested_urls() == []
    page.click(".views button[data-view=engine]")
    page.wait(lambda: sum("/v1/engine/state" in url for url in page.requested_urls()))


@needs_browser
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 700, 1000, 2000])
def test_every_view_fits_its_width(browser: Browser, server: Live, width: int, is_dark: bool) -> None:
    (page,) = opened(browser, server, width=width, height=700, is_dark=is_dark)
    for view in ("chat", "engine"):
        if width <= 960:
            page.click(f".views button[data-view={view}]")
        page.run("document.getElementById('settings').hidden = false")
        overflowing = page.run(
            "return [...document.querySelectorAll('body *')].filter((e) => e.offsetParent && "
            "e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + '#' + e.id)"
        )
        assert overflowing == []
        assert page.run("return document.documentElement.scrollWidth") <= width
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(19, 22, 25)") is is_dark


@needs_browser
def test_theme_button_overrides_the_system_and_is_remembered(browser: Browser, server: Live) -> None:
    (page,) = opened(browser, server, is_dark=True)
    page.click("#theme-button")
    assert page.text("#theme-button") == "Theme: light"
    assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(247, 246, 242)"
    page.open(server.url + "/")
    assert page.text("#theme-button") == "Theme: light"


@needs_browser
def test_every_control_has_a_name_and_motion_can_be_off(browser: Browser, server: Live) -> None:
    (page,) = opened(browser, server, is_still=True)
    unnamed = page.run(
        "return [...document.querySelectorAll('button, input, textarea, canvas[tabindex], section, dialog')]"
        ".filter((e) => !(e.innerText?.trim() || e.labels?.length || e.ariaLabel || e.getAttribute('aria-labelledby')))"
        ".map((e) => e.outerHTML)"
    )
    assert unnamed == []
    ask(page, "hello", max_tokens=60)
    page.wait(lambda: page.count(".streaming"))
    running = page.run("return document.getAnimations().length")
    assert running == 0
    page.click("#send")
    server.wait_until_idle()


@needs_browser
def test_a_server_with_a_key_asks_for_it_once(browser: Browser, start: Callable[..., Live]) -> None:
    server = start(api_key=("secret",), **COMMON)
    browser.resize(1200, 800)
    browser.open(server.url + "/")
    browser.wait(lambda: browser.run("return document.getElementById('key-dialog').open"))
    assert "asks for an API key" in browser.text("#key-note")
    browser.type("#key", "wrong" + KEYS["Enter"])
    browser.wait(lambda: browser.text("#key-note").startswith("This server does not take the key."))
    browser.run("document.getElementById('key').value = ''")
    browser.type("#key", "secret" + KEYS["Enter"])
    browser.wait(lambda: browser.text("#status") == "live" and browser.text("#model") == "tiny")
    assert browser.run("return [sessionStorage.getItem('key'), Object.values(localStorage).includes('secret')]") == [
        "secret",
        False,
    ]
    ask(browser, "hello", max_tokens=3)
    browser.wait(lambda: is_done(browser))
    assert [line for line in browser.console() if "401" not in line] == []


@needs_browser
def test_a_model_without_a_chat_template_continues_texts(
    browser: Browser, start: Callable[..., Live], tmp_path: Path
) -> None:
    model = tmp_path / "plain"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    server = make_slow(start(model=model, **COMMON))
    (page,) = opened(browser, server)
    assert page.text("#greeting") == "Begin a text"
    ask(page, "hello", max_tokens=50)
    page.wait(lambda: server.engine.has_work())
    assert server.engine.tokenizer.decode(the_request(server).prompt_token_ids).strip().startswith("hello")
    assert page.wait(lambda: page.text("#requests li .own:not([hidden])")) == "you"
    page.wait(lambda: is_done(page))
    assert "50 tokens" in page.text(".message.assistant .after")
    assert page.console() == []


@needs_browser
def test_a_lost_server_is_said_and_found_again(browser: Browser, start: Callable[..., Live]) -> None:
    server = start(**COMMON)
    (page,) = opened(browser, server)
    port = server.address[1]
    server.close()
    page.wait(lambda: page.text("#status") == "no connection")
    start(port=port, **COMMON)
    page.wait(lambda: page.text("#status") == "live")
    page.console()
