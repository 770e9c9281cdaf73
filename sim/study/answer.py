"""The answer of a study: a few sentences, and behind each figure its unit, its source and what it assumes.

Every figure is taken from the study's document (the JSON), or computed from its figures by the formula that stands
as its source. Terminal, JSON and page tell the same sentences.
"""

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Figure:
    """One figure of the answer.

    Attributes:
        name: its key in the JSON.
        value: as in the JSON; None where there was nothing to measure.
        shown: as a person reads it.
        unit: of `value`.
        source: a path into the document, or a formula of such paths.
        assumption: what it rests on most.
    """

    name: str
    value: float | int | str | None
    shown: str
    unit: str
    source: str
    assumption: str

    def __str__(self) -> str:
        """As a person reads it."""
        return self.shown


@attrs.frozen
class Sentence:
    """A question and its answer: text and figures in turn."""

    question: str
    parts: tuple[str | Figure, ...]

    @property
    def text(self) -> str:
        """The answer as plain text."""
        return "".join(map(str, self.parts))

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures in the sentence."""
        return tuple(part for part in self.parts if isinstance(part, Figure))


def answer_as_dict(sentences: list[Sentence]) -> dict[str, Any]:
    """For JSON: `sentences` in order, and every figure in them once, by name."""
    figures = {figure.name: figure for sentence in sentences for figure in sentence.figures}
    return {
        "sentences": [
            {
                "question": sentence.question,
                "text": sentence.text,
                "figures": [figure.name for figure in sentence.figures],
            }
            for sentence in sentences
        ],
        "figures": {
            name: attrs.asdict(figure, filter=lambda field, _: field.name != "name") for name, figure in figures.items()
        },
    }
