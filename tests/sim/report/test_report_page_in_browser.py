"""The page of a study in a real, headless Chromium: it draws, its console is clean, its figures are the JSON's."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvledger.sim.commands.cli import main
from kvledger.sim.figures import at_path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")

PLOTS = ("plot-curve", "plot-time", "plot-latency", "plot-distribution", "plot-ledger", "plot-compare")
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
COLOURS = {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 22, 28)"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small study."""
    folder = tmp_path_factory.mktemp("study")
    options = ["--workload", "conversation", "--limit", "80", "--model", "llama-3.1-8b", "--gpu", "H100"]
    argv, sys.argv = sys.argv, ["kvledger", "study", *options, "--block-size", "64", "--output", str(folder)]
    try:
        main()
    except SystemExit as exit_:
        assert not exit_.code
    finally:
        sys.argv = argv
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium with no way to any network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class OpenPage:
    """A page that was opened offline, with everything that its console said and every address that it asked for."""

    def __init__(self, browser: Any, report: Path, viewport: dict[str, int], scheme: str) -> None:
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, offline=True)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto((report / "index.html").as_uri())
        self.page.wait_for_function("document.querySelectorAll('.plot .main-svg').length >= 6")


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Any]:
    """Open the page at a width and in a colour scheme."""
    pages: list[OpenPage] = []

    def open_page(viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> OpenPage:
        pages.append(OpenPage(browser, report, viewport, scheme))
        return pages[-1]

    yield open_page
    for each in pages:
        each.context.close()


@pytest.fixture(scope="module")
def desktop(browser: Any, report: Path) -> Iterator[Any]:
    """One page for all tests that leave it as it is."""
    shown = OpenPage(browser, report, DESKTOP, "light")
    yield shown.page
    shown.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_every_plot_draws_the_console_is_clean_and_nothing_is_fetched(opened: Any, viewport: Any, scheme: str) -> None:
    shown = opened(viewport, scheme)
    for plot in PLOTS:
        marks = shown.page.locator(f"#{plot} .main-svg :is(.scatterlayer path, .barlayer path)")
        assert marks.count() >= 3, plot
        box = shown.page.locator(f"#{plot} .main-svg").first.bounding_box()
        assert box["width"] > 300, plot
        assert box["x"] + box["width"] <= viewport["width"], plot
    assert shown.said == []
    assert shown.asked == [shown.page.url]
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], "scrolls sideways"
    assert shown.page.evaluate("getComputedStyle(document.body).backgroundColor") == COLOURS[scheme]


def test_the_figures_on_the_page_equal_the_json(desktop: Any, report: Path) -> None:
    document = json.loads((report / "study.json").read_text())
    figures = desktop.eval_on_selector_all(
        "data[data-path]", "all => all.map(e => [e.dataset.path, e.value, e.innerText])"
    )
    assert len(figures) > 150
    for path, value, _ in figures:
        expected = at_path(document, path)
        assert (value == "") if expected is None else (type(expected)(value) == expected), path
    answers = desktop.eval_on_selector_all(".answer dd", "all => all.map(e => e.textContent)")
    assert answers == [sentence["text"] for sentence in document["answer"]["sentences"]]


def test_the_plots_show_the_figures_of_the_json(desktop: Any, report: Path) -> None:
    document = json.loads((report / "study.json").read_text())
    drawn = desktop.evaluate(
        "ids => Object.fromEntries(ids.map(id => [id, document.getElementById(id).data.map("
        "({name, x, y}) => ({name, x: Array.from(x), y: Array.from(y)}))]))",
        list(PLOTS),
    )
    lines = {line.get("name"): line for line in drawn["plot-curve"]}
    assert lines["LRU"]["y"] == [100 * point["token_hit_rate"] for point in document["curve"]["lru_line"]]
    assert lines["LRU with this pool"]["y"] == [100 * document["curve"]["at_pool"]["lru"]["token_hit_rate"]]
    series = document["replay"]["series"]
    for line, name in zip(drawn["plot-time"][1:], ("num_requests_running", "num_requests_waiting"), strict=True):
        assert line["y"] == series[name]
    latency = {line.get("name"): line for line in drawn["plot-latency"]}
    assert latency["p99"]["x"] == [document["replay"][key]["p99"] for key in ("e2e_s", "tpot_s", "itl_s", "ttft_s")]
    assert sum(bar["x"][0] for bar in drawn["plot-ledger"]) * 2**30 == pytest.approx(
        document["plan"]["device"]["total_bytes"]
    )
    assert [bar["x"] for bar in drawn["plot-compare"]] == [
        [row[key] for row in reversed(document["compare"]["allocators"])]
        for key in ("token_pct", "reservation_pct", "internal_pct", "external_pct")
    ]


def test_the_page_follows_a_change_of_the_colour_scheme(opened: Any) -> None:
    shown = opened(DESKTOP, "light")
    colour = "document.getElementById('plot-curve').layout.font.color"
    light = shown.page.evaluate(colour)
    shown.page.emulate_media(color_scheme="dark")
    shown.page.wait_for_function(f"{colour} !== {json.dumps(light)}")
    assert shown.page.evaluate("getComputedStyle(document.body).backgroundColor") == COLOURS["dark"]
    assert shown.said == []


def test_everything_can_be_reached_and_used_with_the_keyboard(opened: Any) -> None:
    page = opened().page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the answer"
    reached: set[str] = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName + ' ' + (document.activeElement.ariaLabel || '')"))
    assert {
        "BUTTON Save hit rate as SVG",
        "BUTTON Save allocators as PNG",
        "DIV Latencies",
        "SUMMARY ",
        "PRE ",
    } <= reached
    page.locator("summary").focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("table", name="Figures of the answer").is_visible()


@pytest.mark.parametrize(("kind", "start"), [("SVG", b"<svg"), ("PNG", b"\x89PNG")])
def test_a_plot_can_be_saved(desktop: Any, tmp_path: Path, kind: str, start: bytes) -> None:
    with desktop.expect_download() as download:
        desktop.get_by_role("button", name=f"Save hit rate as {kind}").click()
    download.value.save_as(tmp_path / "plot")
    content = (tmp_path / "plot").read_bytes()
    assert content.startswith(start)
    assert len(content) > 5_000


def test_the_page_prints_in_light_colours_with_nothing_hidden(opened: Any) -> None:
    shown = opened(DESKTOP, "dark")
    page = shown.page
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == COLOURS["light"]
    assert page.get_by_role("table", name="Figures of the answer").is_visible()
    assert not page.get_by_role("button", name="Save hit rate as SVG").is_visible()
    assert page.evaluate("document.getElementById('plot-time').layout.width") <= 700
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == COLOURS["dark"]
    assert not page.get_by_role("table", name="Figures of the answer").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert shown.said == []
