"""Finds the first stop text in an output that arrives in pieces, and cuts the output at its beginning.

Each character is compared about once for each stop text, however much of it has matched (Knuth, Morris and Pratt,
SIAM J. Comput. 6(2), 1977), so that no choice of stop texts makes a step slow.
"""

from collections.abc import Sequence


class StopTexts:
    """Searches for stop texts, and holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Start with an empty output. None of `stops` may be empty."""
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown, and the stop text that was found, if any, which ends the search."""
        before, self._held = len(self._held), self._held + text
        found = [
            (before + end - len(search.stop), search.stop)
            for search in self._searches
            if (end := search.end_in(text)) is not None
        ]
        if found:
            place, stop = min(found)
            return self._held[:place], stop
        keep = max((search.num_matched for search in self._searches), default=0)
        given = self._held[: len(self._held) - keep]
        self._held = self._held[len(given) :]
        return given, None

    def end(self) -> str:
        """Return the text that was held back, when no text follows."""
        return self._held


class _Search:
    """The search for one stop text in text that arrives in pieces.

    Attributes:
        stop: the stop text.
        num_matched: length of the longest end of the text so far that is a beginning of the stop text.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # At index n - 1: how much of the end of the stop text's first n characters is a shorter beginning of it, for
        # as many n as were needed.
        self._borders = [0]

    def end_in(self, text: str) -> int | None:
        """Return how many characters of the next piece belong to the stop text or precede it, if it ends there."""
        stop, matched, place = self.stop, self.num_matched, 0
        while place < len(text):
            if not matched:
                place = text.find(stop[0], place)
                if place < 0:
                    break
            while matched and stop[matched] != text[place]:
                matched = self._border(matched)
            matched += stop[matched] == text[place]
            place += 1
            if matched == len(stop):
                self.num_matched = matched
                return place
        self.num_matched = matched
        return None

    def _border(self, length: int) -> int:
        stop, borders = self.stop, self._borders
        while len(borders) < length:
            border = borders[-1]
            while border and stop[border] != stop[len(borders)]:
                border = borders[border - 1]
            borders.append(border + (stop[border] == stop[len(borders)]))
        return borders[length - 1]
