"""`genrec top`: watches a running service in the terminal; with `--once`, checks it for a script."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from cluster.errors import ConfigError
from cluster.fleet.rollout import with_flags
from deployments.cli.server import ask, operated
from deployments.http.event_messages import CacheOut
from deployments.http.messages import BackendOut, BackendsOut, GatewayOut
from deployments.http.models import ModelsOut
from deployments.telemetry.monitor import Alert, Alerts, Look, Thresholds, problems_of, refused_per_s


def top(
    *,
    url: Annotated[str, typer.Option(help="a gateway, or what stands before them")] = "http://127.0.0.1:8000",
    key: Annotated[str, typer.Option(envvar="GENREC_API_KEY", help="an API key that may operate the service", show_default=False)] = "",
    interval_s: Annotated[float, typer.Option(min=0.2, help="seconds between two looks")] = 2.0,
    p99_ms: Annotated[float, typer.Option(min=0, help="alert where a backend's p99 is longer")] = Thresholds.p99_ms,
    failed_share: Annotated[
        float, typer.Option(min=0, max=1, help="alert where more of a backend's calls break")
    ] = Thresholds.failed_share,
    refused_per_s: Annotated[
        float, typer.Option(min=0, help="alert where more find no place, or exceed their rate")
    ] = Thresholds.refused_per_s,
    least_hit_rate: Annotated[float | None, typer.Option(min=0, max=1, help="alert where a cache hits less (default: never)")] = None,
    hold_s: Annotated[float, typer.Option(min=0, help="without --once: tell of what is amiss once it has been so for so long")] = 0.0,
    once: Annotated[bool, typer.Option("--once", help="two looks, and exit with 1 where something is amiss")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --once: print one JSON object")] = False,
) -> None:
    """Watch a running service: engines, queue, caches, versions, and what is beyond the thresholds. Ctrl-C ends it."""
    if as_json and not once:
        raise ConfigError("--json prints one look, and without --once there is no last one; add --once")
    if once and hold_s:
        raise ConfigError(f"--hold-s {hold_s:g} waits for what lasts, and --once does not wait; leave one of them out")
    limits = Thresholds(p99_ms, failed_share, refused_per_s, least_hit_rate)
    with operated(url, key) as client:
        if once:
            raise typer.Exit(_check(Service(client), limits, interval_s, as_json=as_json))
        _watch(Service(client), limits, Alerts(hold_s), interval_s)


class Service:
    """The operator's part of the HTTP interface."""

    def __init__(self, client: httpx.Client) -> None:
        self.url, self._client = str(client.base_url).rstrip("/"), client

    def look(self) -> Look:
        """The service's figures now. Raises ConfigError where it does not answer."""
        backends, gateway = ask(self._client, "/v1/backends", BackendsOut), ask(self._client, "/v1/gateway", GatewayOut)
        return Look(
            time.monotonic(), backends, gateway, ask(self._client, "/v1/cache", CacheOut), ask(self._client, "/v1/models", ModelsOut)
        )


def _check(service: Service, limits: Thresholds, interval_s: float, *, as_json: bool) -> int:
    before = service.look()
    time.sleep(interval_s)
    now = service.look()
    alerts = Alerts().update(now.at, dict(problems_of(before, now, limits)))
    if as_json:
        typer.echo(json.dumps(_as_json(before, now, alerts)))
    else:
        Console().print(screen(service.url, before, now, alerts))
    return 1 if alerts else 0


def _watch(service: Service, limits: Thresholds, alerts: Alerts, interval_s: float) -> None:
    """Show the service until Ctrl-C. A service that stops answering is an alert, and is asked again; at the start it is an error."""
    before = service.look()
    shown = screen(service.url, before, before, [])
    with Live(shown, screen=Console().is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = service.look()
            except ConfigError as error:
                live.update(Group(Text(str(error), "bold red"), shown), refresh=True)
                continue
            shown = screen(service.url, before, now, alerts.update(now.at, dict(problems_of(before, now, limits))))
            live.update(shown, refresh=True)
            before = now


def screen(url: str, before: Look, now: Look, alerts: Sequence[Alert]) -> Group:
    """The whole screen."""
    gateway, refused = now.gateway, refused_per_s(before, now)
    places = f"gateway: {gateway.running} of {gateway.places} places taken, {gateway.waiting} wait, {refused:.1f}/s turned away"
    said: list[RenderableType] = [Text(f"{now.models.model_version} at {url}   {_versions(now)}", "bold"), Text(places), Text(_cache(now))]
    amiss = [_warning(one, now.at) for one in alerts] or [Text("nothing is amiss", "green")]
    return Group(*said, _engines(now), *_reasons(now), *amiss)


def _versions(look: Look) -> str:
    tried = [one for one in look.models.versions if one.role not in ("", "stable")]
    what = [f"{one.role} of version {with_flags(one.version, one.flags)}" for one in tried]
    return ", ".join(f"{said} on {one.share:.1%} of users" if one.share else said for said, one in zip(what, tried, strict=True))


def _cache(look: Look) -> str:
    if not look.cache.enabled:
        return "cache: off"
    rates = [(tier, tier.recent_hit_rate) for tier in look.cache.tiers]
    shown = [
        f"{tier.tier} {'-' if rate is None else f'{rate:.0%}'} of {tier.hits + tier.misses}, {tier.used_bytes / 2**20:.1f} MiB"
        for tier, rate in rates
    ]
    return "cache hits: " + "; ".join([*shown, f"computed {look.cache.computed}"])


def _engines(look: Look) -> Table:
    """The table of engines, as narrow as possible: a terminal has 80 columns."""
    names = [Column(name, no_wrap=True) for name in ("stage", "backend")]
    figures = [Column(name, justify="right") for name in ("calls", "1/s", "p50 ms", "p95 ms", "p99 ms")]
    table = Table(*names, Column("order", justify="right"), "on", "breaker", *figures, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for stage in look.backends.stages:
        for position, one in enumerate(stage.backends):
            table.add_row("" if position else f"{stage.stage} ({stage.replicas})", *_cells(one))
    return table


def _cells(one: BackendOut) -> list[str]:
    on = f"{one.available_on}/{one.replicas}" if one.enabled else "off"
    breaker = ", ".join(state if count == one.replicas else f"{state} {count}" for state, count in one.breakers.items() if count)
    times = [f"{value:.1f}" if value is not None else "-" for value in (one.p50_ms, one.p95_ms, one.p99_ms)]
    order = "-" if one.rank is None else str(one.rank + 1)
    colour = "red" if breaker not in ("", "closed") else "white"
    return [escape(one.name), order, on, f"[{colour}]{breaker}[/]", str(one.calls), f"{one.throughput_per_s:.1f}", *times]


def _reasons(look: Look) -> list[Text]:
    """A line for each backend that does not serve, with the reason."""
    why = [(f"{stage.stage} {one.name}", one.reasons[0]) for stage in look.backends.stages for one in stage.backends if one.reasons]
    return [Text(f"not {backend}: {reason.split(';')[0]}", "dim") for backend, reason in why]


def _warning(alert: Alert, now: float) -> Text:
    return Text(f"! {alert.subject}: {alert.problem}" + (f" (for {now - alert.since:.0f} s)" if now > alert.since else ""), "bold red")


def _as_json(before: Look, now: Look, alerts: Sequence[Alert]) -> dict[str, object]:
    parts = {name: getattr(now, name).model_dump(mode="json") for name in ("backends", "gateway", "cache", "models")}
    return {"alerts": [asdict(one) for one in alerts], "refused_per_s": refused_per_s(before, now), **parts}
