"""One Chromium for the tests of a worker, and a page that hears every complaint.

`page` fails its test when the console shows an error, a script throws, or anything is asked of an
address that is neither this machine nor the page itself.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

BUILT = str(Path(__file__).parents[1] / "build/chromium")
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LOCAL = {"127.0.0.1", "localhost", "::1"}


def chromium() -> str:
    """The browser that is installed; `make browser` installs one."""
    for name in NAMES:
        result = shutil.which(name) or shutil.which(name, path=BUILT)
        if result:
            return result
    pytest.fail("no Chromium is found: run `make browser`")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """(browser, its event loop), started by the first test that wants it."""
    from playwright.sync_api import sync_playwright

    driver = sync_playwright().start()
    # Playwright leaves its loop running in this thread, where other tests want none.
    loop = asyncio._get_running_loop()
    made = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
    asyncio._set_running_loop(None)
    yield made, loop
    asyncio._set_running_loop(loop)
    made.close()
    driver.stop()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page in a profile of its own. `page.expected` lists parts of errors that the test wants."""
    made, loop = browser
    asyncio._set_running_loop(loop)
    context = made.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(300_000)  # a busy machine is slow, and no page is wrong for it
    page = context.new_page()
    complaints: list[str] = []
    page.expected = []
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    context.on("request", lambda request: _strange(request.url) and complaints.append(request.url))
    try:
        yield page
    finally:
        context.close()
        asyncio._set_running_loop(None)
    left = [c for c in complaints if not any(part in c for part in page.expected)]
    assert not left, left


def wait_until(page: Any, condition: Callable[[], Any]) -> None:
    """Waits for what no locator can wait for, as long as a locator would."""
    for _ in range(30_000):
        if condition():
            return
        page.wait_for_timeout(10)
    pytest.fail("it does not come")


def _strange(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme in ("file", "data", "blob", "about"):
        return False
    return parts.hostname not in LOCAL


def fill_query(page: Any, text: str) -> None:
    """Type a query into the view Your data, and wait until the page has answered it."""
    page.get_by_test_id("data-query").fill(text)
    answer = page.get_by_test_id("data-answer")
    wait_until(answer.page, lambda: answer.get_attribute("data-query") == text)
