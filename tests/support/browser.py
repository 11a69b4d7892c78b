"""A real browser for tests: the system's chromium, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

PROGRAMS = ("chromium", "google-chrome")
ALONE = [
    "--no-sandbox",  # which a root's browser cannot have
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The test is skipped where there is no browser to start."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no browser here: chromium is not installed (`make test` does it for root)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ALONE)
        yield browser
        browser.close()
