"""The report of a run: a page that a real browser shows on a phone, and Markdown and JUnit XML of the same records."""

from __future__ import annotations

import math
import re
import sys
from xml.etree import ElementTree

import pytest

from convergence.__main__ import main
from convergence.arms.quantities import Failure, Finding
from convergence.models.models import MODELS
from convergence.report import html, report
from convergence.report.records import Record, Statistic, write
from tests import browser
from tests.suite import assert_refused, collect

STEPS = [f"{phase}: step {i}" for phase in ("initial", "SGD", "AdamW") for i in range(6)]
NASTY = "<script>alert('x')</script> & \"quotes\" | ` ```` \x00\x1b[31m"
LONG = "gradient of model.layers.0." + "a_very_long_module_name_without_an_end." * 4 + "weight"


def case(model: str, dtype: str, patch: str = "convergence.patches:fused_linear", **fields) -> Record:
    """A record as a run leaves it, without the run."""
    quantities = [f"gradient of model.layers.{i}.self_attn.q_proj.weight" for i in range(30)]
    kinds = {
        "error ratio": (1.1, 2.4),
        "largest error ratio": (1.2, 2.8),
        "gain": (3e-8, 2.7e-7),
        "gain against the others": (2e-8, 9e-8),
    }
    complete = {
        "statistics": [
            Statistic(q, STEPS[i % 18], kind, value * (1 - i / 60), bound)
            for kind, (value, bound) in kinds.items()
            for i, q in enumerate(quantities)
        ],
        "losses": {
            arm: {step: 6 - i / 4 + error * (i % 3) for i, step in enumerate(STEPS)}
            for arm, error in (("truth", 0.0), ("baseline", 1e-6), ("candidate", 2e-6))
        },
        "census": {"rms_norm": 5, "rope": 2},
        "launches": {"_rms_norm_fwd_kernel": 130},
        "fallbacks": {"outputs.logits was read": 1},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
        "seconds": 4.2,
    }
    return Record(model, dtype, patch, **{"profile": "hard", "device": "cpu", "seed": 0, **complete, **fields})


def failed(**fields) -> Record:
    failures = [Failure(f"{LONG} {i // 2}", STEPS[i % 18], Finding.GAIN, f"off by {i}", "0.01") for i in range(24)]
    who = {"kernel": "rms_norm", "module": LONG, "pass": "backward", "step": STEPS[0], "tensor": LONG, "note": "alone"}
    given = {"verdict": "different", "reason": "gradient gain off by 1", "failures": failures, "blame": [who]}
    return case("gemma", "bfloat16", "tests.mutants:scaled", **given, **fields)


UNTRAINED = {"losses": {}, "statistics": [], "census": {}, "launches": {}, "fallbacks": {}}
ABSENT = case(
    "gemma3", "float32", "package:absent", verdict="absent", reason="this transformers has no model", **UNTRAINED
)
BROKEN = case(
    "llama-tied",
    "float32",
    "tests.mutants:nan",
    verdict="different",
    reason=NASTY,
    failures=[Failure(NASTY, "", Finding.RAISED, "x" * 300, "")],
    notes=[NASTY, "y" * 400],
    losses={**{arm: {"a: 1": 0.0, "a: 2": 1.0} for arm in ("truth", "baseline")}, "candidate": {"a: 1": math.nan}},
    statistics=[Statistic("loss", "a: 1", "gain", math.nan, 0.0)],
)
CANNOT = case(
    "llama-tied",
    "float32",
    "package:patch",
    verdict="cannot run",
    reason="no kernel for this device",
    failures=[Failure("candidate", "", Finding.CANNOT_RUN, "no kernel", "")],
    **UNTRAINED,
)
ALL = [
    case(model, dtype, f"convergence.patches:{loss}")
    for model in MODELS
    for dtype in ("float32", "bfloat16")
    for loss in ("fused_linear", "fused_cross_entropy")
]
MIXED = [*ALL, failed(), ABSENT, BROKEN, CANNOT]


# The least contrast of any text with what lies behind it, and the colour behind all.
CONTRAST = """
const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
const drawn = color => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
                         return [...canvas.getImageData(0, 0, 1, 1).data]; };
const known = {}, rgb = color => known[color] ??= drawn(color);
const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const behind = e => { const c = rgb(getComputedStyle(e).backgroundColor);
                      return c[3] == 255 ? c : behind(e.parentElement); };
const ratio = e => { const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
                     return (a + .05) / (b + .05); };
const texts = [...document.querySelectorAll('h1, p, .badge, .soft, summary, td, small, .number, dt, dd')];
return [Math.min(...texts.map(ratio)), getComputedStyle(document.body).backgroundColor];
"""


@pytest.mark.slow
def test_a_browser_shows_it(tmp_path):
    """Without an error or a request, which the page's own policy forbids and the console would name; as wide as a
    phone, with every case open; in both schemes with the contrast of 4.5 that WCAG asks for; by keyboard."""
    page = tmp_path / "report.html"
    page.write_text(html.page([*MIXED, HISTORY[-1]], HISTORY), encoding="utf-8")
    with browser.chromium(tmp_path / "profile") as shown:
        run = shown.execute_script
        backgrounds = set()
        for scheme in ("light", "dark"):
            browser.resize(shown, 360, scheme)
            shown.get(page.as_uri())
            assert shown.get_log("browser") == []
            assert run("return performance.getEntriesByType('resource').length") == 0
            for opened in ("false", "true"):
                run(f"document.querySelectorAll('details').forEach(each => each.open = {opened})")
                assert run("return [innerWidth, document.documentElement.scrollWidth]") == [360, 360]
            least, background = run(CONTRAST)
            assert least >= 4.5
            backgrounds.add(background)
        assert len(backgrounds) == 2
        assert shown.title == f"3 of {len(MIXED) + 1} cases failed"
        heights = run("return [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)")
        assert min(heights) > 100
        run("document.querySelectorAll('details').forEach(each => each.open = false)")
        for _ in range(2):  # Enter opens what Tab reaches, and closes it again, or the next Tab would go into it
            shown.switch_to.active_element.send_keys("\ue004")
            summary = shown.switch_to.active_element
            outline = (
                "const s = getComputedStyle(arguments[0]); return [s.outlineStyle, parseFloat(s.outlineWidth) >= 2]"
            )
            assert run(outline, summary) == ["solid", True]
            for opened in (True, False):
                summary.send_keys("\ue007")
                assert run("return arguments[0].parentElement.open", summary) is opened
        # Both checks can fail: what is fetched is said, what is too wide is seen.
        run("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
        assert any("Content Security Policy" in entry["message"] for entry in shown.get_log("browser"))
        run("document.body.append(Object.assign(document.createElement('pre'), {style: 'width: 400px'}))")
        assert run("return document.documentElement.scrollWidth") >= 400


def test_the_page_needs_nothing_else_is_small_and_has_every_case():
    page = html.page(MIXED)
    assert not re.search(r"<script|<link[^>]+stylesheet|@import|https?://|url\(", page.replace("&lt;script", ""))
    assert len(page) < 5e6
    found = re.findall(r"(?s)<summary.*?</summary>", page.replace("<wbr>", ""))
    summaries = [" ".join(re.sub("<[^>]*>", " ", summary).split()) for summary in found]
    for record in MIXED:
        name = f"{record.model} {record.dtype} {record.patch.rpartition(':')[2]}"
        assert any(name in summary and record.verdict in summary for summary in summaries), name


def test_the_page_has_what_each_case_shows_and_the_worst_first():
    page = html.page([*ALL[:2], failed()])
    assert page.index("scaled") < page.index("fused_linear")
    assert page.index("layers.<wbr>0") < page.index("layers.<wbr>29")
    one = html.page([failed()]).replace("<wbr>", "")
    for part in ("Who did it", "rms_norm", "backward", "12 failures", "off by 14", "and 1 more", "4 more"):
        assert part in one
    assert "Replaced modules" in one
    assert "_rms_norm_fwd_kernel" in one
    assert one.count("<polyline") == 3 * 3 + 2 * 3  # three phases of three arms, and of two distances


def test_a_page_without_records_or_jinja2_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="no record to report"):
        html.page([])
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match="needs jinja2, which is not installed here: pip install jinja2"):
        html.page(ALL)


def test_junit_has_a_case_per_record_and_the_failure_table():
    suite = ElementTree.fromstring(report.junit(MIXED)).find("testsuite")
    assert suite is not None
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == [str(len(MIXED)), "3", "1"]
    cases = {case.get("name"): case for case in suite}
    assert len(cases) == len(MIXED)
    failure = cases["gemma/bfloat16/scaled"].find("failure")
    assert failure is not None
    assert failure.text == report.failure(failed())
    for part in ("off by 0", "0.01", "rms_norm", "backward"):
        assert part in str(failure.text)
    skipped = cases["gemma3/float32/absent"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == ABSENT.reason


def test_markdown_has_a_row_per_record_and_what_failed():
    text = report.markdown(MIXED)
    assert text.startswith(f"## Convergence: 3 of {len(MIXED)} cases failed")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(MIXED)
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 12 for row in rows)
    assert rows[2].startswith("| gemma/bfloat16/scaled") and "**different**" in rows[2]  # noqa: PT018
    assert report.failure(failed()) in text
    assert "none failed" in report.markdown(ALL)
    # A fence is longer than any that is quoted in it.
    assert "\n`````\n" in text


def test_the_command_reports_merged_records(tmp_path, capsys):
    """Of two machines, the newest of each case."""
    write(failed(at="2026-01-01T00:00:00+00:00"), tmp_path / "one")
    write(case("gemma", "bfloat16", "tests.mutants:scaled", at="2026-01-02T00:00:00+00:00"), tmp_path / "two")
    write(case("gemma", "float32"), tmp_path / "two")
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "2 cases, none failed" in capsys.readouterr().out
    made = {name: tmp_path / "out" / f"report.{name}" for name in ("html", "markdown", "junit")}
    options = [part for name, path in made.items() for part in (f"--{name}", str(path))]
    assert main(["report", str(tmp_path / "one"), *options]) == 0
    assert "1 of 1 cases failed" in made["html"].read_text()
    assert "1 of 1 cases failed" in made["markdown"].read_text()
    assert ElementTree.parse(made["junit"]).getroot().get("failures") == "1"
    assert capsys.readouterr().out == ""


def drifting(day: int, transformers: str = "5.23.0", **fields) -> Record:
    """A case whose error ratio and costs grow day by day."""
    given = {
        "statistics": [
            Statistic("loss", STEPS[0], "error ratio", 1 + day / 10, 2.4),
            Statistic("loss", STEPS[0], "gain", day * 1e-8, 2.7e-7),
        ],
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": transformers},
        "at": f"2026-01-{day:02}T00:00:00+00:00",
        "costs": {arm: {"step, ms": 10.0 + day, "peak, GiB": 1.0} for arm in ("truth", "baseline", "candidate")},
    }
    return case("gemma", "float32", **{**given, **fields})


HISTORY = [drifting(day) for day in range(1, 7)] + [drifting(day, "5.24.0") for day in range(7, 11)]


def test_a_trend_shows_drift_by_date_and_version():
    """Four charts, two lines in each version; the candidate's line goes up, time after time."""
    without = html.page(HISTORY[-1:])
    assert "Trend over" not in without
    text = html.page(HISTORY[-1:], [*HISTORY, case("llama-tied", "float32")])
    assert "Trend over 10 records" in text
    assert text.count("<polyline") - without.count("<polyline") == 2 * 4 * 2
    (ratios,) = re.findall(r"(?s)<figcaption>Worst error ratio</figcaption>(.*?)</figure>", text)
    points = re.findall(r'<polyline class="candidate" points="([^"]*)"', ratios)
    heights = [[float(point.split(",")[1]) for point in line.split()] for line in points]
    assert [len(line) for line in heights] == [6, 4]
    assert all(line == sorted(line, reverse=True) and len({*line}) == len(line) for line in heights)
    for part in ("transformers 5.23.0: 2026-01-01 00:00 equal: bound 2.4, candidate 1.1", "transformers 5.24.0"):
        assert part in ratios
    assert "<figcaption>Step, ms" in text
    assert "2026-01-10 00:00 equal: baseline 1, candidate 1" in text.partition("<figcaption>Peak, GiB")[2]
    on_a_cpu = [drifting(day, costs={"candidate": {"step, ms": 3.0}}) for day in range(1, 7)]
    assert [chart.title for chart in html._trends(on_a_cpu)] == ["Worst error ratio", "Worst gain", "Step, ms"]


def test_versions_that_run_side_by_side_have_a_line_each():
    mixed = [drifting(day, version) for day in range(1, 5) for version in ("5.22.0", "5.23.0")]
    charts = html._trends(mixed)
    assert [len(points.split()) for arm, points in charts[0].lines if arm == "candidate"] == [4, 4]
    assert [label for _, label in charts[0].phases] == ["transformers 5.22.0", "transformers 5.23.0"]


def test_a_record_without_statistics_is_a_gap():
    history = [HISTORY[0], drifting(2, statistics=[]), *HISTORY[2:4]]
    assert [len(points.split()) for arm, points in html._trends(history)[0].lines if arm == "candidate"] == [1, 2]


def test_the_command_draws_trends(tmp_path, monkeypatch):
    """One entry a case, whatever it ran on."""
    monkeypatch.chdir(tmp_path)
    for record in HISTORY:
        write(record, tmp_path / "records")
    assert main(["report", "records", "--trend"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Trend over 10 records" in page
    assert "1 cases, none failed" in page


def test_the_command_refuses_what_is_no_record(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SystemExit) as raised:
        main(["report", str(tmp_path), "--html", str(tmp_path / "report.html")])
    assert raised.value.code == 2
    assert "bad.json: field 'schema'" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_report_without_jinja2_is_a_usage_error(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    shown = "--report needs jinja2, which is not installed here: pip install jinja2"
    assert_refused(capfd, [shown], "--report", "report.html", "--device", "cpu")


def test_without_a_case_there_is_no_report(tmp_path, capfd):
    path = tmp_path / "report.html"
    assert collect("--report", str(path), "--device", "cpu") == pytest.ExitCode.OK
    assert "no case ran, so there is no report" in capfd.readouterr().out
    assert not path.exists()
