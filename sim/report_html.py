"""Pieces of HTML: everything that is shown passes `escape`, and every figure carries its value and where it stands."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import attrs

from .plot_texts import PLOT_TEXTS
from .study_answer import Figure, Sentence, at_path


@attrs.frozen
class Html:
    """Text that is HTML already; plain strings are not, and are escaped where they are put into a page."""

    code: str

    def __str__(self) -> str:
        """The code."""
        return self.code


Content = str | Html


def html(content: Content) -> str:
    """The code of a piece of content."""
    return content.code if isinstance(content, Html) else escape(content)


def joined(parts: Iterable[Content]) -> Html:
    """Pieces one after the other."""
    return Html("".join(map(html, parts)))


def tag(name: str, *content: Content, **attributes: str | None) -> Html:
    """`<name attribute="...">content</name>`; `class_` and `data_x` stand for `class` and `data-x`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{joined(content)}</{name}>")


def breakable(name: str) -> Html:
    """A name that a narrow column may break after its underscores."""
    return Html(html(name).replace("_", "_<wbr>"))


def data(document: dict[str, Any], path: str, show: Callable[[Any], str]) -> Html:
    """A figure of the document: its value for programs, as shown for people, and its path."""
    value = at_path(document, path)
    return tag("data", show(value), value=_plain(value), data_path=path)


def answered(sentence: Sentence) -> Html:
    """A sentence in which every figure carries its value and its name among the answer's figures."""
    return joined(_figure(part) if isinstance(part, Figure) else part for part in sentence.parts)


def _figure(figure: Figure) -> Html:
    path = f"answer.figures.{figure.name}.value"
    return tag("data", figure.shown, value=_plain(figure.value), data_path=path, title=f"{figure.source}")


def _plain(value: Any) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Content]], left: Sequence[int] = (0,)) -> Html:
    """A table that scrolls sideways where the page is narrow; the first cell of a row is its heading."""
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
    """The place of a plot: drawn by the page's script, described in words, and saved by its buttons."""
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
    """A list."""
    return tag("ul", *(tag("li", item) for item in items))
