"""The page in a real browser, against a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.browser import Page, browser
from tests.server.server_process import Server, running_server

pytestmark = pytest.mark.slow  # starts a server and a browser

KEY = "sk-of-a-test"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = ["--device-flops-per-second", "1e12", "--device-bytes-per-second", "1e11"]
    words = ["--num-pages", "129", "--api-key", KEY, "--enable-mfu-metrics", *limits]
    with running_server("none", *words) as server:
        yield server


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def page(server: Server, profile: Path) -> Iterator[Page]:
    """The page, with the key that it asked for."""
    with browser(profile) as page:
        page.size(1280, 800)
        page.open(server.url)
        page.wait("document.getElementById('key-dialog').open")
        refused = [one for one in page.problems if "401" in one]
        assert len(refused) == len(page.problems), "nothing but the request without a key"
        page.problems.clear()
        page.type(KEY)
        page.key("Enter")
        page.wait("!document.getElementById('send').disabled")
        assert page.run("sessionStorage.getItem('jaxserve.key')") == KEY
        assert KEY not in page.run("JSON.stringify(localStorage)")
        yield page


@pytest.fixture(autouse=True)
def no_problems(page: Page) -> Iterator[None]:
    yield
    assert page.problems == []


def focused(page: Page) -> str:
    return str(page.run("document.activeElement.id || document.activeElement.className"))


def tab_to(page: Page, name: str) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(60):
        if focused(page) == name:
            return
        page.key("Tab")
    raise AssertionError(f"Tab never comes to {name}")


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.key("Enter")
    page.wait("document.querySelector('.message:last-child dl.stats')")


def answer(page: Page) -> str:
    return str(page.run("document.querySelector('.message:last-child .body').textContent"))


def test_a_chat_with_its_probabilities(page: Page) -> None:
    ask(page, "What is 12 + 30?")
    assert answer(page).startswith("12 + 30 = ")
    stats = page.run("document.querySelector('.message:last-child dl.stats').textContent")
    assert "TTFT" in stats and "tok/s" in stats
    said = page.run("document.getElementById('announcer').textContent")
    assert said.endswith("End of the answer") and "12 + 30" in said, "for screen readers, once"

    page.click("#show-logprobs")
    ask(page, "Write a story: Carla, bear, kite.")
    assert page.run("document.querySelectorAll('.message:last-child .token').length") > 5
    body = "document.querySelector('.message:last-child .body')"
    assert "<|" not in page.run(f"{body}.textContent"), "what ends an answer is no part of it"
    assert page.run(f"{body}.querySelector('.token:last-child').classList.contains('end')")
    assert not page.run(
        f"[...{body}.querySelectorAll('.token')].some((one) => /^\\s\\S/.test(one.textContent))"
    )
    page.hover(".message:last-child .token")
    page.wait("!document.getElementById('token-card').hidden")
    assert page.run("document.querySelectorAll('#token-card li').length") >= 5
    assert "%" in page.run("document.getElementById('token-card').textContent")

    page.run("document.querySelector('.message:last-child .token').focus()")
    page.key("ArrowRight")
    second = "document.querySelectorAll('.message:last-child .token')[1]"
    assert page.run(f"document.activeElement === {second}")
    assert page.run(f"{second}.getAttribute('aria-describedby')") == "token-card"
    page.click("#show-logprobs")


def test_stop_regenerate_and_a_second_conversation(page: Page, server: Server) -> None:
    page.click("#new-conversation")
    before = page.run("document.querySelectorAll('#conversation-list li').length")
    page.type("Write a story: Mia, cat, boat.")
    page.key("Enter")
    page.wait("!document.getElementById('stop').hidden")
    page.key("Escape")
    page.wait("document.getElementById('stop').hidden")
    page.wait("document.querySelector('.message:last-child dl.stats')")
    page.run(
        "[...document.querySelectorAll('.message:last-child button')]"
        ".find((one) => one.textContent === 'Regenerate').click()"
    )
    page.wait("document.getElementById('stop').hidden && document.querySelector('dl.stats dd')")
    assert page.run("document.querySelectorAll('.message').length") == 2
    assert answer(page)
    assert page.run("document.querySelectorAll('#conversation-list li').length") == before + 1
    page.open(server.url)
    page.wait("document.querySelector('.message.user')")
    page.wait("!document.getElementById('send').disabled")
    assert "Mia" in page.run("document.querySelector('.message.user').textContent")


def test_structured_output_and_the_request_as_code(page: Page) -> None:
    page.click("#new-conversation")
    page.run(
        "(() => { const kind = document.getElementById('s-kind'); kind.value = 'schema';"
        "kind.dispatchEvent(new Event('change')); })()"
    )
    ask(page, "What is 2 + 3?")
    assert page.run(
        "Number.isInteger(JSON.parse(document.querySelector("
        "'.message:last-child .body').textContent).sum)"
    )
    page.click("#open-code")
    page.wait("document.getElementById('code-dialog').open")
    curl = page.run("document.getElementById('code-text').textContent")
    assert curl.startswith("curl 'http://127.0.0.1") and '"json_schema"' in curl
    page.click("#code-python")
    python = page.run("document.getElementById('code-text').textContent")
    compile(python, "code", "exec")
    assert (
        "client.chat.completions.create(" in python and 'os.environ["JAXSERVE_API_KEY"]' in python
    )
    assert KEY not in curl + python
    page.key("Escape")
    page.run(
        "(() => { const kind = document.getElementById('s-kind'); kind.value = 'text';"
        "kind.dispatchEvent(new Event('change')); })()"
    )


def test_images_that_are_dropped_and_pasted_go_along(page: Page) -> None:
    told = page.run(
        """import('/page/pictures.js').then(async ({ Pictures, content }) => {
          const made = (tag) => document.createElement(tag);
          const [box, area, field] = ['div', 'div', 'textarea'].map(made);
          const told = [], pictures = new Pictures(box, area, field, (text) => told.push(text));
          const canvas = document.createElement('canvas');
          const blob = await new Promise((done) => canvas.toBlob(done));
          const data = new DataTransfer();
          data.items.add(new File([blob], 'a.png', { type: 'image/png' }));
          const drop = () => area.dispatchEvent(new DragEvent('drop', { dataTransfer: data }));
          drop();  // of a model of text
          pictures.bind(2);
          drop();
          field.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data }));
          drop();
          while (!told.length) await new Promise((done) => setTimeout(done, 5));
          const shown = box.querySelectorAll('img').length;
          return JSON.stringify([shown, content('what?', pictures.taken()), box.hidden, told]);
        })"""
    )
    shown, parts, is_hidden, said = json.loads(told)
    assert shown == 2 and is_hidden and "At most 2 images" in said[0]
    *images, text = parts
    assert text == {"type": "text", "text": "what?"} and len(images) == 2
    for image in images:
        assert image["type"] == "image_url"
        assert image["image_url"]["url"].startswith("data:image/png;base64,")


def test_images_are_counted_drawn_anew_and_given_up_where_the_storage_is_full(page: Page) -> None:
    told = page.run(
        """Promise.all(['pictures', 'conversations'].map((name) => import(`/page/${name}.js`)))
        .then(async ([{ Pictures }, { Conversations }]) => {
          const made = (tag) => document.createElement(tag);
          const [box, area, field] = ["div", "div", "textarea"].map(made);
          const told = [], busy = [];
          const ready = () => busy.push(pictures.reading);
          const pictures = new Pictures(box, area, field, (one) => told.push(one), () => 1, ready);
          const canvas = Object.assign(made("canvas"), { width: 3000, height: 20 });
          const blob = await new Promise((done) => canvas.toBlob(done, 'image/jpeg'));
          pictures.bind(2);
          const event = { preventDefault() {} };
          const file = new File([blob], "a.jpg", { type: blob.type });
          await pictures.take(event, [file, file]);
          const drawn = new Image();
          drawn.src = pictures.urls[0];
          await drawn.decode();
          const store = new Conversations(), own = Storage.prototype.setItem;
          Storage.prototype.setItem = function (key, text) {
            if (text.includes('data:image')) throw new Error('full');
            own.call(this, key, text);
          };
          store.choose(null);
          const tokens = [{}], said = { role: 'user', content: 'x', images: pictures.urls, tokens };
          store.current.messages.push(said);
          const isKept = store.save(), { id } = store.current;
          store.changed();
          const kept = JSON.parse(localStorage.getItem(`jaxserve.conversation.${id}`)).messages;
          Storage.prototype.setItem = own;
          const waits = store.waiting !== null;
          store.remove(id);
          store.current.messages = [];
          const held = [0, 1, 2].map((count) => {
            pictures.held = () => count;  // as in another conversation
            return pictures.hasRoom();
          });
          const url = drawn.src.slice(0, 15);
          return JSON.stringify([drawn.width, url, told, busy, isKept, kept, waits, held]);
        })"""
    )
    width, kind, said, busy, is_kept, kept, waits, held = json.loads(told)
    assert (width, kind, busy) == (1344, "data:image/jpeg", [1, 0])
    assert len(said) == 2 and "At most 2 images" in said[0] == said[1]
    assert held == [True, True, False]
    assert kept == [{"role": "user", "content": "x", "tokens": [{}]}] and not is_kept and not waits


def test_what_a_model_writes_is_text(page: Page) -> None:
    made = page.run(
        "import('/page/markdown.js').then(({ markdown }) => { const box ="
        " document.createElement('div'); box.append(...markdown("
        "'# <img src=x onerror=alert(1)>\\n**b** `c` [a](javascript:alert(1))\\n"
        "- one\\n  - two\\n\\n```html\\n<script>alert(1)</script>\\n```\\n<b>no</b>'));"
        " return [box.innerHTML, [...box.querySelectorAll('*')].map((one) => one.tagName)]; })"
    )
    assert set(made[1]) <= {"H3", "P", "STRONG", "CODE", "UL", "LI", "PRE"}
    assert {"STRONG", "CODE", "UL", "PRE"} <= set(made[1])
    assert "&lt;script&gt;alert(1)" in made[0] and "&lt;b&gt;no" in made[0]
    refused = page.run(
        "(() => { try { document.body.innerHTML = '<b>'; return false; }"
        " catch (error) { return error.name; } })()"
    )
    assert refused == "TypeError", "trusted types"
    time.sleep(0.2)
    page.run("null")  # what was said meanwhile is read
    page.problems[:] = [one for one in page.problems if "TrustedHTML" not in one]


def test_the_engine_moves_and_a_load_can_be_sent_by_keyboard_alone(page: Page) -> None:
    page.run("document.getElementById('tab-chat').focus()")
    page.key("ArrowRight")
    assert focused(page) == "tab-engine"
    frames = "Number(document.getElementById('engine').dataset.frames)"
    first = page.wait(frames)
    used = "document.querySelectorAll('.map-legend b')[2].textContent"
    assert page.run(used) == "0"
    before = page.run("document.querySelector('canvas.map').toDataURL()")
    for _ in range(20):
        page.key("Tab")
        if page.run("document.activeElement.textContent") == "Send a small load":
            break
    page.key("Enter")
    page.wait(f"{used} !== '0'", 30)
    tiles = "[...document.querySelectorAll('.tile')].map(one => one.textContent)"
    for name in ("MFU", "Bandwidth"):
        page.wait(f"{tiles}.some(one => new RegExp('^{name}[0-9.]+ %$').test(one))", 30)
    page.wait("document.querySelector('tbody tr button')", 30)
    assert page.run("document.querySelector('.who').textContent") == "the small load"
    page.wait(f"document.querySelector('canvas.map').toDataURL() !== {before!r}")
    page.wait("document.querySelector('.card [role=status]').textContent.includes('tok/s')", 120)
    page.wait("document.querySelector('canvas.timeline').ariaLabel.includes('Last five seconds')")
    page.run("document.querySelector('canvas.map').focus()")
    page.key("ArrowRight")
    page.wait("document.getElementById('map-detail').textContent.startsWith('Page 1:')")
    assert page.run(frames) > first
    page.run("document.getElementById('tab-engine').focus()")
    page.key("ArrowLeft")
    time.sleep(0.5)
    stopped = page.run(frames)
    time.sleep(1.0)
    assert page.run(frames) == stopped, "nobody looks, so nothing is asked for"


@pytest.mark.parametrize("view", ["chat", "engine"])
def test_on_a_phone_nothing_is_cut_off(page: Page, view: str) -> None:
    page.size(360, 740, phone=True)
    try:
        page.click(f"#tab-{view}")
        time.sleep(0.3)
        assert page.run("document.documentElement.scrollWidth <= 360")
        wide = page.run(
            "[...document.querySelectorAll('main *, header *')].filter((one) =>"
            " one.checkVisibility({ visibilityProperty: true })"
            " && !one.closest('.scroll, pre, .drawer')"
            " && one.getBoundingClientRect().right > 361)"
            ".map((one) => one.className || one.tagName)"
        )
        assert wide == []
        if view == "chat":
            page.click("#open-conversations")
            page.wait("document.getElementById('conversations').classList.contains('open')")
            assert page.run("document.activeElement.id") == "new-conversation"
            page.key("Escape")
            assert focused(page) == "open-conversations"
    finally:
        page.size(1280, 800)


def test_light_dark_and_names_for_screen_readers(page: Page) -> None:
    page.click("#tab-chat")
    colour = "getComputedStyle(document.body).backgroundColor"
    page.media(prefers_color_scheme="dark")
    dark = page.run(colour)
    page.media(prefers_color_scheme="light")
    light = page.run(colour)
    assert dark != light
    for _ in range(2):
        page.click("#theme")
    assert page.run(colour) == dark and "dark" in page.run(
        "document.getElementById('theme').ariaLabel"
    )
    page.click("#theme")
    assert page.run(colour) == light
    page.media(prefers_reduced_motion="reduce")
    assert page.run("matchMedia('(prefers-reduced-motion: reduce)').matches")
    for tab in ("chat", "engine"):
        page.click(f"#tab-{tab}")
        nameless = [
            role
            for role, name in page.accessible()
            if role in ("button", "textbox", "spinbutton", "combobox", "checkbox", "tab", "region")
            and not name
        ]
        assert nameless == []
