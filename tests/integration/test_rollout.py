"""Versions of a model change on a real cluster under a steady stream of requests: promotion, rollback, trials, a corrupt version.

Two versions recommend different items to the same user, and what each recommends is computed here too, so that an answer made of two
versions, or of another one than it names, is noticed.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import pytest

from cluster.bundle import WEIGHTS, Bundle
from cluster.bundle_store import BundleStore
from cluster.fleet.rollout import RolloutStore, Trial
from cluster.fleet.trial_guard import Guard
from cluster.values import Behaviour, Encoded, EncodeRequest, Generated, GenerateRequest, RecommendRequest, StageAnswer, StageReport
from integrations.hstu.encoder import TorchEncoder
from integrations.torch_beam.generator import TorchBeamGenerator
from pipelines.recommend import Recommender
from tests.bundles import make_generative_bundle
from tests.clusters import SharedCluster, fixed
from tests.documents import ROOT
from tests.integration.conftest import PATIENT
from tests.waiting import json_of, until_right

pytestmark = pytest.mark.cluster
everywhere = pytest.mark.parametrize("live", ["split", "colocated"], indirect=True)
split = pytest.mark.parametrize("live", ["split"], indirect=True)

ITEMS, K, NOW = 60, 5, 1_700_100_000
USERS = [f"user {number}" for number in range(30)]
PER_SECOND = 8
SETTINGS = {
    "encoder": {
        "order": ["torch"],
        "backends": {"torch": "tests.integration.rollout_engines:VersionedTorch"},
        "breaker": {"failures_to_open": 1, "pause_s": 0.2, "growth": 1.0, "longest_pause_s": 0.2},
    },
    "generator": {"order": ["torch_beam"]},
    "cache": {"enabled": False},
    "events": {"enabled": False},
    "gateway": PATIENT,
}
CONFIGS = {"split": ROOT / "ray_config.yaml", "colocated": ROOT / "cluster" / "launch" / "one_machine.yaml"}


def history(user: str) -> tuple[Behaviour, ...]:
    rng = np.random.default_rng([ord(letter) for letter in user])
    return tuple(Behaviour(str(item), 1_700_000_000 + 3600 * step) for step, item in enumerate(rng.integers(1, ITEMS + 1, 8)))


@dataclass
class Live:
    """A served model, and what each of its versions recommends to each user."""

    url: str
    rollouts: RolloutStore
    expected: dict[str, dict[str, list[str]]]

    def ask(self, client: httpx.Client, user: str) -> dict[str, Any]:
        """The answer, with its status and user."""
        events = [{"item_id": one.item_id, "timestamp": one.timestamp} for one in history(user)]
        body = {"user_id": user, "behaviours": events, "k": K, "request_time": NOW}
        response = client.post(f"{self.url}/v1/recommend", json=body)
        return {"status": response.status_code, "user": user, **response.json()}

    def models(self) -> dict[str, Any]:
        models = json_of(f"{self.url}/v1/models")
        return {**models, "versions": {one["version"]: one for one in models["versions"]}}

    def until(self, holds: Callable[[dict[str, Any]], object], within_s: float = 300.0) -> dict[str, Any]:
        """What /v1/models tells once it is as expected."""
        return until_right(self.models, holds, within_s, every_s=0.2)

    def serves(self, version: int) -> Callable[[dict[str, Any]], bool]:
        """Whether every gateway answers with this version, and with no other."""
        return lambda told: {one["version"] for one in told["versions"].values() if one["gateways"]} == {version}

    def publish(self, version: int) -> int:
        """The same version once more, under another number."""
        number = self.rollouts.store.adopt(self.rollouts.store.open(version))
        name = self.rollouts.store.name
        self.expected[f"{name}/{number}"] = self.expected[f"{name}/{version}"]
        return number


@dataclass
class Traffic:
    """`PER_SECOND` requests a second, answered or not, for as long as the `with` block lasts; then every answer is checked."""

    live: Live
    degraded: tuple[str, ...] = ()
    """Versions whose answers may be degraded."""
    answers: list[dict[str, Any]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stop, self._driver = threading.Event(), threading.Thread(target=self._drive)
        self._driver.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        self._driver.join()
        if kind is None:
            self._check()

    def versions(self, last: int = 0) -> set[str]:
        return {answer["model_version"] for answer in self.answers[-last:]}

    def until_all_from(self, version: int) -> None:
        """Wait until the last second's answers are of one version."""
        until_right(lambda: self.versions(last=PER_SECOND), lambda seen: seen == {f"tiny/{version}"})

    def _drive(self) -> None:
        with httpx.Client(timeout=120) as client, ThreadPoolExecutor(16) as threads:
            sent = 0
            while not self._stop.wait(1 / PER_SECOND):
                threads.submit(self._send, client, USERS[sent % len(USERS)])
                sent += 1

    def _send(self, client: httpx.Client, user: str) -> None:
        try:
            self.answers.append(self.live.ask(client, user))
        except httpx.HTTPError as error:
            self.answers.append({"status": repr(error), "user": user})

    def _check(self) -> None:
        assert self.answers
        assert [answer for answer in self.answers if answer["status"] != 200] == []
        for answer in self.answers:
            if answer["model_version"] in self.degraded and answer["degraded"]:
                continue
            assert not answer["degraded"], answer
            assert [one["item_id"] for one in answer["items"]] == self.live.expected[answer["model_version"]][answer["user"]], answer


async def recommended(bundle: Bundle) -> dict[str, list[str]]:
    """What a version recommends to each user."""
    encoder, generator = TorchEncoder(), TorchBeamGenerator()
    encoder.load(bundle)
    generator.load(bundle)

    async def encode(request: EncodeRequest, within_s: float) -> StageAnswer[Encoded]:
        return StageAnswer(encoder.infer(request), StageReport("encode", "torch", 0.0), bundle.identity)

    async def generate(request: GenerateRequest, within_s: float) -> StageAnswer[Generated]:
        return StageAnswer(generator.infer(request), StageReport("generate", "torch_beam", 0.0), bundle.identity)

    pipeline = Recommender(bundle, encode, generate)
    answers = [await pipeline.recommend(RecommendRequest(user, history(user), k=K, request_time=NOW)) for user in USERS]
    return {answer.user_id: [one.item.item_id for one in answer.items] for answer in answers}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, list[str]]]]:
    """Versions 1 and 2 of a model, and what they recommend; 1 is stable."""
    made = tmp_path_factory.mktemp("made")
    store = BundleStore(tmp_path_factory.mktemp("served") / "tiny")
    for seed in (0, 1):
        store.adopt(make_generative_bundle(made / str(seed), items=ITEMS, seed=seed, sizes=(4, 4)))
    store.promote(1)
    expected = {f"tiny/{version}": asyncio.run(recommended(store.open(version))) for version in (1, 2)}
    assert all(expected["tiny/1"][user] != expected["tiny/2"][user] for user in USERS)
    return store.root, expected


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, published: Any, default: SharedCluster) -> Iterator[Live]:
    """Version 1 served, each stage in a deployment of its own or all in the gateway; tests leave it so."""
    root, expected = published
    document = fixed({"ranker": 0}, config=CONFIGS[request.param])
    args = document["applications"][0]["args"]
    engines = {name: {**(args.get(name) or {}), **changes} for name, changes in SETTINGS.items()}
    with default.application(document, {"model_dir": str(root), **engines}) as serving:
        served = Live(serving.url, RolloutStore(BundleStore(root)), expected)
        served.until(served.serves(1))
        yield served


@pytest.fixture(autouse=True)
def _version_1_serves_again(live: Live) -> Iterator[None]:
    """Also after a test that failed between a change and its end."""
    yield
    if trial := live.rollouts.read().trial:
        live.rollouts.end(trial, "its test is over")
    if live.rollouts.read().stable != 1:
        live.rollouts.promote(1)
    live.until(live.serves(1))


@everywhere
def test_a_promotion_and_its_rollback_fail_no_request_and_mix_no_versions(live: Live):
    with Traffic(live) as traffic:
        traffic.until_all_from(1)
        live.rollouts.promote(2)
        live.until(live.serves(2))
        traffic.until_all_from(2)
        live.rollouts.rollback("by hand")
        told = live.until(live.serves(1))
        traffic.until_all_from(1)
    assert told["model_version"] == "tiny/1"


@split
def test_a_version_that_is_corrupt_never_serves_and_the_cluster_says_why(live: Live):
    corrupt = live.publish(2)
    weights = live.rollouts.store.root / str(corrupt) / WEIGHTS
    with weights.open("r+b") as file:
        file.truncate(1000)
    with Traffic(live) as traffic:
        live.rollouts.store.promote(corrupt)  # as a damage that comes to light only where it serves: `promote` would refuse it
        told = live.until(lambda told: corrupt in told["versions"] and told["versions"][corrupt]["obstacles"])
        answered = len(traffic.answers)
        until_right(lambda: len(traffic.answers), lambda number: number > answered + 2 * PER_SECOND)
        live.until(live.serves(1))
        live.rollouts.rollback("it is corrupt")
    assert "it is cut off or was altered" in told["versions"][corrupt]["obstacles"][0]
    assert not any(told["versions"][corrupt]["holders"].values())
    assert traffic.versions() == {"tiny/1"}


@split
@pytest.mark.parametrize(("fault", "reason", "latency_ratio"), [("broken", "answers are degraded", 1e6), ("slow", "p95 is", 1)])
def test_a_canary_that_goes_badly_is_rolled_back_by_itself(live: Live, fault: str, reason: str, latency_ratio: float):
    """`latency_ratio`: on a busy machine a sound version may be slow for a while, and one that is `SLOW_S` slower not 1.5 times as slow."""
    bad = live.publish(2)
    mark = live.rollouts.store.root / str(bad) / fault
    if fault == "slow":  # from its first answer on: under such a guard chance may end the trial before it is seen to be under way
        mark.touch()
    with Traffic(live, degraded=(f"tiny/{bad}",)) as traffic:
        trial = Trial(version=bad, share=0.5, guard=Guard(fewest_requests=20, latency_ratio=latency_ratio, latency_slack_ms=0))
        live.rollouts.promote(bad, trial)
        if fault == "broken":  # no process would load it before
            live.until(lambda told: bad in told["versions"] and told["versions"][bad]["gateways"])
            mark.touch()
        told = live.until(lambda told: told["ended"] and told["ended"][-1]["version"] == bad)
        live.until(live.serves(1))
        traffic.until_all_from(1)
    assert told["ended"][-1]["outcome"] == "rolled back"
    assert reason in told["ended"][-1]["reason"]
    ended = live.rollouts.read()
    tried = {user: ended.ended[-1].trial.includes("default", user) for user in USERS}
    assert {answer["user"] for answer in traffic.answers if answer["model_version"] == f"tiny/{bad}"} <= {u for u in USERS if tried[u]}
    assert ended.trial is None


@split
def test_a_share_of_the_users_is_served_with_other_flags_until_the_trial_ends(live: Live):
    with httpx.Client(timeout=120) as client:

        def generated() -> dict[str, bool]:
            """User -> whether the answer's items were generated too."""
            return {user: any(stage["stage"] == "generate" for stage in live.ask(client, user)["stages"]) for user in USERS}

        trial = live.rollouts.promote(1, Trial(version=1, kind="ab", share=0.5, flags={"strategy": "retrieval"})).trial
        assert trial
        until_right(generated, lambda seen: seen == {user: not trial.includes("default", user) for user in USERS})
        rows = until_right(
            lambda: json_of(f"{live.url}/v1/models")["versions"], lambda rows: all(row["requests"] for row in of_version_1(rows))
        )
        assert [(row["role"], row["flags"]) for row in of_version_1(rows)] == [("stable", {}), ("ab", {"strategy": "retrieval"})]
        live.rollouts.rollback("enough was seen")
        until_right(generated, lambda seen: all(seen.values()))


def of_version_1(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["version"] == 1]


@split
@pytest.mark.parametrize(("of", "alike"), [(1, True), (2, False)], ids=["the same model", "another one"])
def test_a_shadow_answers_nobody_and_its_overlap_is_told(live: Live, of: int, alike: bool):
    tried = live.publish(of)
    with Traffic(live) as traffic:
        live.rollouts.promote(tried, Trial(version=tried, kind="shadow", share=1.0))
        told = live.until(lambda told: (told["versions"].get(tried) or {}).get("overlap") is not None)
        live.rollouts.rollback("enough was seen")
    assert traffic.versions() == {"tiny/1"}
    assert told["versions"][tried]["role"] == "shadow"
    assert (told["versions"][tried]["overlap"] == 1.0) is alike


@everywhere
def test_split_or_colocated_the_items_are_those_that_the_engines_give(live: Live):
    with httpx.Client(timeout=120) as client:
        answers = {user: live.ask(client, user) for user in USERS}
    assert {answer["model_version"] for answer in answers.values()} == {"tiny/1"}
    assert {user: [one["item_id"] for one in answer["items"]] for user, answer in answers.items()} == live.expected["tiny/1"]
