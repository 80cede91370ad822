"""A Serve application with nothing in it but homes of users, replicas that take any call, a switchboard, and a door for a test's calls."""

import asyncio
import os
from collections.abc import AsyncGenerator, Collection
from time import monotonic
from typing import Any

import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

from cluster.engines.forgetting import Scope
from cluster.errors import BackendError
from cluster.fleet.heartbeat import Orders, Report
from cluster.values import EncodeRequest, Outcomes, Together, UserSequence
from deployments.calls.mailbox import Mailbox
from deployments.calls.remote import ask
from deployments.fleet.erasure_follower import ErasureFollower
from deployments.fleet.switchboard import REPORT_INTERVAL_S, SwitchboardDeployment

NO_HISTORY = UserSequence(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int8), np.zeros(0, np.float32), request_time=0)


class Home:
    """Says which replica it is, and remembers whom it served; the one named `slow` takes its time."""

    def __init__(self, switchboard: DeploymentHandle) -> None:
        self._served: set[str] = set()
        self._seconds = 0.0
        name = serve.get_replica_context().replica_id.unique_id
        self._following = asyncio.create_task(self._follow(switchboard, name))

    async def encode(self, request: EncodeRequest | None, slow: str, seconds: float) -> str:
        here = serve.get_replica_context().replica_id.unique_id
        await asyncio.sleep(seconds if here == slow else 0)
        if request:
            self._served.add(request.user_id)
        return here

    async def together(self, together: Together) -> Outcomes:
        await asyncio.sleep(self._seconds)
        here = serve.get_replica_context().replica_id.unique_id
        return Outcomes([(place, here) for place in range(len(together.requests))])

    async def together_in_parts(self, together: Together) -> AsyncGenerator[Outcomes, None]:
        yield await self.together(together)

    async def take(self, seconds: float) -> None:
        """Take so long for every call from now on."""
        self._seconds = seconds

    async def remembers(self, user: str) -> bool:
        return user in self._served

    async def fall_silent(self, replica: str) -> bool:
        """Go on without the switchboard; whether it was this replica that was told."""
        if meant := replica == serve.get_replica_context().replica_id.unique_id:
            self._following.cancel()
        return meant

    async def die(self, replica: str) -> None:
        """Does nothing where another replica is meant."""
        if replica == serve.get_replica_context().replica_id.unique_id:
            os._exit(1)

    async def _follow(self, switchboard: DeploymentHandle, name: str) -> None:
        follower, orders = ErasureFollower(self._forget, drop_answers=lambda *_: None, again_after_s=60), Orders()
        while True:
            since = follower.place
            # its process may start minutes after this one
            orders = await ask(switchboard, "beat", name, Report(place=since), orders.mark, REPORT_INTERVAL_S, within_s=600)
            await follower.follow(orders.erasures, since)

    async def _forget(self, users: Collection[Scope], again: Collection[Scope]) -> None:
        for _, user in (*users, *again):
            self._served = self._served - {user} if user else set()


class Taker:
    """Says which replica it is, and what it weighs once it has been told."""

    def __init__(self) -> None:
        self._weight: float | None = None

    async def take(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return serve.get_replica_context().replica_id.unique_id

    async def weigh(self, replica: str, weight: float) -> bool:
        """Whether it was this replica that was told."""
        if meant := replica == serve.get_replica_context().replica_id.unique_id:
            self._weight = weight
        return meant

    async def record_routing_stats(self) -> dict[str, float]:
        return {} if self._weight is None else {"weight": self._weight}


class Door:
    """POST {users, calls, at_once, by, slow, seconds} -> user -> replicas, or errors, in the order called.

    {take: calls, by: least or heavy, seconds} -> replicas; {weigh: replica, weight}: of those of heavy.
    {parties: lists of users of one home, replicas, seconds} -> of each, which replica answered; a party goes together in one call, and that
    home takes so long.
    {remember: users} -> those that their home remembers; {die: user, home: replica} ends a home, {silence: user, home: replica} has it say
    nothing to the switchboard any more.
    {erase: user, within_s} -> whether all homes have forgotten them within that time.
    """

    def __init__(self, home: DeploymentHandle, least: DeploymentHandle, heavy: DeploymentHandle, switchboard: DeploymentHandle) -> None:
        self._home, self._takers, self._switchboard = home, {"least": least, "heavy": heavy}, switchboard
        self._mailbox = Mailbox(home)

    async def __call__(self, http: Request) -> Any:
        if http.method != "POST":
            return "ready"
        order = await http.json()
        if "take" in order:
            taker = self._takers[order["by"]]
            return await asyncio.gather(*(ask(taker, "take", order["seconds"], within_s=60) for _ in range(order["take"])))
        if "weigh" in order:
            return await self._weigh(order["weigh"], order["weight"])
        if "parties" in order:
            return await self._parties(order["parties"], order["replicas"], order["seconds"])
        if "die" in order:
            return await self._die(order["die"], order["home"])
        if "erase" in order:
            return await self._erase(order["erase"], order["within_s"])
        if "silence" in order:
            return await self._silence(order["silence"], order["home"])
        if "remember" in order:
            return [user for user in order["remember"] if await ask(self._home_of(user), "remembers", user, within_s=60)]
        doors, served = asyncio.Semaphore(order["at_once"]), {user: [] for user in order["users"]}

        async def call(user: str) -> None:
            async with doors:
                served[user].append(await self._call(user, order))

        await asyncio.gather(*(call(user) for _ in range(order["calls"]) for user in order["users"]))
        return served

    async def _call(self, user: str, order: dict[str, Any]) -> str:
        """The user stands in the session or in the request."""
        by_session = order["by"] == "session"
        handle = self._home_of(user) if by_session else self._home
        request = None if by_session else EncodeRequest(NO_HISTORY, top_n=1, user_id=user)
        given = request, order.get("slow", ""), order.get("seconds", 0)
        try:
            return await ask(handle, "encode", *given, within_s=60, tries=2)
        except BackendError as error:
            return f"failed: {error}"

    async def _parties(self, parties: list[list[str]], replicas: list[str], seconds: float) -> list[list[str]]:
        self._mailbox.learn(replicas)
        home, answers = self._home_of(parties[0][0]), []
        await ask(home, "take", seconds, within_s=60)
        for users in parties:
            requests = (EncodeRequest(NO_HISTORY, top_n=1, user_id=user) for user in users)
            answers.append(asyncio.gather(*(self._mailbox.send(request, 60.0) for request in requests)))
            await asyncio.sleep(seconds / 4)  # the next party comes while this one is on its way
        found = [sorted(set(await one)) for one in answers]
        await ask(home, "take", 0.0, within_s=60)
        return found

    async def _weigh(self, replica: str, weight: float) -> bool:
        """Tells replicas until it was the right one."""
        deadline = monotonic() + 60
        while monotonic() < deadline:
            calls = (ask(self._takers["heavy"], "weigh", replica, weight, within_s=60) for _ in range(6))
            if any(await asyncio.gather(*calls)):
                return True
        return False

    async def _silence(self, user: str, home: str) -> bool:
        """Tells the user's replicas until it was the home, which is passed over while it is busy."""
        deadline = monotonic() + 60
        while monotonic() < deadline:
            if await ask(self._home_of(user), "fall_silent", home, within_s=60):
                return True
        return False

    async def _die(self, user: str, home: str) -> bool:
        """As `_silence`; a call that ends a replica fails."""
        deadline = monotonic() + 60
        while monotonic() < deadline:
            try:
                await ask(self._home_of(user), "die", home, within_s=60)
            except BackendError:
                return True
        return False

    async def _erase(self, user: str, within_s: float) -> bool:
        number, erased, deadline = await ask(self._switchboard, "erase", "default", user, within_s=60), False, monotonic() + within_s
        while not erased and monotonic() < deadline:
            erased = await ask(self._switchboard, "erased", number, within_s=60)
            await asyncio.sleep(0.1)
        return erased

    def _home_of(self, user: str) -> DeploymentHandle:
        return self._home.options(session_id=f"default/{user}")


def build(settings: dict[str, Any]) -> serve.Application:
    switchboard = serve.deployment(name="switchboard", ray_actor_options={"num_cpus": 0.1})(SwitchboardDeployment).bind(settings)
    home, least, heavy = serve.deployment(name="home")(Home), serve.deployment(name="least")(Taker), serve.deployment(name="heavy")(Taker)
    return serve.deployment(name="door")(Door).bind(home.bind(switchboard), least.bind(), heavy.bind(), switchboard)
