"""The page of a study: complete without a network, escaped, and with the figures of the JSON."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from kvledger.sim.commands.cli import main
from kvledger.sim.figures import at_path
from kvledger.sim.report.page import render_page, tag
from kvledger.sim.report.plots import logarithmic, study_plots

PLOTS = {"plot-curve", "plot-time", "plot-latency", "plot-distribution", "plot-ledger", "plot-compare"}
VOID = {"meta", "link", "br", "img", "wbr"}


class Page(HTMLParser):
    """Every element with its attributes and its own text, and whether all that opened was closed in order."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(code)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        text: list[str] = []
        self.elements.append((tag, {name: value or "" for name, value in attrs}, text))
        if tag not in VOID:
            self._open.append((tag, text))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag

    def handle_data(self, data: str) -> None:
        for _, text in self._open:
            text.append(data)

    def of(self, name: str) -> list[tuple[dict[str, str], str]]:
        return [(attributes, "".join(text)) for tag, attributes, text in self.elements if tag == name]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small study, run once."""
    folder = tmp_path_factory.mktemp("study")
    options = ["--workload", "conversation", "--limit", "80", "--model", "llama-3.1-8b", "--gpu", "H100"]
    argv, sys.argv = sys.argv, ["kvledger", "study", *options, "--block-size", "64", "--output", str(folder)]
    try:
        main()
    except SystemExit as exit_:
        assert not exit_.code
    finally:
        sys.argv = argv
    return json.loads((folder / "study.json").read_text())


@pytest.fixture(scope="module")
def page(document: dict[str, Any]) -> Page:
    return Page(render_page(document))


def test_every_figure_on_the_page_is_the_one_in_the_json(page: Page, document: dict[str, Any]) -> None:
    figures = [(attributes, text) for attributes, text in page.of("data") if "data-path" in attributes]
    assert len(figures) > 150
    for attributes, text in figures:
        value = at_path(document, attributes["data-path"])
        written = attributes["value"]
        assert written == ("" if value is None else repr(value) if isinstance(value, float) else str(value))
        assert text, attributes


def test_what_is_shown_is_the_value_in_its_unit(page: Page, document: dict[str, Any]) -> None:
    factors = {"GiB": 2**30, "TiB": 2**40, "%": 0.01, "ms": 1e-3, "M": 1e6, "s": 1, "tokens": 1, "": 1}
    checked = 0
    for attributes, text in page.of("data"):
        value = at_path(document, attributes["data-path"])
        match = re.fullmatch(r"([\d,]+(?:\.\d+)?) ?(GiB|TiB|%|ms|M|s|tokens|)", text)
        if match is None or not value:
            continue
        unit = "" if "_pct" in attributes["data-path"] else match.group(2)
        decimals = len(match.group(1).partition(".")[2])
        shown = float(match.group(1).replace(",", "")) * factors[unit]
        assert abs(shown - value) <= 0.51 * 10**-decimals * factors[unit], attributes
        checked += 1
    assert checked > 120


def test_the_plots_hold_the_figures_of_the_json(document: dict[str, Any]) -> None:
    plots = study_plots(document)
    assert plots.keys() == PLOTS
    lines = {line["name"]: line for line in plots["plot-curve"]["data"]}
    points = document["curve"]["lru_line"]
    assert lines["LRU"]["y"] == [100 * point["token_hit_rate"] for point in points]
    assert lines["LRU"]["x"] == [point["bytes"] / 2**30 for point in points]
    assert lines["replayed engine"]["y"] == [100 * document["replay"]["prefix_cache"]["hit_rate"]]
    here = document["curve"]["at_pool"]["lru"]["bytes"] / 2**30
    assert plots["plot-curve"]["layout"]["shapes"][0]["x0"] == here == lines["LRU with this pool"]["x"][0]
    assert plots["plot-time"]["data"][2]["y"] == document["replay"]["series"]["num_requests_waiting"]
    latency = {line.get("name"): line for line in plots["plot-latency"]["data"]}
    assert latency["p99"]["x"][-1] == document["replay"]["ttft_s"]["p99"]
    (ttft,) = [line for line in plots["plot-distribution"]["data"] if line["name"] == "TTFT"]
    counted = document["replay"]["distributions"]["ttft_s"]
    shares = dict(zip(counted["up_to_s"], counted["share"], strict=True))
    assert ttft["y"] == [100 * shares[limit] for limit in ttft["x"]]
    assert [limit for limit, share in shares.items() if 0 < share < 1] == ttft["x"][1:-1]
    ledger = {bar["name"]: bar["x"][0] * 2**30 for bar in plots["plot-ledger"]["data"]}
    assert ledger == {row["name"]: row["bytes"] for row in document["plan"]["ledger"]}
    tokens = plots["plot-compare"]["data"][0]["x"]
    assert tokens == [row["token_pct"] for row in reversed(document["compare"]["allocators"])]


def test_plotly_knows_every_attribute_of_the_plots(document: dict[str, Any]) -> None:
    from plotly.graph_objects import Figure

    def coloured(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: coloured(item) for key, item in value.items()}
        if isinstance(value, list):
            return [coloured(item) for item in value]
        return "#123456" if isinstance(value, str) and value.startswith("--") else value

    for plot in study_plots(document).values():
        assert Figure(coloured(plot)).data


def test_every_colour_of_a_plot_is_defined_for_light_and_dark(document: dict[str, Any], page: Page) -> None:
    used = set(re.findall(r'"(--[a-z-]+)"', json.dumps(study_plots(document))))
    style = page.of("style")[0][1]
    light, _, dark = style.partition("prefers-color-scheme: dark")
    assert len(used) >= 10
    for name in used:
        assert f"{name}:" in light
        assert f"{name}:" in dark


def test_the_page_loads_nothing(page: Page) -> None:
    for name, attributes, _ in page.elements:
        assert "src" not in attributes, name
        if name == "link":
            assert attributes == {"rel": "icon", "href": "data:,"}
        if name == "a":
            assert attributes["href"].startswith("#")
    style = page.of("style")[0][1]
    assert "url(" not in style
    assert "@import" not in style
    assert sum("Plotly" in text for _, text in page.of("script")) == 2, "plotly once, and the script that calls it"


def test_the_page_has_what_a_screen_reader_needs(page: Page) -> None:
    assert page.of("html")[0][0]["lang"] == "en"
    assert len(page.of("h1")) == len(page.of("main")) == len(page.of("title")) == 1
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [attributes["href"].removeprefix("#") for attributes, _ in page.of("a")]
    assert set(targets) <= set(ids)
    places = [attributes for attributes, _ in page.of("div") if attributes.get("class") == "plot"]
    assert {place["id"] for place in places} == PLOTS
    assert all(place["role"] == "img" and len(place["aria-label"]) > 60 for place in places)
    assert len(page.of("figcaption")) == len(PLOTS)
    assert len(page.of("caption")) == len(page.of("table")) >= 8
    assert all(attributes.get("scope") in ("row", "col") for attributes, _ in page.of("th"))
    regions = [attributes for attributes, _ in page.of("div") if attributes.get("class") == "scroll"]
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)


def test_the_answer_comes_first_and_every_assumption_is_there(page: Page, document: dict[str, Any]) -> None:
    headings = [text for _, text in page.of("h2")]
    assert headings[0] == "The answer"
    items = [text for _, text in page.of("li")]
    for part in ("plan", "curve", "compare"):
        assert set(document[part]["assumptions"]) <= set(items)
    cells = [text for _, text in page.of("th")]
    assert set(document["replay"]["assumptions"]) <= set(cells)
    written = [text for _, text in page.of("pre")]
    assert written == [document["command"], *(step["command"] for step in document["next"])]


def test_what_the_user_gave_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    trace = folder / "'\"><b>&amp;.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": i, "input_length": 100, "output_length": 5, "<i>": 1}) + "\n" for i in range(9)
        )
    )
    config = folder / "config.json"
    geometry = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "_name_or_path": "<script>alert(2)</script>",
    }
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"vocab_size": 100, "intermediate_size": 128, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    config.write_text(json.dumps(geometry | sizes | rest))
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(config), "--gpu", "H100", "--max-model-len", "2048"]
    monkeypatch.setattr(sys, "argv", ["kvledger", "study", str(trace), *options])
    try:
        main()
    except SystemExit as exit_:
        assert not exit_.code
    code = Path("kvledger-report/index.html").read_text()
    page = Page(code)
    assert {name for name, _, _ in page.elements}.isdisjoint({"img", "b", "i"})
    assert not any(name.startswith("on") for _, attributes, _ in page.elements for name in attributes)
    assert "<script>alert" not in code
    assert "&lt;img src=x onerror=alert(1)&gt;" in code
    assert any(str(trace.name) in text for _, text in page.of("h1"))


def test_the_plots_cannot_end_the_script_that_holds_them(document: dict[str, Any]) -> None:
    hostile = json.loads(json.dumps(document))
    hostile["plan"]["ledger"][0]["name"] = "</script><script>alert(3)</script>"
    scripts = Page(render_page(hostile)).of("script")
    assert len(scripts) == 3
    assert json.loads(scripts[0][1])["plot-ledger"]["data"][0]["name"] == hostile["plan"]["ledger"][0]["name"]


def test_a_page_of_what_is_done_so_far_says_what_is_missing(document: dict[str, Any]) -> None:
    partial = document | {"replay": None, "compare": None, "not_done": {"compare": "a < b", "replay": "interrupted"}}
    page = Page(render_page(partial))
    notices = [text for attributes, text in page.of("div") if attributes.get("class") == "notice"]
    assert len(notices) == 1
    assert "Allocators compared: a < b." in notices[0]
    assert "plot-time" not in {attributes.get("id") for _, attributes, _ in page.elements}


def test_attributes_and_content_are_escaped_unless_they_are_html_already() -> None:
    inner = tag("b", 'x "<&')
    assert str(inner) == "<b>x &quot;&lt;&amp;</b>"
    assert (
        str(tag("p", inner, "<", data_x='"', class_="a", hidden=None))
        == f'<p data-x="&quot;" class="a">{inner}&lt;</p>'
    )


def test_the_style_and_the_script_are_part_of_the_package() -> None:
    from importlib.resources import files

    for name in ("page.css", "page.js"):
        assert files("kvledger.sim.report").joinpath(name).is_file()


def test_a_logarithmic_axis_has_whole_numbers_at_its_ticks() -> None:
    axis = logarithmic([15.0, 700.0])
    shown = dict(zip(axis["tickvals"], axis["ticktext"], strict=True))
    assert {20.0: "20", 50.0: "50", 100.0: "100", 500.0: "500"}.items() <= shown.items()
    assert logarithmic([0.0, 0.004, 0.2])["ticktext"][:3] == ["0.001", "0.002", "0.005"]
    assert logarithmic([1e-3, 1e4])["ticktext"] == ["0.001", "0.01", "0.1", "1", "10", "100", "1,000", "10,000"]
