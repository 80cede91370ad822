"""Ids that a request can name, and an event store can hold."""

from cluster.events.rules import LONGEST


def wrong_id(kind: str, text: str) -> str:
    """What is wrong with the id of a `user` or an `item`, the `kind`; "" where nothing is.

    A model could be trained on a wrong id, but no request could name it then.
    """
    if not text:
        return f"the {kind} id is empty"
    if len(text) > (longest := LONGEST[f"{kind}_id"]):
        return f"the {kind} id {text[:20]!r}... has {len(text)} characters, and a request can name {longest} at most; give it a shorter one"
    if "\0" in text:
        return f"the {kind} id {text[:20]!r} holds the character NUL, which no event store keeps"
    return ""
