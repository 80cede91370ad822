"""A caller that erases invented users as fast as it can, and leaves before the answers: what becomes of it, and of others beside it."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from cluster.config import GatewaySettings, parse
from cluster.fleet.erasures import ErasureLog
from cluster.fleet.heartbeat import Report
from deployments.admin_api import AdminApi
from deployments.fleet.erasure_follower import ErasureFollower
from deployments.fleet.switchboard import SwitchboardDeployment
from deployments.http.api import create_api
from deployments.user_data import UserData
from tests.fakes.callers import KEYS, Client, authorization
from tests.fakes.handles import Handle
from tests.fakes.processes import only
from tests.fakes.service import Service

LONGEST = 300
"""Erasures that the switchboard's log holds here."""
FORGETS_S, AGAIN_S = 0.02, 2.0
"""How long a process takes to forget a user, and after which time it does so again."""


class Store:
    """Of no events."""

    async def erase(self, tenant, user_id):
        return 0

    async def close(self):
        pass


class Fleet:
    """A gateway, its switchboard, and another process that keeps something of users: how many it has `told` to be forgotten, and how often
    it has `lost` track.
    """

    def __init__(self, model_dir):
        settings = parse({"model_dir": str(model_dir)})
        self.board, self.told, self.lost = SwitchboardDeployment({"model_dir": str(model_dir)}, live=only("a")), 0, 0
        self.admin = AdminApi(Handle(self.board), lambda: None)
        versions = SimpleNamespace(forget=lambda *_: None)
        self.data = UserData(settings, self.admin, versions, cache=None, events=Store())
        limits = {"api_keys": KEYS, "admission": {"max_concurrent": 1024, "max_queued": 1024}}
        self.api = create_api(Service(), self.data, GatewaySettings.model_validate(limits))
        self._follower = ErasureFollower(self._forget, drop_answers=lambda *_: None, again_after_s=AGAIN_S)
        self._following, self._ends = asyncio.create_task(self._follow()), False

    def erase(self, user, key):
        return Client(self, f"/v1/users/{user}/history", {}, authorization(key), method="DELETE")

    async def close(self):
        self._ends = True
        await self._following
        await self._follower.finish()
        await self.data.close()
        await self.admin.close()

    async def _forget(self, users, again):
        await asyncio.sleep(FORGETS_S * len([*users, *again]))
        self.told += len([*users, *again])

    async def _follow(self):
        """As a heartbeat."""
        mark = 0
        while not self._ends:
            place = self._follower.place
            orders = await self.board.beat("a", Report(place=place), mark, 0.1)
            mark = orders.mark
            self.lost += orders.erasures.lost_track
            await self._follower.follow(orders.erasures, place)


@pytest.fixture
async def fleet(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.fleet.erasures.ErasureLog", partial(ErasureLog, longest=LONGEST))
    made = Fleet(tmp_path)
    yield made
    await made.close()


@pytest.mark.virtual_time
async def test_a_flood_of_erasures_whose_clients_leave_has_no_process_lose_track_and_another_callers_is_done(fleet):
    loop, flood, other = asyncio.get_running_loop(), list[Client](), None
    while len(flood) < 3 * LONGEST:
        flood.append(client := fleet.erase(f"invented-{len(flood)}", "shop"))
        loop.call_later(0.3, client.gone.set)
        await asyncio.sleep(1 / 200)
        if len(flood) == 2 * LONGEST:
            other = fleet.erase("ada", "any")
    await other.task
    assert fleet.lost == 1, "as it started"
    assert (other.status, b'"everywhere":true' in other.sent[1]["body"]) == (200, True)
    assert {client.status for client in flood if client.sent} - {200} == {503}, "those that had not left"
