"""Renders a study as one HTML page: the answer, the plots, the tables, the assumptions, the command.

The page needs no network. The same document always gives the same bytes.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from ..figures import Document, at_path, gib, memory, millions, percent, seconds, shown
from ..study.answer import Figure, Sentence
from ..study.sentences import answer_sentences
from .plots import PLOT_TEXTS, row_colour, study_plots
from .replay import LATENCIES


class Html(str):
    """Text that is already HTML. Other strings are escaped when they enter a page."""


Content = str
Shows = dict[str, Callable[[Any], str]]
COUNT = "{:,}".format


def html(content: Content) -> str:
    """The content as HTML code."""
    return content if isinstance(content, Html) else escape(content)


def joined(*parts: Content) -> Html:
    """Concatenate pieces of content."""
    return Html("".join(map(html, parts)))


def tag(name: str, *content: Content, **attributes: str | None) -> Html:
    """`<name attribute="...">content</name>`; `class_` is written as `class`, `data_x` as `data-x`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{joined(*content)}</{name}>")


def breakable(name: str) -> Html:
    """A name that may wrap after its underscores."""
    return Html(html(name).replace("_", "_<wbr>"))


def data(document: Document, path: str, show: Callable[[Any], str]) -> Html:
    """A figure of the document, shown for people, with its exact value and its path as attributes."""
    value = at_path(document, path)
    return tag("data", show(value), value=_plain(value), data_path=path)


def cells(document: Document, path: str, shows: Shows) -> list[Content]:
    """The figures below a path of the document: key -> how it is shown."""
    return [data(document, f"{path}.{key}", show) for key, show in shows.items()]


def answered(sentence: Sentence) -> Html:
    """A sentence whose figures have their value and their name as attributes."""
    return joined(*(_figure(part) if isinstance(part, Figure) else part for part in sentence.parts))


def _figure(figure: Figure) -> Html:
    path = f"answer.figures.{figure.name}.value"
    return tag("data", figure.shown, value=_plain(figure.value), data_path=path, title=f"{figure.source}")


def _plain(value: Any) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Content]], left: Sequence[int] = (0,)) -> Html:
    """A table that scrolls sideways on a narrow page; the first cell of a row is its heading."""
    classes = ["left" if index in left else None for index in range(len(columns))]
    head = [tag("th", column, scope="col", class_=kind) for column, kind in zip(columns, classes, strict=True)]
    body: list[Html] = []
    for row in rows:
        cells = [
            tag("td" if index else "th", cell, class_=kind, scope=None if index else "row")
            for index, (cell, kind) in enumerate(zip(row, classes, strict=True))
        ]
        body.append(tag("tr", *cells))
    shown = tag("table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("div", shown, class_="scroll", role="region", tabindex="0", aria_label=caption)


def plot(plot_id: str, *caption: Content) -> Html:
    """A placeholder that the page's script fills with a plot, with a description and buttons that save it."""
    text = PLOT_TEXTS[plot_id]
    place = tag("div", id=plot_id, class_="plot", role="img", aria_label=text.alt)
    buttons = [
        tag(
            "button",
            f"Save {kind.upper()}",
            type="button",
            data_save=plot_id,
            data_format=kind,
            aria_label=f"Save {text.name} as {kind.upper()}",
        )
        for kind in ("svg", "png")
    ]
    return tag("figure", place, tag("figcaption", *caption), tag("p", *buttons, class_="buttons"))


def bullets(items: Iterable[Content]) -> Html:
    """An unordered list."""
    return tag("ul", *(tag("li", item) for item in items))


PART_NAMES = {"plan": "Memory plan", "curve": "Hit-rate curve", "replay": "Replay", "compare": "Allocators compared"}
SHARES = (
    ("token_pct", "tokens"),
    ("reservation_pct", "reserved"),
    ("internal_pct", "internal"),
    ("external_pct", "external"),
)


def render_page(document: Document) -> str:
    """Render a study's document (`Study.to_dict`) as HTML that contains its style, script and plots."""
    plots = study_plots(document)
    sections = [
        ("answer", "The answer", _answer(document)),
        ("hit-rate", "Hit rate at every capacity", _curve(document, "plot-curve" in plots)),
        ("time", "Over time", _time(document)),
        ("latency", "Latency", _latency(document)),
        ("memory", "What fills the memory", _ledger(document)),
        ("allocators", "Paged and contiguous allocation", _compare(document)),
        ("what-if", "What changes the answer", _what_if(document)),
        ("assumptions", "Assumptions", _assumptions(document)),
        ("figures", "Every figure in the answer", _figures(document)),
        ("reproduce", "Reproduce this report", _reproduce(document)),
    ]
    written = [(anchor, title, content) for anchor, title, content in sections if content is not None]
    title = document["title"]
    lines = [title[line] for line in ("subtitle", "window") if line in title]
    return shell(
        title["heading"],
        title["heading"],
        lines,
        written,
        plots,
        "Written by kvledger. study.json beside this page has the same figures for programs.",
        _not_done(document),
    )


def shell(
    title: str,
    heading: str,
    lines: Sequence[str],
    sections: Sequence[tuple[str, str, Content]],
    plots: Document,
    footer: str,
    notice: Content = "",
) -> str:
    """A whole page: `sections` are (anchor, title, content), the first of which is the answer; it needs no network."""
    from plotly.offline import get_plotlyjs

    links = tag("ul", *(tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name, _ in sections))
    main = [
        tag("section", tag("h2", name, id=f"{anchor}-title"), content, id=anchor, aria_labelledby=f"{anchor}-title")
        for anchor, name, content in sections
    ]
    body = joined(
        tag("a", "Skip to the answer", class_="skip", href="#answer"),
        tag(
            "header",
            tag("h1", heading),
            *(tag("p", line, class_="subtitle") for line in lines),
            tag("nav", links, aria_label="Contents"),
        ),
        tag("main", notice, *main),
        tag("footer", footer),
    )
    return _shell(title, body, plots, get_plotlyjs())


def _shell(title: str, body: Html, plots: Document, plotly_js: str) -> str:
    here = files(__package__ or "")
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # Inside a script element, only "<" can end the element or open a comment.
    embedded = json.dumps(plots, allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"{tag('title', title)}\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="plots">{embedded}</script>\n'
        f"<script>{plotly_js}</script>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _not_done(document: Document) -> Html:
    notes = [f"{PART_NAMES[part]}: {reason}." for part, reason in document["not_done"].items()]
    if not notes:
        return Html("")
    return tag("div", tag("p", tag("strong", "Not in this report")), bullets(notes), class_="notice")


def _answer(document: Document) -> Html:
    cards = [
        tag("div", tag("dt", sentence.question), tag("dd", answered(sentence)))
        for sentence in answer_sentences(document)
    ]
    notes = [part["warnings"] for part in (document["plan"], document["curve"]) if part is not None]
    warnings = [warning for each in notes for warning in each]
    shown_warnings = [tag("h3", "Warnings"), bullets(warnings)] if warnings else []
    return joined(tag("dl", *cards, class_="answer"), *shown_warnings)


def _curve(document: Document, is_drawn: bool) -> Html | None:
    curve = document["curve"]
    if curve is None or not is_drawn:
        return None
    pool = curve["at_pool"]["lru"]["num_blocks"] if curve["at_pool"] is not None else None
    in_bytes = "bytes" in curve["infinite"]
    columns = ["blocks", "pools", "tokens", *(["memory"] if in_bytes else []), "LRU", "optimum", "LRU, of blocks"]
    shows: Shows = {"tokens": millions, **({"bytes": memory} if in_bytes else {}), "token_hit_rate": percent}

    def row(first: Sequence[Content], lru: str, optimum: str) -> list[Content]:
        rates = (f"{optimum}.token_hit_rate", f"{lru}.block_hit_rate")
        return [*first, *cells(document, lru, shows), *(data(document, rate, percent) for rate in rates)]

    rows: list[list[Content]] = []
    for index, point in enumerate(curve["points"]):
        lru, optimum = (f"curve.policies.{policy}.{index}" for policy in ("lru", "optimum"))
        pools = "-" if not pool else f"{point['num_blocks'] / pool:.2g}"
        rows.append(row([data(document, f"{lru}.num_blocks", COUNT), pools], lru, optimum))
    rows.append(row(["no limit", ""], "curve.infinite", "curve.infinite"))
    caption = (
        f"Share of all prompt tokens that the cache serves, in blocks of {curve['block_size']} tokens, when requests "
        "run one after the other. No eviction policy can serve more than the optimum, so the gap between the optimum "
        "and LRU is the most that a better policy can gain. The star is the hit rate of the replayed engine, where "
        "concurrent requests and their outputs share the pool."
    )
    return joined(plot("plot-curve", caption), table("Hit rates in percent of prompt tokens", columns, rows, left=()))


def _time(document: Document) -> Html | None:
    replay = document["replay"]
    if replay is None:
        return None
    caption = (
        "Blocks that requests hold (cached blocks with ref count 0 do not count), and requests running and waiting."
    )
    rows: list[list[Content]] = [
        ["KV cache in use, mean", data(document, "replay.kv_cache_usage.mean", percent)],
        ["KV cache in use, max", data(document, "replay.kv_cache_usage.max", percent)],
        ["requests waiting, max", data(document, "derived.most_waiting", "{:,.0f}".format)],
        ["requests finished", data(document, "replay.requests.finished", COUNT)],
        ["requests rejected (can never fit)", data(document, "replay.requests.rejected", COUNT)],
        ["preemptions", data(document, "replay.preemptions.total", COUNT)],
        ["preemptions of one request, max", data(document, "replay.preemptions.max_per_request", COUNT)],
        ["recomputed share of computed tokens", data(document, "replay.preemptions.recompute_tax", percent)],
        ["prompt tokens served from the cache", data(document, "replay.prefix_cache.hit_rate", percent)],
        ["output tokens per second", data(document, "replay.throughput.output_tokens_per_s", "{:,.1f}".format)],
        ["simulated time, s", data(document, "replay.simulated_seconds", "{:,.1f}".format)],
        ["engine steps", data(document, "replay.steps", COUNT)],
    ]
    return joined(plot("plot-time", caption), table("Replay results", ["", "value"], rows))


def _latency(document: Document) -> Html | None:
    if document["replay"] is None:
        return None
    meanings = {
        "ttft_s": "TTFT, from arrival to first token",
        "itl_s": "ITL, between two tokens",
        "tpot_s": "TPOT, mean ITL of a request",
        "e2e_s": "E2E, from arrival to last token",
    }
    columns = ("mean", "p50", "p90", "p99", "max")
    shows: Shows = {**dict.fromkeys(columns, seconds), "count": COUNT}
    rows = [[meanings[key], *cells(document, f"replay.{key}", shows)] for key, _ in LATENCIES]
    caption = (
        "Modelled time since the client's send, including the HTTP server and queueing. The assumptions list the costs."
    )
    pieces = [plot("plot-latency", caption), table("Latencies", ["", *columns, "samples"], rows)]
    if document["replay"]["distributions"]:
        how_to_read = "Shows the share of samples within each time. The counts are exact at the markers."
        pieces.append(plot("plot-distribution", how_to_read))
    return joined(*pieces)


def _ledger(document: Document) -> Html | None:
    plan = document["plan"]
    if plan is None:
        return None
    rows: list[list[Content]] = []
    for index, row in enumerate(plan["ledger"]):
        span = f"{gib(row['low_bytes'])} to {gib(row['high_bytes'])}" if row["low_bytes"] != row["high_bytes"] else ""
        path = f"plan.ledger.{index}"
        rows.append(
            [
                joined(tag("span", class_="swatch", style=f"background: var({row_colour(row['name'])})"), row["name"]),
                data(document, f"{path}.bytes", gib),
                data(document, f"{path}.share", lambda share: percent(share, 1)),
                row["source"],
                span,
                row["formula"],
            ]
        )
    columns = ["row", "bytes", "share", "source", "range", "formula"]
    caption = f"One {plan['device']['name']} GPU; the rows add up to the total memory that its driver reports."
    users = _users_table(document)
    return joined(
        plot("plot-ledger", caption),
        table("Memory ledger of one GPU", columns, rows, left=(0, 3, 4, 5)),
        *([users] if users else []),
    )


def _users_table(document: Document) -> Html | None:
    capacity = document["plan"]["capacity"]
    if not document["plan"]["fits"]:
        return None
    rows: list[list[Content]] = []
    for index, row in enumerate(capacity):
        path = f"plan.capacity.{index}"
        is_too_long = row["exceeds_max_model_len"]
        users: Content = "longer than max_model_len" if is_too_long else data(document, f"{path}.users", COUNT)
        rows.append([data(document, f"{path}.context_tokens", "{:,} tokens".format), users])
    return table("Concurrent requests if all have one length", ["context", "requests"], rows)


def _compare(document: Document) -> Html | None:
    compare = document["compare"]
    if compare is None:
        return None
    shows: Shows = {key: "{:.1f} %".format for key, _ in SHARES}
    shows |= {"mean_batch": "{:,.2f}".format, "max_batch": COUNT, "preemptions": COUNT}
    rows = [
        [row["name"], *cells(document, f"compare.allocators.{index}", shows)]
        for index, row in enumerate(compare["allocators"])
    ]
    columns = ["allocator", *(name for _, name in SHARES), "mean batch", "max batch", "preempted"]
    caption = (
        f"The same {compare['num_slots']:,} token slots under five allocators. All requests wait from the start; the "
        "averages cover the time while any request still waits. The mean batch is how many requests the memory lets "
        "run at once."
    )
    return joined(
        plot("plot-compare", caption), table("What fills the KV memory", columns, rows), bullets(compare["sentences"])
    )


def _what_if(document: Document) -> Html | None:
    if not document["what_if"]:
        return None
    shows: Shows = {"gpus": COUNT, "num_gpu_blocks": COUNT, "kv_cache_tokens": millions}
    shows["users_of_mean_length"] = lambda users: "-" if users is None else f"{users:,}"
    shows["lru_token_hit_rate"] = lambda rate: "-" if rate is None else percent(rate)
    rows = [
        [tag("code", row["option"]) if index else row["option"], *cells(document, f"what_if.{index}", shows)]
        for index, row in enumerate(document["what_if"])
    ]
    columns = ["changed option", "GPUs", "blocks", "tokens", "requests of mean length", "LRU hit rate"]
    note = tag(
        "p", "Each row has its own memory plan; the hit rate comes from the curve. Latency needs another replay."
    )
    return joined(note, table("This study with one option changed", columns, rows))


def _assumptions(document: Document) -> Html:
    out: list[Html] = []
    for part, name in PART_NAMES.items():
        payload = document[part]
        if payload is None:
            continue
        assumed = payload["assumptions"]
        if isinstance(assumed, dict):
            rows: list[list[Content]] = [[breakable(key), shown(value)] for key, value in assumed.items()]
            content = table(f"{name}: every parameter", ["assumption", "value"], rows, left=(0, 1))
        else:
            content = bullets(assumed)
        out += [tag("h3", name), content]
    return joined(*out)


def _figures(document: Document) -> Html:
    rows: list[list[Content]] = []
    for name, figure in document["answer"]["figures"].items():
        value = data(document, f"answer.figures.{name}.value", lambda _, text=figure["shown"]: text)
        rows.append([breakable(name), value, figure["unit"], tag("code", figure["source"]), figure["assumption"]])
    columns = ["figure", "value", "unit", "source in study.json", "assumes"]
    return tag(
        "details",
        tag("summary", f"{len(rows)} figures with unit, source and assumption"),
        table("Figures of the answer", columns, rows, left=(0, 2, 3, 4)),
    )


def _reproduce(document: Document) -> Html:
    steps = [tag("h3", step["question"]) for step in document["next"]]
    commands = [tag("pre", step["command"], tabindex="0") for step in document["next"]]
    following = joined(*(joined(*pair) for pair in zip(steps, commands, strict=True)))
    again = tag("pre", document["command"], tabindex="0")
    return joined(again, tag("p", "Try next:"), following) if document["next"] else again
