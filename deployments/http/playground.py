"""The playground: a page at / to try this service, and the look-ups that it needs beside the API.

The page is plain HTML, CSS and ES modules from this package's folder `playground`; nothing is built and nothing is fetched from elsewhere.
The page calls the public API with the key that its user types in.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from typing import Annotated, Any, Generic, Protocol, TypeVar
from weakref import ref

from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.exceptions import HTTPException

from cluster.background import no_requests_context
from cluster.config import GatewaySettings
from cluster.dataset import Catalogue
from cluster.errors import BackendError
from cluster.events.store import StoredUser
from cluster.values import Action, Item, Strategy
from deployments.http.callers import ANONYMOUS, CallerHere
from deployments.http.messages import ItemOut, Message
from deployments.http.static_files import TYPES, StaticFile, giver_of, static_file
from deployments.http.titles import TitleIndex

T = TypeVar("T")
MOST_FOUND, MOST_EXAMPLES, LENGTH = 50, 20, 5
"""The most items of a search, the most examples, and the items of a composed history."""
LOOKED_AT = 5_000
"""How many items of the catalogue composed histories are made from: enough, and quickly read."""


def _read() -> Iterator[tuple[str, StaticFile]]:
    """(path, file) of each file of the page; the page itself is at /."""
    for file in files("deployments.http").joinpath("playground").iterdir():
        if file.name.rpartition(".")[2] in TYPES:
            path = "/" if file.name == "index.html" else f"/playground/{file.name}"
            yield path, static_file(file)


FILES: Mapping[str, StaticFile] = dict(sorted(_read()))
PATHS = frozenset(FILES)
"""Paths open to all: the page holds no data, and it is where a key is typed in."""


@dataclass(frozen=True, slots=True)
class Offers:
    """The options that the serving model offers."""

    model_version: str
    strategies: tuple[Strategy, ...]
    ranker: bool


class PlaygroundService(Protocol):
    """The gateway, as the look-ups call it; all answers are of the model that serves."""

    def catalogue(self) -> Catalogue: ...
    def offers(self) -> Offers: ...


class StoredUsers(Protocol):
    async def example_users(self, tenant: str, limit: int) -> Sequence[StoredUser]:
        """Some users of the tenant, those met last first; none where nothing is stored. Raises BackendError."""
        ...


class ItemsOut(Message):
    items: list[ItemOut] = Field(description="titles that begin so, then those in which a word does, then any that hold it")


class StoredUserOut(Message):
    user_id: str
    events: int = Field(description="how many are stored")


class ComposedOut(Message):
    """Items that have something in common, as an example history."""

    name: str
    items: list[ItemOut]


class ExamplesOut(Message):
    users: list[StoredUserOut] = Field(
        description="users of the tenant, those met last first; none where nothing is stored, or the call has no key"
    )
    histories: list[ComposedOut] = Field(description="composed of the catalogue")


class OptionsOut(Message):
    """What a request may ask for here."""

    model_version: str
    strategies: list[Strategy] = Field(description="the default first")
    ranker: bool = Field(description="there is one, which `rank` switches")
    actions: list[Action]
    max_k: int
    max_behaviours: int


def page_routes(limits: Callable[[], GatewaySettings]) -> APIRouter:
    """The page and its files, open to all while the settings switch the playground on."""

    def served_here() -> None:
        if not limits().playground:
            raise HTTPException(404, "there is no playground here (gateway: {playground: false})")

    routes = APIRouter(include_in_schema=False, dependencies=[Depends(served_here)])
    for path, file in FILES.items():
        routes.add_api_route(path, giver_of(file))
    return routes


def playground_routes(service: PlaygroundService, users: StoredUsers, limits: Callable[[], GatewaySettings]) -> APIRouter:
    """The look-ups. `limits` gives the present settings."""
    routes, titles, composed = APIRouter(), _Made(TitleIndex), _Made(composed_histories)

    @routes.get("/v1/items", tags=["catalogue"])
    async def items(
        caller: CallerHere,
        query: Annotated[str, Query(max_length=200, description="part of a title; case and accents do not matter")] = "",
        limit: Annotated[int, Query(ge=1, le=MOST_FOUND)] = 10,
    ) -> ItemsOut:
        """Search the catalogue by title; without a query, its first items."""
        caller.acts_for()
        catalogue = service.catalogue()
        found = await asyncio.to_thread((await titles.of(catalogue)).find, query, limit)
        return ItemsOut(items=_items_out([catalogue.items[place] for place in found]))

    @routes.get("/v1/examples", tags=["catalogue"])
    async def examples(caller: CallerHere, limit: Annotated[int, Query(ge=1, le=MOST_EXAMPLES)] = 5) -> ExamplesOut:
        """Users and histories to try this service with; a caller that was let in without a key is told of no stored user."""
        tenant = caller.acts_for()
        stored = () if caller.key is ANONYMOUS else await _stored(users, tenant, limit)
        histories = islice((await composed.of(service.catalogue())).items(), limit)
        return ExamplesOut(
            users=[StoredUserOut(user_id=one.user_id, events=one.events) for one in stored],
            histories=[ComposedOut(name=name, items=_items_out(found)) for name, found in histories],
        )

    @routes.get("/v1/options", tags=["catalogue"])
    async def options(caller: CallerHere) -> OptionsOut:
        """What the model that serves can be asked for, and how much of it."""
        caller.acts_for()
        offers, most = service.offers(), limits()
        return OptionsOut(
            model_version=offers.model_version,
            strategies=list(offers.strategies),
            ranker=offers.ranker,
            actions=list(Action),
            max_k=most.max_k,
            max_behaviours=most.max_behaviours,
        )

    return routes


def composed_histories(catalogue: Catalogue, count: int = MOST_EXAMPLES, length: int = LENGTH) -> dict[str, list[Item]]:
    """Name -> `length` items that share a value of an attribute, for the most common values; the first items where no value is shared."""
    looked_at = list(catalogue.items[:LOOKED_AT])
    tally = Counter(value for item in looked_at for value in _values(item))
    shared = [value for value, times in tally.most_common() if length <= times < len(looked_at)][:count]
    if shared:
        return {value: [item for item in looked_at if value in _values(item)][:length] for value in shared}
    return {"the catalogue's first": looked_at[:length]} if looked_at else {}


class _Made(Generic[T]):
    """The result of `make` for the catalogue that serves, made at the first call and again when the catalogue changes: it is the same for
    every caller, and may take seconds of the interpreter. It does not refer to the catalogue, and is forgotten with it.
    """

    def __init__(self, make: Callable[[Catalogue], T]) -> None:
        self._make, self._context = make, no_requests_context()
        self._making: tuple[ref[Catalogue], asyncio.Task[T]] | None = None

    async def of(self, catalogue: Catalogue) -> T:
        """The result; a caller that leaves does not end the making of it for others."""
        making = self._making
        if making is None or making[0]() is not catalogue or _failed(making[1]):
            task = asyncio.create_task(asyncio.to_thread(self._make, catalogue), context=self._context)
            self._making = making = (ref(catalogue, self._forget), task)
        return await asyncio.shield(making[1])

    def _forget(self, gone: ref[Catalogue]) -> None:
        if self._making is not None and self._making[0] is gone:
            self._making = None


def _failed(task: "asyncio.Task[Any]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _stored(users: StoredUsers, tenant: str, limit: int) -> Sequence[StoredUser]:
    """Stored users; no users where the event store does not answer: composed histories are shown all the same."""
    try:
        return await users.example_users(tenant, limit)
    except BackendError:
        return ()


def _values(item: Item) -> dict[str, None]:
    """An item's attributes as text, in their order: "genres: Drama"; each part of "Drama|Comedy" is one of its own."""
    return {f"{name}: {part.strip()}": None for name, value in item.attributes.items() for part in value.split("|") if part.strip()}


def _items_out(items: Sequence[Item]) -> list[ItemOut]:
    return [ItemOut(item_id=item.item_id, title=item.title, attributes=dict(item.attributes)) for item in items]
