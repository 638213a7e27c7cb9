"""The code of README, tutorials and how-tos runs as it stands; links of README and its like lead somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import liger_kernels
from tests.pages import PAGES, ROOT, blocks, write_modules
from tests.patching_checks import tiny
from tools import longest_sequences, models_picture, prose

# The only blocks that may stay unrun here: page, package. trl is in the cells of the matrix.
UNRUN = {("docs/how-to/trainers.md", "trl"), ("docs/how-to/packed-samples.md", "trl")}
WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.fixture
def as_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder that has the pages' modules; afterwards the process is as it was."""
    names = write_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    random = torch.get_rng_state()
    yield
    torch.set_rng_state(random)
    liger_kernels.revert_liger_kernel()
    for name in list(sys.modules):
        if name in names or name.partition(".")[0] == "trl":  # a page wants to be the first to import trl
            del sys.modules[name]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, as_a_reader: None) -> None:
    namespace: dict[str, object] = {"__name__": "page"}
    if page.stem == "README":
        namespace["model"] = tiny("llama")  # "any Hugging Face causal LM"
    for block in blocks(page):
        if block.module:
            importlib.import_module(block.module)
        elif not block.needs or importlib.util.find_spec(block.needs):
            code = "\n" * (block.line - 1) + block.code  # so that a traceback has the page's line
            exec(compile(code, str(page), "exec"), namespace)


def test_only_known_blocks_need_what_the_tests_lack() -> None:
    needing = {(str(page.relative_to(ROOT)), block.needs) for page in PAGES for block in blocks(page) if block.needs}
    assert needing == UNRUN


def headings(page: Path) -> set[str]:
    """The anchors of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_pages_outside_of_the_site(page: str) -> None:
    """mkdocs checks those inside of it."""
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", (ROOT / page).read_text(encoding="utf-8")):
        found = ROOT / (target or page)
        assert found.exists(), f"{page}: {target}"
        assert not anchor or anchor in headings(found), f"{page}: {target}#{anchor}"


def test_functions_that_pages_name_are_there() -> None:
    """A page once showed what a patch prints that was gone, and its command could not run."""
    named = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        words = r"\b(?:tests|convergence|matrix|liger_kernels)(?:\.\w+)*:[a-z_]\w*"
        named |= set(re.findall(words, page.read_text(encoding="utf-8")))
    assert len(named) > 10
    for name in sorted(named):
        module, _, function = name.partition(":")
        assert hasattr(importlib.import_module(module), function), name


def test_no_page_takes_longer_to_read_than_ten_minutes() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        words = re.sub(r"[|]|---", " ", page.read_text(encoding="utf-8")).split()
        assert len(words) <= 2000, f"{page}: {len(words)} words, at most 2000; split it"


def test_what_tools_write_is_what_the_pages_say() -> None:
    page, picture = ROOT / models_picture.PAGE, (ROOT / models_picture.PAGE).with_suffix(".svg")
    drawn = models_picture.svg(page.read_text(encoding="utf-8"))
    assert drawn == picture.read_text(encoding="utf-8"), "python -m tools.models_picture"


@pytest.mark.slow
def test_the_longest_sequences_are_the_longest() -> None:
    """Of each GPU, one row is counted, each time another one. All of them take minutes."""
    page = (ROOT / "docs/evidence/longest-sequences.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (?:Q?LoRA, rank 16|full, AdamW).*\|$", page, re.MULTILINE)
    cells = {name: numbers for name, *numbers in ([cell.strip() for cell in row.split("|")[1:-1]] for row in table)}
    assert [*cells] == [*longest_sequences.ways()]
    offload, tiles = longest_sequences.LESS
    names = ["QLoRA, rank 16", "LoRA, rank 16" + offload, "full, AdamW" + tiles]
    program = (
        "import sys; from tools.longest_sequences import peak_of, ways; "
        "pairs = zip(sys.argv[1::2], map(int, sys.argv[2::2])); "
        "[print(*map(peak_of(ways()[name]), (n, n + 256))) for name, n in pairs]"
    )
    fitting = [cells[name][n].replace(",", "") for n, name in enumerate(names)]
    asked = [word for pair in zip(names, fitting, strict=True) for word in pair]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}  # a GPU's tiles
    command = [sys.executable, "-c", program, *asked]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    peaks = [int(peak) for peak in done.stdout.split()]
    for gib, fits, longer in zip(longest_sequences.CARDS.values(), peaks[::2], peaks[1::2], strict=True):
        assert fits <= longest_sequences.capacity(gib) < longer, "python -m tools.longest_sequences"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", "The buffer is let go.\n", "1: 'let go': write freed"),
        ("page.md", "It takes some 20 seconds.\n", "1: 'some 20': write about"),
        ("page.md", "one\n\n" + 21 * "long " + "\n", "3: 105 characters"),
        ("module.py", '"""One.\n\nA door to two.\n"""\n', "3: 'door': write alias"),
        ("module.py", 'def f():\n    """In ratio to it."""\n', "2: 'In ratio to': write relative to"),
        ("page.md", "```\nlet go\n```\n`a door` for some reason\n", None),
        ("page.md", "| " + 30 * "cell " + "|\n", None),
        ("module.py", 'door = "let go"  # beside\n', None),
    ],
)
def test_the_prose_check_finds_words_and_leaves_code_and_tables(
    name: str, text: str, found: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    findings = [finding.removeprefix(f"{tmp_path / name}:") for finding in prose.findings(tmp_path / name)]
    assert len(findings) == (found is not None)
    assert found is None or findings[0].startswith(found)
