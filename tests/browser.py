"""A real headless Chromium, with a console that can be read and a width that can be set."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A driver on a fresh ``profile`` folder. Without a browser the test is skipped, and fails where CI is set."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not (browser and driver):
        reason = "the report was opened in NO browser: chromium or chromedriver is not installed (see CONTRIBUTING.md)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    shown = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield shown
    finally:
        shown.quit()


def resize(shown: Any, width: int, scheme: str = "light") -> None:
    """Show pages ``width`` CSS pixels wide, on a phone below 500, in a "light" or a "dark" scheme."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    shown.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
    shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_feature]})
