"""Takes the pictures of the page that the docs show: python -m docs.figures.page

Starts a server on the bundled model and a headless Chromium, chats, sends a load and looks. What is
pictured is the real page, so times and rates in it are those of the machine that it ran on.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.verify.edge_load import Server, running_server
from tests.server.browser import Page, browser

FOLDER = Path(__file__).parent
CLIENTS = 14
SERVER = (
    *("--served-model-name", "tiny", "--max-num-seqs", "12", "--num-pages", "1281"),
    *("--max-queue-wait", "none"),
)
WIDE, TALL, PHONE = (1280, 800), (1280, 1120), (390, 780)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the pictures")
    parser.add_argument("--suffix", choices=("webp", "png"), default="webp")
    args = parser.parse_args(arguments)

    def file(name: str) -> Path:
        path: Path = args.output / f"page-{name}.{args.suffix}"
        return path

    with (
        tempfile.TemporaryDirectory() as profile,
        running_server(*SERVER) as server,
        browser(Path(profile)) as page,
    ):
        page.size(*WIDE, scale=1.5)
        page.media(prefers_color_scheme="light")
        page.open(server.url)
        page.wait("!document.getElementById('send').disabled")
        chat(page)
        page.screenshot(file("chat"))
        page.size(*PHONE, phone=True, scale=2)
        page.media(prefers_color_scheme="dark")
        settle(page)
        page.screenshot(file("phone"))
        page.size(*TALL, scale=1.5)
        page.media(prefers_color_scheme="light")
        with load(server):
            engine(page)
            page.screenshot(file("engine"))
            page.size(*PHONE, phone=True, scale=2)
            page.media(prefers_color_scheme="dark")
            page.run("document.getElementById('engine').scrollTo(0, 0)")
            settle(page)
            page.screenshot(file("engine-phone"))
        if page.problems:
            raise RuntimeError(f"the page's console has {page.problems}")


def chat(page: Page) -> None:
    """Two questions, of which the second is answered with its probabilities, and one looked at."""
    for text in ("What is 12 + 30?", "Write a story: Carla, bear, kite."):
        page.run("document.getElementById('prompt').focus()")
        page.type(text)
        page.key("Enter")
        page.wait("document.querySelector('.message:last-child dl.stats')")
        if not page.run("document.getElementById('show-logprobs').checked"):
            page.click("#show-logprobs")
    # a token that another one could well have been
    page.run(
        "(() => { const all = [...document.querySelectorAll('.message:last-child .token')];"
        "(all.find((one) => one.dataset.p >= 3) ?? all[0]).id = 'pictured'; })()"
    )
    page.hover("#pictured")
    page.wait("!document.getElementById('token-card').hidden")
    settle(page)


def engine(page: Page) -> None:
    """The engine's view, once it has seen steps for a while."""
    page.click("#tab-engine")
    page.wait("Number(document.getElementById('engine').dataset.frames)")
    page.click("#engine button.primary")
    page.wait("document.querySelectorAll('tbody tr button').length > 5")
    page.run("new Promise((done) => setTimeout(done, 22000))")
    page.wait("document.querySelectorAll('tbody tr button').length > 5")
    settle(page)


def settle(page: Page) -> None:
    """Wait for what moves, and for a frame to be drawn."""
    page.run("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 600))")


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Completions of several lengths meanwhile, some of which begin alike."""
    ended = threading.Event()

    def ask(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=server.url, timeout=120) as client:
            while not ended.is_set():
                prompt = [7 + number % 3] * 96 if number % 2 else []
                prompt += [rng.randrange(5, 2000) for _ in range(rng.choice((16, 60, 250)))]
                tokens = rng.choice((24, 60, 130))
                body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
                client.post("/v1/completions", json=body).raise_for_status()
                ended.wait(rng.uniform(0, 1.2))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
