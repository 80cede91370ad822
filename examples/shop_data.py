"""Two tables of a shop that does not exist, in columns of its own: something to try the way of docs/your-data.md with.

python examples/shop_data.py shop        # writes shop/clicks.csv (about 50,000 events) and shop/products.csv (1,000 products)

A product's popularity follows Zipf's law. A shopper likes three shelves of twenty, stays at one for a while, buys now and then, and
often takes what goes with the last product. Only the standard library is used, and the same seed writes the same bytes.
"""

import csv
import random
import sys
from collections.abc import Iterator
from pathlib import Path

_WORDS = (
    "tea coffee bread cheese fruit soap paper tools lamps paint bikes tents shoes hats books games toys plants bowls knives",
    "plain fine large small red blue green old new round",
)
SHELVES, KINDS = (words.split() for words in _WORDS)
PRODUCTS, SHOPPERS, LEAST_EVENTS, MOST_EVENTS = 1_000, 1_000, 20, 80
DAY_MS, BEGINNING_MS = 86_400_000, 1_767_225_600_000  # 2026-01-01
ACTIONS = {"saw": 70, "basket": 14, "bought": 10, "stars": 6}


def main(directory: str = "shop", seed: int = 7) -> None:
    rng, folder = random.Random(seed), Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    shelf_of = [rng.randrange(len(SHELVES)) for _ in range(PRODUCTS)]
    products = [[_sku(one), _label(one, shelf), SHELVES[shelf]] for one, shelf in enumerate(shelf_of)]
    _write(folder / "products.csv", ["sku", "label", "shelf"], products)
    rows = sorted((row for shopper in range(SHOPPERS) for row in _visits(rng, shopper, shelf_of)), key=lambda row: int(row[2]))
    _write(folder / "clicks.csv", ["shopper", "sku", "when", "did", "stars"], rows)
    print(f"{folder}/clicks.csv: {len(rows)} events; {folder}/products.csv: {PRODUCTS} products")


def _visits(rng: random.Random, shopper: int, shelf_of: list[int]) -> Iterator[list[str]]:
    """All of one shopper's events, of which none has the same product twice."""
    liked = rng.sample(range(len(SHELVES)), 3)
    stock = {shelf: [one for one in range(PRODUCTS) if shelf_of[one] == shelf] for shelf in liked}
    when, shelf, product, seen = BEGINNING_MS + rng.randrange(120 * DAY_MS), liked[0], -1, set[int]()
    for _ in range(rng.randint(LEAST_EVENTS, MOST_EVENTS)):
        if rng.random() < 0.2:
            shelf, when = rng.choice(liked), when + rng.randrange(DAY_MS, 5 * DAY_MS)
        product = _next(rng, product, [one for one in stock[shelf] if one not in seen])
        if product < 0:
            continue
        seen.add(product)
        when += rng.randrange(5_000, 600_000)
        did = rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        yield [f"s{shopper:04}", _sku(product), str(when), did, str(rng.randint(2, 5)) if did == "stars" else ""]


def _next(rng: random.Random, last: int, choice: list[int]) -> int:
    """What goes with the last product, if that may be had, in two cases of five; else one of the shelf by Zipf's law; -1: none is left."""
    goes_with = last * 7 % PRODUCTS
    if goes_with in choice and rng.random() < 0.4:
        return goes_with
    return rng.choices(choice, [1 / (rank + 1) for rank in range(len(choice))])[0] if choice else -1


def _sku(product: int) -> str:
    return f"P-{product:04}"


def _label(product: int, shelf: int) -> str:
    return f"{KINDS[product % len(KINDS)]} {SHELVES[shelf]} no. {product}"


def _write(path: Path, names: list[str], rows: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(names)
        table.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "shop")
