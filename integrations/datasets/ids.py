"""Ids that a request can name, and an event store can hold."""

import logging
import re
from collections.abc import Sequence

from cluster.events.rules import LONGEST

OF_SPREADSHEET = re.compile(r"\d(?:[.,](\d+))?E\+(\d\d)")
"""A long number as spreadsheets save it where its column has no format; its decimals, and its exponent."""
logger = logging.getLogger(__name__)


def wrong_id(kind: str, text: str) -> str:
    """What is wrong with the id of a `user` or an `item`, the `kind`; "" where nothing is.

    A model could be trained on a wrong id, but no request could name it then.
    """
    if not text.strip():
        return f"the {kind} id is empty{' but for blanks' if text else ''}"
    if len(text) > (longest := LONGEST[f"{kind}_id"]):
        return f"the {kind} id {text[:20]!r}... has {len(text)} characters, and a request can name {longest} at most; give it a shorter one"
    if "\0" in text:
        return f"the {kind} id {text[:20]!r} holds the character NUL, which no event store keeps"
    return ""


def tell_doubtful_ids(place: str, ids: Sequence[str]) -> None:
    """Warn of ids with blanks around them, which a request must name with these blanks, and of those that a spreadsheet has cut off."""
    if blank := next((text for text in ids if text != text.strip()), None):
        cure = "cut them when the file is written; where they stand around the delimiter, give that with them: --delimiter ' | '"
        logger.warning(
            "%s has ids with blanks around them, such as %r, which requests must name with the blanks; or %s", place, blank, cure
        )
    if number := next((text for text in ids if "E+" in text and OF_SPREADSHEET.fullmatch(text)), None):
        cure = "if digits are lost, format the column as a number without decimals, or as text, and save it again"
        logger.warning("%s has ids as spreadsheets save long numbers, such as %r; %s", place, number, cure)
