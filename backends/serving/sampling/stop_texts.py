"""The first stop text in an output that comes in pieces, and nothing behind its beginning.

Each character is looked at once for each stop text, however much of one is there already (Knuth, Morris and Pratt,
SIAM J. Comput. 6(2), 1977), so that no choice of stop texts makes a step long.
"""

from collections.abc import Sequence


class StopTexts:
    """Looks for stop texts, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """What may be given out, and the stop text that was found, if any; nothing may follow that."""
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
        """What was held back, when no text follows."""
        return self._held


class _Search:
    """One stop text, looked for in text that comes in pieces.

    Attributes:
        stop: the stop text.
        num_matched: characters at the end of the text so far that are its beginning: as many as can be.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # By length less 1 of a beginning of it: how much of its end is a shorter beginning; as far as was needed.
        self._borders = [0]

    def end_in(self, text: str) -> int | None:
        """How many characters of the next piece there are up to the stop text's end, if it ends in the piece."""
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
