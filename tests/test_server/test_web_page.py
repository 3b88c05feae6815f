"""The page: served to browsers only, closed like everything else, and working in a real one."""

from __future__ import annotations

import base64
import importlib.util
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from app_alone import make_app
from running_server import RunningServer, wait_until

from jaxserve.cli.main import main
from jaxserve.config import EngineConfig, ServerConfig

STATIC = pathlib.Path(__file__).parents[2] / "server" / "web" / "static"
BROWSER_ACCEPTS = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium and playwright: pip install '.[browser]' and your system's chromium",
)
#: Without these, Chromium looks for updates and other machines.
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def test_browsers_get_the_page_and_programs_the_routes() -> None:
    web = make_app().test_client()
    page = web.get("/", headers={"Accept": BROWSER_ACCEPTS})
    assert page.mimetype == "text/html"
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for accepts in ("*/*", "application/json", ""):
        assert "GET /ready" in web.get("/", headers={"Accept": accepts}).json["routes"]


def test_every_file_that_the_page_names_is_served_from_here() -> None:
    web = make_app().test_client()
    wanted = set(re.findall(r'(?:src|href)="([^"#]+)"', (STATIC / "index.html").read_text()))
    for script in STATIC.glob("*.js"):
        wanted |= {
            f"static/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text())
        }
    assert len(wanted) > 5
    for name in wanted:
        assert web.get(f"/{name}").status_code == 200, name
    assert web.get("/static/../app.py").status_code == 404
    assert web.get("/static/%2e%2e/app.py").status_code == 404


def test_a_browser_is_asked_for_the_key_as_a_password(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    assert main(["keys", "add", str(path), "alice"]) == 0
    key = capsys.readouterr().out.strip()
    web = make_app(api_keys=str(path)).test_client()
    closed = web.get("/", headers={"Accept": BROWSER_ACCEPTS})
    assert closed.status_code == 401
    assert closed.headers["WWW-Authenticate"].startswith("Basic ")
    assert web.get("/static/page.js").headers["WWW-Authenticate"] == "Bearer"
    for password, status in ((key, 200), ("x", 401), ("", 401)):
        given = base64.b64encode(f"me:{password}".encode()).decode()
        headers = {"Accept": BROWSER_ACCEPTS, "Authorization": f"Basic {given}"}
        assert web.get("/", headers=headers).status_code == status


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, start_server: Any) -> Iterator[Any]:
    """The page of a server of its own; nothing may be said on the browser's console."""
    server: RunningServer = start_server(
        engine=EngineConfig(model="fake", max_model_len=600), server=ServerConfig(port=0)
    ).wait_ready()
    opened = browser.new_page(viewport={"width": 1100, "height": 800})
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.said = said
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(f"{server.url}/")
    opened.wait_for_selector(".state.ready")
    opened.server = server
    yield opened
    opened.close()
    assert said == []


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


@needs_browser
def test_chat_streams_stops_and_shows_where_the_time_went(page: Any) -> None:
    ask(page, "@say:Paris it is.@ @pause:20@ Which town?")
    page.wait_for_selector(".facts")
    assert page.inner_text(".message.assistant .body") == "Paris it is."
    assert "tokens/s" in page.inner_text(".facts")

    ask(page, "@pause:100@ on and on")
    answer = page.locator(".message.assistant .body").nth(1)
    wait_until(lambda: len(answer.inner_text()) > 2, 20)
    page.keyboard.press("Escape")
    wait_until(lambda: page.locator(".facts").count() == 2, 20)
    assert "stopped" in page.locator(".facts").nth(1).inner_text()
    # The page says so when it has hung up; the server and the engine hear of it later.
    wait_until(lambda: page.server.engine_events("abort"), 20)
    aborted = page.server.engine_events("abort")
    assert len(aborted) == 1
    assert aborted[0]["made"] < 100

    page.click(".facts >> nth=0 >> text=where its time went")
    page.wait_for_selector(".waterfall svg rect.bar.decode")
    assert "in all" in page.inner_text(".waterfall .headline")
    assert page.locator("#requests tr").count() == 2

    page.click("#tab-engine")
    wait_until(lambda: page.locator("#tiles .tile").count() >= 8, 20)
    wait_until(lambda: page.locator("#rate path[d]").count() == 1, 20)


@needs_browser
def test_the_page_works_by_keyboard_and_on_a_phone(page: Any) -> None:
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#view-request")
    page.keyboard.press("End")
    assert page.is_visible("#view-engine")
    page.keyboard.press("Home")
    assert page.is_visible("#prompt")
    page.set_viewport_size({"width": 360, "height": 700})
    for tab in ("chat", "request", "engine"):
        page.click(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, tab


@needs_browser
def test_a_form_of_the_answer_is_sent_and_errors_are_shown(page: Any) -> None:
    page.select_option("#structure", "choice")
    page.fill("#max_tokens", "100000")
    ask(page, "hello")
    page.wait_for_selector(".message .failed")
    assert "max_tokens" in page.inner_text(".message .failed")
    assert "400" in page.said.pop()  # the browser notes a refusal, too
    request = page.server.engine_events("submit")
    assert not request or request[-1]["request"]["sampling"]["max_tokens"] != 100000
