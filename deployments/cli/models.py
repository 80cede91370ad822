"""`genrec models`: publish, promote and roll back versions of a model, while a cluster serves it.

A cluster follows the model's directory: a promoted version is loaded beside the one that serves, and takes over once every replica
holds it; nothing is restarted and no request fails.
"""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.bundle import MANIFEST, Bundle
from cluster.bundle_store import BundleStore, is_version_number, verified_version
from cluster.errors import BundleError, ConfigError
from cluster.fleet.rollout import RolloutStore, Trial, TrialKind, said_flags, with_flags
from cluster.fleet.trial_guard import Guard
from cluster.paths import own_name, own_path
from deployments.cli.audit import AuditLog, audited_here
from deployments.cli.fields import as_options
from deployments.cli.server import ask, operated
from deployments.http.models import ModelsOut
from deployments.training.provenance import RANKED, recorded_strategies

EXPORTED = "model.json"
"""The file by which an export is known; deployments/training/pretrained.py, which writes it, imports torch."""
app = typer.Typer(no_args_is_help=True, help="Versions of a model: publish, promote, try, roll back. A running cluster follows by itself.")
ModelDir = Annotated[Path, typer.Option(help="directory with the versions of one model, such as models/ml-1m")]
Version = Annotated[int, typer.Argument(help="a published version", min=1)]
Share = Annotated[float | None, typer.Option(help="share of the users, 0 to 1", min=0.0, max=1.0)]
DegradedMargin = Annotated[float, typer.Option(help="a trial ends where so much more of its answers are degraded")]
LatencyRatio = Annotated[float, typer.Option(help="a trial ends where its p95 is so many times the stable version's")]
LeastOverlap = Annotated[float, typer.Option(help="a shadow ends where fewer of its items are the stable version's too")]
GUARD = Guard()
SHOWN = 5


@app.command("list")
def list_(*, model_dir: ModelDir = Path("models/ml-100k")) -> None:
    """Every version, what it is, and which one serves."""
    store, rollout = BundleStore(model_dir), RolloutStore(BundleStore(model_dir)).read()
    table = Table("version", "serves", "published", "hr@10", "compiled")
    for version in store.versions():
        trial = rollout.trial if rollout.trial and rollout.trial.version == version else None
        tried = f"{with_flags(trial.kind, trial.flags)}, {trial.share:.1%} of users" if trial else ""
        role = "; ".join(filter(None, ("stable" if version == rollout.stable else "", tried)))
        table.add_row(str(version), role, *_described(store, version))
    Console(markup=False).print(table)
    for ended in rollout.ended[-3:]:
        typer.echo(f"the {ended.trial.kind} of {ended.trial.tried} was {ended.outcome}: {ended.reason}")


def overtaken(store: BundleStore, made: int, cure: str = "") -> str:
    """A message that another version became current while this one was made, with the cure, by default how to serve this one; else ""."""
    current = store.current()
    cure = cure or f"to serve this one: genrec models promote {made} --model-dir {store.root}"
    return "" if current == made else f"version {current} became current meanwhile and stays so; {cure}"


@app.command()
def publish(
    directory: Annotated[Path, typer.Argument(help="a version, or a model's directory, made elsewhere")],
    *,
    model_dir: ModelDir,
    audit_log: AuditLog = None,
) -> None:
    """Add a version to the model, verified file by file. It serves once it is promoted."""
    with audited_here(audit_log, "model.publish", own_name(model_dir)) as line:
        store = BundleStore(model_dir)
        version = store.adopt(version_in(directory))
        line.more["version"] = version
    typer.echo(f"published {own_name(model_dir)}/{version}; to serve it: genrec models promote {version} --model-dir {model_dir}")
    _tell_of_lacking_items(store, version, store.current())


@app.command()
def promote(
    version: Version,
    *,
    model_dir: ModelDir = Path("models/ml-100k"),
    canary: Share = None,
    ab: Share = None,
    shadow: Share = None,
    flags: Annotated[str, typer.Option(help="flags to try with it, or on the stable version: cache=false,strategy=retrieval")] = "",
    degraded_margin: DegradedMargin = GUARD.degraded_margin,
    latency_ratio: LatencyRatio = GUARD.latency_ratio,
    least_overlap: LeastOverlap = GUARD.least_overlap,
    audit_log: AuditLog = None,
) -> None:
    """Make a version the stable one, or try it, or other flags, on a share of the users first. A trial that goes badly is rolled back by
    itself.
    """
    kinds: list[tuple[TrialKind, float | None]] = [("canary", canary), ("ab", ab), ("shadow", shadow)]
    asked = [(kind, share) for kind, share in kinds if share is not None]
    if len(asked) > 1 or any(share == 0 for _, share in asked):
        raise ConfigError("give one of --canary, --ab and --shadow, with a share above 0, or none of them")
    if flags and not asked:
        raise ConfigError(
            "give --canary or --ab with --flags, with a share; what all users are served with stands in the gateway's user_config"
        )
    trial = None
    for kind, share in asked:
        with as_options():
            guard = Guard(degraded_margin=degraded_margin, latency_ratio=latency_ratio, least_overlap=least_overlap)
            trial = Trial(version=version, kind=kind, flags=_flags(flags), share=share or 1.0, guard=guard)
    action = f"model.{trial.kind}" if trial else "model.promote"
    with audited_here(audit_log, action, f"{own_name(model_dir)}/{version}") as line:
        line.more |= {"flags": trial.flags} if trial and trial.flags else {}
        store = BundleStore(model_dir)
        rollouts = RolloutStore(store)
        first = bool(store.versions()) and store.current() is None
        before, stable = None if trial or first else rollouts.read().trial, store.current()
        rollout = rollouts.promote(version, trial)
    if before and before.version == version and before.flags:
        kept = said_flags(before.flags).replace("=", ": ")
        typer.echo(
            f"the trial of its flags ends; to keep them, write `flags: {{{kept}}}` into the gateway's user_config, and run serve deploy"
        )
    begun = f"the {trial.kind} of {trial.tried} begins, on {trial.share:.1%} of users; " if trial else ""
    typer.echo(f"{begun}{own_name(model_dir)}/{rollout.stable} is stable; clusters that serve it follow within seconds")
    _tell_of_lacking_items(store, version, stable)


@app.command()
def rollback(
    *,
    model_dir: ModelDir = Path("models/ml-100k"),
    reason: Annotated[str, typer.Option(help="kept with the trial that ends")] = "by hand",
    audit_log: AuditLog = None,
) -> None:
    """End the trial or, where there is none, serve what was stable before. Changes nothing where the guard or another operator changes
    the versions meanwhile.
    """
    with audited_here(audit_log, "model.rollback", own_name(model_dir)) as line:
        rollouts = RolloutStore(BundleStore(model_dir))
        before = rollouts.read()
        rollout = rollouts.rollback(reason, before)
        line.more["stable"] = rollout.stable
    if rollout.stable != before.stable or rollout.ended == before.ended:
        typer.echo(f"{own_name(model_dir)}/{rollout.stable} is stable")
        return
    ended = rollout.ended[-1].trial
    again = f"; to go back to {rollout.previous[-1]}, run it again" if rollout.previous else ""
    typer.echo(f"the {ended.kind} of {ended.tried} ended, and {own_name(model_dir)}/{rollout.stable} stays stable{again}")


@app.command()
def status(
    *,
    url: Annotated[str, typer.Option(help="a gateway of the cluster")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(envvar="GENREC_API_KEY", help="API key, where the gateway wants one")] = None,
) -> None:
    """What a running cluster says: which version serves, which processes hold it, how the trial goes."""
    with operated(url, key) as client:
        Console(markup=False).print(_table(ask(client, "/v1/models", ModelsOut)))


def _flags(given: str) -> dict[str, str | None]:
    """Flag -> value, from text such as ``cache=false,strategy=retrieval``."""
    named = [one.partition("=") for one in given.split(",") if given]
    if wrong := [name for name, equals, value in named if not (name.strip() and equals and value.strip())]:
        raise ConfigError(f"--flags: {wrong[0]!r} is no flag with its value; give them as cache=false,strategy=retrieval")
    return {name.strip(): None if value.strip() == "null" else value.strip() for name, _, value in named}


def _tell_of_lacking_items(store: BundleStore, version: int, stable: int | None) -> None:
    """Tell on stderr which items of the stable version another one lacks, as after a training on a table without those of `add-items`."""
    if stable in (None, version):
        return
    with suppress(BundleError):  # the stable version may be damaged, which is no reason against another
        held = store.open(stable).catalogue
        if lacking := store.open(version).catalogue.unknown(item.item_id for item in held.items):
            named = ", ".join(lacking[:SHOWN]) + (", ..." if len(lacking) > SHOWN else "")
            told = f"version {version} lacks {len(lacking):,} of the {len(held):,} items of version {stable}: {named}"
            cure = "to recommend them, train with a table of items that has them and events, or run genrec add-items once it is stable"
            typer.echo(f"{told}; {cure}", err=True)


def _table(told: ModelsOut) -> Table:
    table = Table("version", "role", "held by", "answers", "degraded", "p95 ms", "overlap", title=f"{told.model_version} is stable")
    for one in told.versions:
        held = ", ".join(f"{count} {role}" for role, count in one.holders.items()) + "".join(f"; {why}" for why in one.obstacles)
        figures = [one.requests, one.degraded, one.p95_ms, one.overlap]
        table.add_row(
            str(one.version),
            with_flags(one.role, one.flags),
            held,
            *("" if figure is None else f"{figure:g}" for figure in figures),
        )
    return table


def version_in(directory: Path) -> Bundle:
    """The version in a directory or, where that is a model's, the model's current version."""
    if (directory / MANIFEST).is_file():
        directory = own_path(directory)
        if not is_version_number(directory.name):
            raise BundleError(f"{directory} is not named by its version's number; rename it to one, or give the model's directory")
        return verified_version(directory)
    if (directory / EXPORTED).is_file():
        cure = "give the version's own directory or its model's, which a service needs"
        raise BundleError(f"{directory} is an export of genrec train, without the catalogue; {cure}")
    return BundleStore(directory).open()


def _described(store: BundleStore, version: int) -> tuple[str, str, str]:
    try:
        manifest = store.open(version).manifest
    except BundleError as error:
        return "", "", f"refused: {error}"
    strategies = recorded_strategies(manifest)
    quality = strategies.get(RANKED) or strategies.get("unified") or manifest.quality
    compiled = ", ".join(sorted({artifact.kind for artifact in manifest.artifacts})) or "no"
    return f"{manifest.created:%Y-%m-%d %H:%M}", f"{quality.get('hr@10', 0):.4f}", compiled
