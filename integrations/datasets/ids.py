"""Ids that a request can name, and an event store can hold."""

from cluster.events.rules import LONGEST


def wrong_id(kind: str, text: str) -> str:
    """What is wrong with the id of a `user` or an `item`; nothing where it is "".

    A model would be trained on such an id, and no request could then name it.
    """
    if not text:
        return f"the {kind} id is empty"
    if len(text) > (longest := LONGEST[f"{kind}_id"]):
        return f"the {kind} id {text[:20]!r}... has {len(text)} characters, and a request can name {longest} at most; give it a shorter one"
    if "\0" in text:
        return f"the {kind} id {text[:20]!r} holds the character NUL, which no event store keeps"
    return ""
