"""`genrec events`: fill the event store, look into it, forget a user, back it up and restore it."""

import asyncio
import json
import math
import time
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.bundle_store import BundleStore
from cluster.config import TENANT
from cluster.dataset import Dataset
from cluster.errors import ConfigError, DataError, InvalidRequest
from cluster.events.rules import LARGEST_LIMIT, check_events, check_user
from cluster.events.store import Event, EventStore, Loaded, closing_store, driver_of
from cluster.registry import DATASETS
from cluster.values import Action, Behaviour
from deployments.cli.audit import AuditLog, audited_here
from deployments.cli.dataset_options import OPTIONAL_DATASET, open_dataset
from deployments.cli.fields import with_fields
from deployments.training.dataset_options import DatasetOptions, as_trained

app = typer.Typer(no_args_is_help=True, help="Fill the event store, look into it, forget a user, back it up, restore it.")
BATCH = 5_000
READ_AT_ONCE = 8
"""An import asks the store for the events of so many users at once."""
ACTIONS = tuple(Action)

Url = Annotated[str, typer.Option(help="the store: sqlite:///events.db or postgresql://user@host/database")]
Tenant = Annotated[str, typer.Option(help="the customer of these users, where several share a store")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


@app.command("import")
@with_fields
def import_(
    dataset: Annotated[DatasetOptions, OPTIONAL_DATASET],
    url: Url,
    *,
    like: Annotated[Path | None, typer.Option("--as-trained", metavar="MODEL_DIR", help="read it as for this model's training")] = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Store the events of a dataset, or of a table: genrec events import events.csv --url sqlite:///events.db

    With --as-trained the options for columns, actions and units are those of the model's training; without DATASET, so is the data set.
    It may be stopped and started again, and a file that has grown may be imported again: what is stored already, by an import or by
    POST /v1/events, is not stored twice. An event is the same if user, item, second, action and value are.
    Events that were imported, or found by an import, before their user was erased stay erased; others of an erased user come back if
    the file has them.
    """
    _require_tenant(tenant)
    asked = _table_by_path(dataset)
    if like is not None:
        trained = as_trained(asked, BundleStore(like).open(), option="--as-trained")
        asked = trained.model_copy(update={"items": None})  # events may be of items added since
    read = open_dataset(asked, learnt=False)
    began = time.monotonic()
    loaded = asyncio.run(_load(read, tenant, url, shown=dataset.progress))
    seconds = time.monotonic() - began
    if as_json:
        rest = {"source": read.source, "tenant": tenant, "skipped_rows": read.skipped_rows, "seconds": round(seconds, 3)}
        typer.echo(json.dumps({**asdict(loaded), **rest}, ensure_ascii=False))
    else:
        rate = len(read.interactions) / max(seconds, 1e-9)
        typer.echo(f"stored {loaded.stored:,} events of {read.source} in {seconds:.1f} s ({rate:,.0f}/s); {loaded.duplicates:,} were there")


@app.command()
def stats(url: Url, *, as_json: AsJson = False) -> None:
    """How many events of how many users the store holds; of a backup too, which stays as it is."""
    held = asyncio.run(driver_of(url).statistics(url))
    typer.echo(json.dumps(asdict(held)) if as_json else f"{held.events:,} events of {held.users:,} users")


@app.command()
def erase(
    user: Annotated[str, typer.Argument(metavar="USER")],
    url: Url,
    *,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    audit_log: AuditLog = None,
) -> None:
    """Forget a user: delete all their events from the store, with the keys these were sent under."""
    _require_tenant(tenant)
    erased = asyncio.run(_erase(url, tenant, user, audit_log))
    typer.echo(json.dumps({"erased": erased}) if as_json else f"erased {erased:,} events of {user!r} (tenant {tenant})")


@app.command()
def backup(file: Annotated[Path, typer.Argument(help="a file that is not there yet")], url: Url, *, audit_log: AuditLog = None) -> None:
    """Copy the store into one file while it serves, and its checksum into FILE.sha256. Of PostgreSQL, it says how.

    The backup holds users' events. Keep the ledger of erasures and the key of erased users apart from it.
    """
    with audited_here(audit_log, "events.backup", file.name):
        asyncio.run(driver_of(url).back_up(url, file))
    typer.echo(f"backed up into {file}, with its checksum in {file.name}.sha256")


@app.command()
def restore(
    file: Annotated[Path | None, typer.Argument(help="a backup; of PostgreSQL none: pg_restore has it")] = None,
    *,
    url: Url,
    audit_log: AuditLog = None,
) -> None:
    """Make the store of a backup, less the users that were erased since, as its ledger says. Stop every gateway first.

    Of PostgreSQL, run it after pg_restore, or beside the gateways once a standby is promoted, with the ledger in the URL:
    postgresql://user@host/database?ledger=/var/lib/genrec/erased
    """
    with audited_here(audit_log, "events.restore", file.name if file else "pg_restore"):
        asyncio.run(driver_of(url).restore(url, file))
    held = asyncio.run(driver_of(url).statistics(url))
    typer.echo(f"restored {held.events:,} events of {held.users:,} users; those that were erased since the backup are not among them")


def _require_tenant(tenant: str) -> None:
    if not TENANT.fullmatch(tenant):
        raise ConfigError(f"no request could name the tenant {tenant!r}; give 1 to 64 letters, digits, '_', '.' and '-', without accents")


def batches(dataset: Dataset, tenant: str, size: int = BATCH) -> Iterator[Sequence[Event]]:
    """All events, user by user in the order of time, each with a key made of its content.

    The same event has the same key in every file. Events that are equal in everything get numbered keys: the first of them has always the
    same one, the second another, and so on.
    """
    batch: list[Event] = []
    for user in range(dataset.interactions.users):
        batch += _events_of(dataset, user, tenant)
        while len(batch) >= size:
            yield batch[:size]
            del batch[:size]
    if batch:
        yield batch


def _events_of(dataset: Dataset, user: int, tenant: str) -> Iterator[Event]:
    events = dataset.interactions
    user_id, rows = events.user_ids[user], slice(events.offsets[user], events.offsets[user + 1])
    columns = (events.items[rows], events.timestamps[rows], events.actions[rows], events.values[rows])
    seen: Counter[Behaviour] = Counter()
    for item, timestamp, action, value in zip(*(column.tolist() for column in columns), strict=True):
        behaviour = Behaviour(dataset.catalogue[item].item_id, timestamp, ACTIONS[action], None if math.isnan(value) else value)
        seen[behaviour] += 1
        yield Event(user_id, behaviour, tenant, _key(user_id, behaviour, seen[behaviour]))


def _key(user_id: str, what: Behaviour, number: int) -> str:
    content = f"{user_id}\0{what.item_id}\0{what.timestamp}\0{what.action}\0{what.value}\0{number}"
    digest = blake2b(content.encode("utf-8", "surrogatepass"), digest_size=15).digest()
    return f"import:{urlsafe_b64encode(digest).decode()}"


def _table_by_path(asked: DatasetOptions) -> DatasetOptions:
    """The options, where a file in the place of a dataset's name is read as a table; a name with an ending is a file, there or not."""
    path = Path(asked.name)
    is_file = asked.path is None and asked.name not in {*DATASETS, ""} and (path.exists() or bool(path.suffix))
    return asked.model_copy(update={"name": "table", "path": path}) if is_file else asked


async def _load(dataset: Dataset, tenant: str, url: str, shown: bool | None) -> Loaded:
    try:
        async with closing_store(url) as store:
            loaded = await store.load(_lacking(store, _shown(batches(dataset, tenant), len(dataset.interactions), shown)))
            return Loaded(loaded.stored, len(dataset.interactions) - loaded.stored)
    except InvalidRequest as error:
        raise DataError(f"{dataset.source}: an event cannot be stored: {error}") from error


async def _lacking(store: EventStore, loading: Iterator[Sequence[Event]]) -> AsyncIterator[Sequence[Event]]:
    """The events that the store lacks, under whichever key: the nth of equal events is there where the store holds n of them. Those that
    it has stay erased with them. Each batch is compared with the store as it is once the batch before it is stored.
    """
    user, seen = "", Counter[Behaviour]()
    for batch in loading:
        check_events(batch)
        held, users = dict[str, Counter[Behaviour]](), list(_by_user(batch))
        for start in range(0, len(users), READ_AT_ONCE):
            some = users[start : start + READ_AT_ONCE]
            histories = await asyncio.gather(*(_held(store, events) for events in some))
            held |= {events[0].user_id: history for events, history in zip(some, histories, strict=True)}
        lacking, there = list[Event](), list[Event]()
        for event in batch:
            if event.user_id != user:
                user, seen = event.user_id, Counter()
            seen[event.behaviour] += 1
            (there if seen[event.behaviour] <= held[user][event.behaviour] else lacking).append(event)
        await store.pass_over(there)
        yield lacking


async def _held(store: EventStore, events: Sequence[Event]) -> Counter[Behaviour]:
    """How many of each behaviour the store holds of the events' user, among the LARGEST_LIMIT latest until the last of them."""
    last = events[-1]
    return Counter((await store.history(last.tenant, last.user_id, LARGEST_LIMIT, last.behaviour.timestamp)).behaviours)


def _by_user(batch: Sequence[Event]) -> Iterator[Sequence[Event]]:
    return (tuple(events) for _, events in groupby(batch, key=attrgetter("user_id")))


def _shown(loading: Iterator[Sequence[Event]], events: int, shown: bool | None) -> Iterator[Sequence[Event]]:
    """The same batches, with a bar on stderr: a batch is done when the next one is asked for."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (console.is_terminal if shown is None else shown)) as progress:
        task = progress.add_task("events", total=events)
        for batch in loading:
            yield batch
            progress.advance(task, len(batch))


async def _erase(url: str, tenant: str, user: str, audit_log: Path | None) -> int:
    check_user(tenant, user)  # the terminal may have given what no digest can be made of
    await driver_of(url).require_there(url)  # of a store that is new because its name was mistyped, an erasure would say that it is done
    async with closing_store(url) as store:
        with audited_here(audit_log, "user.erase", f"{tenant}/{await store.digest(tenant, user)}") as line:
            line.more["events"] = erased = await store.erase(tenant, user)
        return erased
