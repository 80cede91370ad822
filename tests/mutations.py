"""Broken input: what a program wrote, altered in a few places, and what no program wrote."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

ODD = (
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b'"',
    b"\r",
    b"\n",
    b",",
    b"..",
    b"/",
    b"[" * 2_000,
    b"9" * 400,
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
)
"""Bytes that parsers trip over: not UTF-8, half a surrogate pair, what opens and separates, numbers without end."""


def _altered(content: bytes, changes: Sequence[tuple[float, int, bytes, int]]) -> bytes:
    for where, taken, put, times in changes:
        at = int(where * len(content))
        content = content[:at] + put * times + content[at + taken :]
    return content


def flip_a_bit(path: Path, among: bytes) -> None:
    """In the midst of these bytes of the file."""
    content = bytearray(path.read_bytes())
    content[content.index(among) + len(among) // 2] ^= 4
    path.write_bytes(content)


_changes = st.tuples(st.floats(0, 1), st.integers(0, 40), st.sampled_from(ODD) | st.binary(max_size=8), st.integers(0, 2))


def mutated(*whole: bytes) -> st.SearchStrategy[bytes]:
    """One of `whole` with pieces taken out and put in, cut off or said twice."""
    altered = st.builds(_altered, st.sampled_from(whole), st.lists(_changes, min_size=1, max_size=4))
    cut = st.builds(lambda content, where: content[: int(where * len(content))], st.sampled_from(whole), st.floats(0, 1))
    return altered | cut


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
