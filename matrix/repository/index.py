"""When each release of a package was uploaded, as the package index that pip uses tells it (PEP 700)."""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from datetime import datetime

from matrix.repository.config import number

_ACCEPT = "application/vnd.pypi.simple.v1+json"
_DEFAULT = re.compile(r"\(default\s+(https?://\S+?)\)")  # of --index-url, as `pip download --help` tells it
_WITH_VERSION = re.compile(r"[A-Za-z0-9._]+?-([0-9]+(?:\.[0-9]+)+)(?:-.*\.whl|\.tar\.gz|\.zip)")


def indexes() -> list[str]:
    """The indexes of pip's configuration that can tell dates: those with an address of the web."""
    said = _pip()
    first = said.get("index-url") or "".join(_DEFAULT.findall(_run_pip("download", "--help"))[:1])
    urls = [*first.split(), *said.get("extra-index-url", "").split()]
    return [url.rstrip("/") for url in urls if url.startswith(("http://", "https://"))]


def _pip() -> dict[str, str]:
    """pip's configuration, by what a key ends in. Variables of the environment come last, and win."""
    lines = sorted(_run_pip("config", "list").splitlines(), key=lambda line: line.startswith(":env:"))
    pairs = [line.partition("=") for line in lines]
    return {key.rpartition(".")[2]: value.strip().strip("'\"") for key, _, value in pairs}


def _run_pip(*arguments: str) -> str:
    """What pip prints: this environment's, or the one on the path where uv made an environment without pip. Its help
    breaks no line inside of an address where the terminal is wide.

    Raises:
        ValueError: there is no pip.
    """
    # importlib.util asks a finder of setuptools, too, which then keeps setuptools from being imported in this process.
    has_pip = importlib.machinery.PathFinder.find_spec("pip") is not None
    here = [sys.executable, "-m", "pip"] if has_pip else [shutil.which("pip")]
    if not here[0]:
        raise ValueError(
            "pip is neither in this environment nor on the path, and its index tells release dates: add it"
        )
    return subprocess.run(
        [*here, *arguments], capture_output=True, text=True, env={**os.environ, "COLUMNS": "300"}
    ).stdout


@functools.cache
def uploads(package: str) -> dict[str, datetime]:
    """When the first file of each final release of ``package`` was uploaded, the oldest release first; releases that
    were yanked are left out.

    Raises:
        ValueError: no index has the package, or none tells dates; with what each said.
    """
    found: dict[str, datetime] = {}
    said, trusted = [], ssl.create_default_context(cafile=_pip().get("cert"))
    for url in indexes():
        address = f"{url}/{re.sub(r'[-_.]+', '-', package).lower()}/"
        try:
            request = urllib.request.Request(address, headers={"Accept": _ACCEPT})
            with urllib.request.urlopen(request, timeout=60, context=trusted) as got:
                files = json.load(got)["files"]
        except (urllib.error.URLError, ValueError, KeyError, TypeError) as error:
            said.append(f"{address}: {error}")
            continue
        for file in files:
            version = _WITH_VERSION.fullmatch(str(file.get("filename")))
            if version and file.get("upload-time") and not file.get("yanked"):
                at = datetime.fromisoformat(str(file["upload-time"]).replace("Z", "+00:00"))
                found[version[1]] = min(at, found.get(version[1], at))
        said.append(f"{address}: no final release has a date")
    if not found:
        raise ValueError(
            f"no index tells when {package} was released: {'; '.join(said) or 'pip has no index of the web'}"
        )
    return dict(sorted(found.items(), key=lambda item: number(item[0])))
