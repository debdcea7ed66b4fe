"""The page in a real browser: Chromium by Playwright, where both are installed."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest
from serving import serving

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]
SHOTS = os.environ.get("OXIDIZE_JAX_SHOTS")
"""A folder for pictures of the page, to be looked at."""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def slow(llm, monkeypatch):
    """Steps slow enough to be seen."""
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda n: time.sleep(0.08) or step(n))


def opened(browser, url, *, scheme="light", width=1280, height=900):
    """The page, and what the browser complains of while it is open."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
    )
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("requestfailed", lambda r: complaints.append(f"{r.method} {r.failure}"))
    page.goto(url)
    page.wait_for_selector("#status.live")
    return page, complaints


def until(page, condition):
    """Wait until it is true. Playwright's own way evaluates text in the page, which its policy
    forbids."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def ask(page, text, tokens=30):
    page.fill("#tokens", str(tokens))
    page.fill("#text", text)
    page.press("#text", "Enter")


def shot(page, name):
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)


def used(page):
    return int(page.inner_text("#blocks-used").split()[0])


def pixels(page):
    return page.evaluate("document.getElementById('map').toDataURL()")


def test_a_chat_streams_and_the_map_moves(browser, served, slow):
    page, complaints = opened(browser, served.url)
    assert page.title() == "tiny · oxidize_jax"
    idle = pixels(page)
    assert used(page) == 0
    ask(page, "hello")
    until(page, "document.querySelector('.assistant .text').textContent.length > 3")
    first = page.inner_text(".assistant .text")
    until(page, "document.querySelector('#requests progress')")
    until(page, "parseInt(document.getElementById('blocks-used').textContent) > 0")
    assert pixels(page) != idle
    shot(page, "running")
    until(page, "!document.querySelector('.busy')")
    assert len(page.inner_text(".assistant .text")) > len(first)
    assert "token" in page.inner_text(".assistant .meta")
    until(page, "document.getElementById('requests').textContent == 'Nothing runs.'")
    until(page, "parseInt(document.getElementById('blocks-used').textContent) == 0")
    # The curve has seen tokens.
    assert page.evaluate("document.getElementById('curve').points.numberOfItems") > 3
    assert complaints == []


def test_stop_aborts_the_request_and_keeps_the_text(browser, served, slow):
    page, complaints = opened(browser, served.url)
    ask(page, "hello", tokens=40)
    until(page, "document.querySelector('.assistant .text').textContent.length > 2")
    page.click("#stop")
    until(page, "!document.querySelector('.busy')")
    assert "stopped by you" in page.inner_text(".assistant .meta")
    until(page, "document.getElementById('requests').textContent == 'Nothing runs.'")
    assert page.is_enabled("#send")
    assert complaints in ([], ["POST net::ERR_ABORTED"])
    page.click("#clear")
    assert page.query_selector(".said") is None
    assert page.is_visible("#hint")


def test_what_a_model_writes_is_text(browser, llm, served):
    """A grammar has the model write HTML; the page asks for it as it does for any text."""
    page, complaints = opened(browser, served.url)
    bad = "<img src=x onerror=alert(1)>"

    def forced(route):
        body = {**route.request.post_data_json, "structured_outputs": {"choice": [bad]}}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", forced)
    ask(page, "<b>", tokens=32)
    until(page, "document.querySelector('.assistant .text').textContent.length > 20")
    until(page, "!document.querySelector('.busy')")
    assert bad.startswith(page.inner_text(".assistant .text"))
    assert page.query_selector("#log img, #log b") is None
    assert complaints == []


def test_errors_are_told_and_the_next_message_works(browser, served):
    page, _ = opened(browser, served.url)
    ask(page, "x" * 200)
    page.wait_for_selector(".said.error")
    assert "max_model_len" in page.inner_text(".said.error .text")
    assert page.query_selector(".said.assistant") is None
    ask(page, "short", tokens=3)
    page.wait_for_selector(".said.assistant .meta:has-text('token')")


def test_the_key_is_asked_for_and_kept_in_memory_only(browser, llm):
    with serving(llm, api_key="secret-key") as served:
        context = browser.new_context()
        page = context.new_page()
        page.goto(served.url)
        page.wait_for_selector("#status.bad:has-text('API key')")
        page.fill("#key", "secret-key")
        page.wait_for_selector("#status.live", timeout=10_000)
        ask(page, "hi", tokens=3)
        page.wait_for_selector(".said.assistant .meta:has-text('token')")
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
        assert "secret-key" not in kept
        assert "secret-key" not in page.url
        assert context.cookies() == []
        page.reload()
        assert page.input_value("#key") == ""
        context.close()


def test_the_map_tells_of_blocks_by_pointer_and_by_keys(browser, served, slow):
    page, complaints = opened(browser, served.url)
    ask(page, "hello there", tokens=30)
    until(page, "parseInt(document.getElementById('blocks-used').textContent) > 1")
    page.focus("#map")
    for _ in range(60):
        page.keyboard.press("ArrowRight")
        told = page.inner_text("#tell")
        if "request" in told:
            break
    assert "tokens" in told
    assert "row" in told
    page.keyboard.press("Escape")
    assert "in use" in page.inner_text("#tell")
    page.hover("#map", position={"x": 4, "y": 4})
    assert page.inner_text("#tell").startswith("Block 0:")
    until(page, "!document.querySelector('.busy')")
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_and_can_be_read(browser, served, slow, scheme, width):
    page, complaints = opened(browser, served.url, scheme=scheme, width=width)
    ask(page, "Which colours has the sea?", tokens=34)
    until(page, "document.querySelector('.assistant .text').textContent.length > 9")
    until(page, "document.querySelector('#requests progress')")
    shot(page, f"{scheme}-{width}")
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) == 0
    for selector in ("#log", "#engine", "#chat", "form", "dl"):
        box = page.query_selector(selector).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    assert contrast(page, "body", "--text", "--bg") >= 7
    for front, back in [("--muted", "--card"), ("--muted", "--sunk"), ("--bad", "--sunk"),
                        ("--on-accent", "--accent"), ("--text", "--user")]:  # fmt: skip
        assert contrast(page, "body", front, back) >= 4.5, (front, back)
    named = "[...document.querySelectorAll('input,textarea')].every(e => e.labels.length == 1)"
    assert page.evaluate(named)
    until(page, "!document.querySelector('.busy')")
    assert complaints == []


def contrast(page, selector, front, back):
    """WCAG's contrast of two of the page's colours."""

    def luminance(name):
        text = page.evaluate(
            "([s, n]) => { const e = document.querySelector(s); e.style.outlineColor = `var(${n})`;"
            " const c = getComputedStyle(e).outlineColor; e.style.outlineColor = ''; return c; }",
            [selector, name],
        )
        levels = [int(part) / 255 for part in text.removeprefix("rgb(").rstrip(")").split(",")]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(front), luminance(back)])
    return (high + 0.05) / (low + 0.05)
