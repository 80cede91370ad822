"""A cluster with a fake clock: gateways that ask encoder replicas by users' homes, through the code that routes in a real one.

    arrivals -> a gateway at random -> StageCaller -> Mailbox -> UserAffinityRouter -> a simulated replica: Batcher, kept states, an engine

Only the replicas, the network and Serve's handle are played: a handle does what Serve's does with a router, in the same order. Computing
in the gateways takes no time. Times of an engine: `BATCH_S` for a batch, and for each request `KEPT_S` where the replica keeps the user's
states, else `ANEW_S`, which is what a history of 512 events takes ONNX Runtime on a core.
"""

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any, cast

import numpy as np
from ray.serve._private.common import DeploymentHandleSource, RequestMetadata
from ray.serve.request_router import PendingRequest

import tests  # noqa: F401 - its clocks are those that all below import by name
from cluster.traffic.batcher import Batcher, Member, Pacing
from cluster.traffic.user_router import in_order_of, user_key
from cluster.values import EncodeRequest, Outcomes, Together, UserSequence
from deployments.calls.mailbox import Mailbox
from deployments.calls.remote import StageCaller
from deployments.user_router import UserAffinityRouter
from tests.fakes.handles import Streamed
from tests.fakes.routers import ENCODER, Replica
from tests.virtual_time import VirtualLoop

BATCH_S, KEPT_S, ANEW_S, HOP_S = 0.002, 0.0005, 0.013, 0.0005
MOST, WAIT_S, WITHIN_S = 32, 0.002, 10.0
TENANTS = ("red", "blue")
NO_HISTORY = UserSequence(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int8), np.zeros(0, np.float32), request_time=0)


@dataclass(frozen=True, slots=True)
class World:
    """`rate`: requests a second; `users`: of each tenant, the more popular the smaller their number (Zipf, with `exponent`).

    `hottest`: the share of all requests that one user makes besides; `room`: how many users' states a replica keeps, for each user that
    it is home to at the beginning; `home`: else requests go by Serve's power of two choices; `options` of the router.
    """

    gateways: int = 8
    replicas: int = 8
    users: int = 4000
    rate: float = 480.0
    seconds: float = 60.0
    exponent: float = 0.5
    hottest: float = 0.0
    room: float = 0.8
    seed: int = 0
    home: bool = True
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """Of each request: when it began, how long it took, its user and the replica that answered; `computed`: by replica, requests."""

    began_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    computed: Counter[str] = field(default_factory=Counter)
    failed: int = 0

    def p99_ms(self, since_s: float = 0.0) -> float:
        """Of the requests that began then or later."""
        return self.percentile_ms(99, since_s)

    def percentile_ms(self, percent: float, since_s: float = 0.0) -> float:
        took_s = [took for began, took in zip(self.began_s, self.took_s, strict=True) if began >= since_s]
        return float(np.percentile(took_s, percent)) * 1e3

    def kept_share(self, since_s: float = 0.0) -> float:
        """Of those requests, how many found their users' states."""
        return float(np.mean([kept for began, kept in zip(self.began_s, self.kept, strict=True) if began >= since_s]))

    def home_share(self, replicas: Sequence[str]) -> float:
        """Of all requests, how many were answered by the home that their user has among these."""
        homes = {user: in_order_of(user, replicas)[0] for user in set(self.users)}
        return float(np.mean([homes[user] == replica for user, replica in zip(self.users, self.replicas, strict=True)]))

    def busiest(self) -> float:
        """The most requests that a replica computed, over the mean."""
        return max(self.computed.values()) / (sum(self.computed.values()) / len(self.computed))


class SimulatedReplica(Replica):
    """Answers each request with its own name and whether it had kept the user's states; `slower`: times as long as others."""

    def __init__(self, name: str, room: int, outcome: Outcome) -> None:
        super().__init__(name)
        self.name, self.slower = name, 1.0
        self._kept, self._room, self._outcome = OrderedDict[str, None](), room, outcome
        self._batcher: Batcher[str, tuple[str, bool]] = Batcher(
            self._compute, lambda sizes: range(min(len(sizes), MOST)), lambda: MOST, pacing=Pacing(wait_s=WAIT_S)
        )

    def keep(self, user: str) -> bool:
        """Whether the user's states were kept; they are from now on, as the newest. A copy of a request has no user."""
        if not user:
            return False
        kept = user in self._kept
        self._kept[user] = None
        self._kept.move_to_end(user)
        if len(self._kept) > self._room:
            self._kept.popitem(last=False)
        return kept

    async def together(self, together: Together) -> Outcomes:
        waiting = [self._batcher.submit(user_key(request)) for request, _ in together.requests]
        try:
            return Outcomes([(place, await one) for place, one in enumerate(waiting)])
        finally:
            for one in waiting:
                one.cancel()
            self.queue -= 1

    async def _compute(self, members: Sequence[Member[str, tuple[str, bool]]]) -> list[tuple[str, bool]]:
        kept = [self.keep(member.request) for member in members]
        await asyncio.sleep(self.slower * (BATCH_S + sum(KEPT_S if one else ANEW_S for one in kept)))
        self._outcome.computed[self.name] += len(members)
        return [(self.name, one) for one in kept]


class SimulatedHandle:
    """What a gateway's handle of the encoder does with a call: it asks the router, sends, and tells it what the replica says."""

    deployment_name = "encoder"

    def __init__(self, router: UserAffinityRouter) -> None:
        self.router = router
        self._ids = count()

    def options(self, *, stream: bool = False, **_: str) -> "_Method":
        """`together`, which `together_in_parts` answers in one part."""
        return _Method(self._call, stream)

    async def _call(self, together: Together) -> Any:
        name = f"{next(self._ids)}"
        pending = PendingRequest(args=[together], kwargs={}, metadata=RequestMetadata(request_id=name, internal_request_id=name))
        replica: Any = await self.router._choose_replica_for_request(pending)  # noqa: SLF001 - what Serve calls
        accepted = asyncio.Event()
        sent = asyncio.ensure_future(_travelled(replica, together, accepted))
        self.router.on_send_request(replica.replica_id)
        sent.add_done_callback(lambda _: self.router.on_request_completed(replica.replica_id, name))
        try:
            await accepted.wait()
            await asyncio.sleep(HOP_S)
            self.router.on_new_queue_len_info(replica.replica_id, replica.queue)
            self.router.on_request_routed(pending, replica.replica_id, cast("Any", sent))
            sent.add_done_callback(lambda _: self.router.decrement_queue_len_cache(replica.replica_id))
            return await sent
        except asyncio.CancelledError:
            sent.cancel()
            raise


@dataclass(frozen=True, slots=True)
class _Method:
    call: Callable[[Together], Coroutine[Any, Any, Any]]
    stream: bool

    def remote(self, together: Together) -> "asyncio.Future[Any] | Streamed":
        return Streamed(self._one_part(together)) if self.stream else asyncio.ensure_future(self.call(together))

    async def _one_part(self, together: Together) -> AsyncGenerator[Any, None]:
        yield await self.call(together)


async def _travelled(replica: SimulatedReplica, together: Together, accepted: asyncio.Event) -> Outcomes:
    await asyncio.sleep(HOP_S)
    replica.queue += 1
    accepted.set()
    answers = await replica.together(together)
    await asyncio.sleep(HOP_S)
    return answers


class _Homeless(UserAffinityRouter):
    """Serve's own way, for requests of all users."""

    def rank(self, *_: Any) -> None:
        return None


class Simulation:
    """`events`: what happens to the cluster, by the second at which it does."""

    def __init__(self, world: World, events: dict[float, Callable[["Simulation"], None]] | None = None) -> None:
        self.world, self.outcome, self._events = world, Outcome(), events or {}
        self._random = random.Random(world.seed)
        self._room = max(1, round(world.room * len(TENANTS) * world.users / world.replicas))
        self.replicas = [self._replica(f"encoder-{number}") for number in range(world.replicas)]
        self._routers = [self._router() for _ in range(world.gateways)]
        handles = [cast("Any", SimulatedHandle(router)) for router in self._routers]
        self._mailboxes = [Mailbox(handle) for handle in handles]
        self._callers = [
            StageCaller(handle, mailbox=mailbox, repeatable=True) for handle, mailbox in zip(handles, self._mailboxes, strict=True)
        ]
        self._weights = list(accumulate(number**-world.exponent for number in range(1, world.users + 1)))

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.replicas]

    def add(self, replicas: int) -> None:
        """So many new ones, empty."""
        self.replicas += [self._replica(f"encoder-{len(self.replicas) + number}") for number in range(replicas)]
        self._tell()

    def remove(self) -> None:
        """The first one, without which the requests that it has still end."""
        del self.replicas[0]
        self._tell()

    async def run(self) -> Outcome:
        """What came of the requests, once all are answered. The most popular users' states are kept at their homes when it begins."""
        self._tell()
        self._fill()
        clock, requests = asyncio.get_running_loop().time, list[asyncio.Task[None]]()
        began = clock()
        events = iter([*sorted(self._events.items()), (float("inf"), lambda _: None)])
        due, happens = next(events)
        at = self._random.expovariate(self.world.rate)
        while at < self.world.seconds:
            while due <= at:
                await asyncio.sleep(max(0.0, began + due - clock()))
                happens(self)
                due, happens = next(events)
            await asyncio.sleep(max(0.0, began + at - clock()))
            requests.append(asyncio.ensure_future(self._request(at)))
            at += self._random.expovariate(self.world.rate)
        await asyncio.gather(*requests)
        return self.outcome

    async def _request(self, at: float) -> None:
        tenant, user = self._user()
        gateway, clock = self._random.randrange(self.world.gateways), asyncio.get_running_loop().time
        began = clock()
        request = EncodeRequest(NO_HISTORY, top_n=1, user_id=f"{user}", tenant=tenant, model_version="one/1")
        try:
            replica, kept = await self._callers[gateway].ask(request, within_s=WITHIN_S)
        except Exception:  # noqa: BLE001 - counted
            self.outcome.failed += 1
            return
        self.outcome.began_s.append(at)
        self.outcome.took_s.append(clock() - began)
        self.outcome.users.append(f"{tenant}/{user}")
        self.outcome.replicas.append(replica)
        self.outcome.kept.append(kept)

    def _user(self) -> tuple[str, int]:
        if self._random.random() < self.world.hottest:
            return TENANTS[0], 0
        return self._random.choice(TENANTS), self._random.choices(range(1, self.world.users + 1), cum_weights=self._weights)[0]

    def _replica(self, name: str) -> SimulatedReplica:
        self.outcome.computed[name] += 0
        return SimulatedReplica(name, self._room, self.outcome)

    def _router(self) -> UserAffinityRouter:
        kind = UserAffinityRouter if self.world.home else _Homeless
        router = kind(deployment_id=ENCODER, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        router.initialize_state(**self.world.options)
        return router

    def _tell(self) -> None:
        for router, mailbox in zip(self._routers, self._mailboxes, strict=True):
            router.update_replicas(list(cast("Any", self.replicas)))
            mailbox.learn(self.names)

    def _fill(self) -> None:
        by_name = {one.name: one for one in self.replicas}
        for number in range(self.world.users, -1, -1):
            for tenant in TENANTS:
                by_name[in_order_of(f"{tenant}/{number}", self.names)[0]].keep(f"{tenant}/{number}")


def simulate(world: World, events: dict[float, Callable[[Simulation], None]] | None = None) -> Outcome:
    """In virtual time."""

    async def run() -> Outcome:
        return await Simulation(world, events).run()

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(began=0.0)) as runner:
        return runner.run(run())
