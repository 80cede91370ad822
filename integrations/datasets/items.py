"""Item tables: rows to a catalogue."""

from collections.abc import Callable, Container, Iterable, Sequence

from cluster.dataset import Catalogue
from cluster.values import Item
from integrations.datasets.ids import wrong_id
from integrations.datasets.options import BadRows
from integrations.datasets.text import Row

ItemOf = Callable[[Sequence[str]], Item]


def collect_items(
    place: str, rows: Iterable[Row], *, width: int, item_of: ItemOf, bad_rows: BadRows, taken: Container[str] = ()
) -> list[Item]:
    """The items of a table, in file order. A row is bad with a wrong id, with one that is `taken`, or with other than `width` fields."""
    items: dict[str, Item] = {}
    for row in rows:
        fault = row.fault or (f"{len(row.fields)} fields where there should be {width}" if len(row.fields) != width else "")
        item = item_of(row.fields) if not fault else Item("", "")
        if not fault and (wrong := wrong_id("item", item.item_id)):
            fault = wrong
        elif item.item_id in items or item.item_id in taken:
            fault = f"item {item.item_id!r} is listed a second time"
        if fault:
            bad_rows.add(place, row.line, fault)
        else:
            items[item.item_id] = item
    return list(items.values())


def extend(items: Iterable[Item], unlisted: Iterable[str]) -> Catalogue:
    """The catalogue: the table's items, then those which only events name, with their id for a title."""
    return Catalogue([*items, *(Item(item_id, item_id) for item_id in unlisted)])
