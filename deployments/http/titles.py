"""Find items by their titles: `TitleIndex(catalogue).find("wars", 10)` gives their places in `catalogue.items`.

All titles, folded, stand in one text, a line each. A search scans it three times, at the speed of memory (30 MB for a million titles): for
titles that begin with the query, then for those with a word that does, then for those that hold it; each in the catalogue's order. It scans
a part at a time, between which other threads have their turns.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, chain, islice

from cluster.dataset import Catalogue

AT_ONCE = 2**20
"""Letters that are searched without another thread's turn, in some tenths of a millisecond."""
_BREAKS = re.compile(r"[\s\x00-\x1f]+")


def folded(text: str) -> str:
    """The text without case, accents and doubled spaces: "  Amélie" -> "amelie"."""
    if not text.isascii():
        text = "".join(one for one in unicodedata.normalize("NFKD", text) if not unicodedata.combining(one))
    return _BREAKS.sub(" ", text).strip().casefold()


class TitleIndex:
    """The titles of one catalogue, to which it does not refer. Building it takes about two seconds for a million; searching may be done by
    many threads.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        lines = [folded(item.title) for item in catalogue.items]
        self._text = "\n" + "\n".join(lines) + "\n"
        self._starts = list(accumulate((len(line) + 1 for line in lines), initial=1))[:-1]  # where each title begins in the text

    def find(self, query: str, limit: int) -> list[int]:
        """The places in `catalogue.items` of the best `limit` items; titles that begin with the query come first. Without a query, those of
        the first items.
        """
        wanted = folded(query)
        if not wanted:
            return list(range(min(limit, len(self._starts))))
        ranked = chain(self._places(f"\n{wanted}"), self._places(f" {wanted}"), self._places(wanted))
        return list(islice(_new(ranked), limit))

    def _places(self, wanted: str) -> Iterator[int]:
        """The places of the titles that hold the text, each once."""
        position = self._position(wanted, 0)
        while position >= 0:
            # the break before a title belongs to the title that follows it
            place = bisect_right(self._starts, position + wanted.startswith("\n")) - 1
            yield place
            following = self._starts[place + 1] - 1 if place + 1 < len(self._starts) else len(self._text)
            position = self._position(wanted, following)

    def _position(self, wanted: str, start: int) -> int:
        """Where the text holds `wanted` next; -1: nowhere."""
        for begin in range(start, len(self._text), AT_ONCE):
            if (position := self._text.find(wanted, begin, begin + AT_ONCE + len(wanted) - 1)) >= 0:
                return position
        return -1


def _new(places: Iterator[int]) -> Iterator[int]:
    """The places without repetitions."""
    seen: set[int] = set()
    for place in places:
        if place not in seen:
            seen.add(place)
            yield place
