"""The demo's questions to the starting system: for the first whole answer, then for the answer by the best engines."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.engines.health import LOADING
from cluster.errors import ConfigError
from deployments.cli.local_serve import LocalServe

ASK_EVERY_S = 1.0
BEST_WITHIN_S = 900.0
"""How long the next better engine, or the end of the compilation, is waited for."""
ENGINES = ("encode", "generate", "rank")


@dataclass(frozen=True)
class Asked:
    """A user's request and its answer."""

    request: Mapping[str, Any]
    answer: dict[str, Any]

    @property
    def served_by(self) -> dict[str, str]:
        """Stage -> backend, of stages that have engines."""
        return {stage["stage"]: stage["backend"] for stage in self.answer["stages"] if stage["stage"] in ENGINES}

    @property
    def awaits_an_engine(self) -> bool:
        """Whether a preferred engine did not answer because it is still being loaded."""
        return any(skipped["reason"] == LOADING for stage in self.answer["stages"] for skipped in stage["fallback_from"])


def ask(url: str, request: Mapping[str, Any]) -> Asked:
    """A newly computed answer, even where one is cached. Raises httpx.HTTPError."""
    response = httpx.post(f"{url}/v1/recommend", json={**request, "cache": "bypass"}, timeout=30)
    response.raise_for_status()
    return Asked(request, response.json())


def whole(url: str, request: Mapping[str, Any]) -> Asked | None:
    """An answer that is not degraded; None where no server answers yet, or the answer is degraded."""
    try:
        asked = ask(url, request)
    except httpx.HTTPError:
        return None
    return None if asked.answer["degraded"] else asked


def first_answer(serving: LocalServe, request: Mapping[str, Any]) -> Asked:
    """The first whole answer to the request. Raises ConfigError where the service has ended, or gives none in time."""
    found: list[Asked] = []

    def answered() -> bool:
        asked = whole(serving.url, request)
        found.extend([] if asked is None else [asked])
        return bool(found)

    serving.wait_until(answered)
    return found[0]


def best_answer(url: str, first: Asked, final_version: Callable[[], str | None], tell: Callable[[Asked, Asked], None]) -> Asked:
    """The same request's answer by the final version of the model, once no engine is still being loaded.

    `final_version`: gives that version, None as long as it is not known. `tell(before, now)` is called where another engine has answered
    than before. Raises ConfigError where neither the version nor another engine comes for BEST_WITHIN_S.
    """
    before, met = first, list[tuple[str | None, dict[str, str]]]()
    while True:
        version = final_version()
        now = whole(url, first.request)
        if now is not None:
            if now.served_by != before.served_by:
                tell(before, now)
            if now.answer["model_version"] == version and not now.awaits_an_engine:
                return now
            before = now
        if (news := (version, before.served_by)) not in met:
            met.append(news)
            last_news = time.monotonic()
        if time.monotonic() > last_news + BEST_WITHIN_S:
            wanted = f"version {version}" if version else "the compiled version"
            raise ConfigError(
                f"{wanted} does not answer by its best engines, and no other engine has come for {BEST_WITHIN_S:g} s; see {url}/v1/backends"
            )
        time.sleep(ASK_EVERY_S)
