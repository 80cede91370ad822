"""The ZeroMQ front door on a real socket, before the real routes; what stands behind them is played."""

import asyncio
import hashlib
import json
import socket
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from cluster import metrics as m
from cluster.config import GatewaySettings, ZeroMQSettings, parse
from cluster.errors import BackendFailed, BackendUnavailable, ConfigError, InvalidRequest
from deployments.app import build
from deployments.http.api import create_api
from deployments.http.exchange import HttpResponse, exchange
from deployments.http.problems import problem_of
from deployments.zeromq.door import FrontDoor
from deployments.zeromq.frames import HEADERS, opened, understood
from deployments.zeromq.known_keys import MOST_ASKING
from deployments.zeromq.zmtp import MOST_FRAMES, UNREAD_BYTES, Broken, ByteBudget, Peer
from tests.bundles import make_bundle
from tests.examples import example
from tests.fakes.applications import deployments_of, most_on_a_node
from tests.fakes.data import Data
from tests.fakes.service import Service
from tests.noted import Noted
from tests.ports import free_port
from tests.waiting import passed, settled

RECOMMEND = b"POST /v1/recommend"
LARGE = b'{"user_id": "ada"' + b" " * 19_000 + b"}"
KEYS = [
    {"name": name, "sha256": hashlib.sha256(f"genrec_{name}".encode()).hexdigest(), "tenant": tenant, "rights": rights}
    for name, tenant, rights in (("shop", "shop", ["read", "events"]), ("boss", None, ["read", "events", "erase", "operate"]))
]


class Client:
    """One DEALER, or a socket of another `kind`."""

    def __init__(self, address, kind=zmq.DEALER):
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(kind)
        self.socket.connect(address)

    async def send(self, *frames):
        await self.socket.send_multipart(list(frames))

    async def heard(self):
        """Request id, status, headers, body."""
        request_id, status, headers, body = await asyncio.wait_for(self.socket.recv_multipart(), 120)
        return request_id, int(status), json.loads(headers), json.loads(body)

    async def ask(self, call=RECOMMEND, body=None, headers=None, request_id=b"1"):
        sent = [b"" if part is None else json.dumps(part).encode() for part in (headers, body)]
        await self.send(request_id, call, *sent)
        answered = await self.heard()
        assert answered[0] == request_id
        return answered[1:]


def frame(body, flags=0):
    return bytes([flags | 2]) + len(body).to_bytes(8) + body


def ready(kind):
    return frame(b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4) + kind, flags=4)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
MORE = 1


class RawClient:
    """Sends bytes of its own making, which libzmq would not send."""

    async def opened(self, address):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port))
        return self

    async def connected(self, address):
        await self.opened(address)
        await self.send(GREETING + ready(b"DEALER"))
        await asyncio.wait_for(self.reader.readuntil(b"Identity\0\0\0\0"), 120)
        return self

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def is_cut(self):
        """Once it is; what the door sent before is read."""
        with suppress(ConnectionError):  # a reset, where the door has not read all that was sent
            await asyncio.wait_for(self.reader.read(), 120)
        self.writer.close()


class Opened:
    """A door before an API, and clients of it."""

    def __init__(self, door, service, data, address, edge, exchange, check_key):
        self.door, self.service, self.data, self.address, self.clients, self.edge = door, service, data, address, [], edge
        self.exchange, self.check_key = exchange, check_key

    def client(self, kind=zmq.DEALER):
        self.clients.append(Client(self.address, kind))
        return self.clients[-1]

    async def reached(self, holds):
        async with asyncio.timeout(120):
            while not holds(self.door.statistics()):  # noqa: ASYNC110 - it tells nobody when they change
                await asyncio.sleep(0.005)


@asynccontextmanager
async def opened_door(gateway=None, exchanged=None, checked=None, meter=m.SILENT, **settings):
    service, data = Service(), Data()
    service.gate.set()
    edge = GatewaySettings.model_validate({"max_body_bytes": 20_000, **(gateway or {})})
    api = create_api(service, data, edge, meter=meter)
    address = f"tcp://127.0.0.1:{free_port()}"

    async def through(asked, within_s):
        return await exchange(api, asked)

    async def key_checked(asked, within_s):
        return await exchange(api.edge.check_key, asked)

    limits = ZeroMQSettings.model_validate({"address": address, **settings})
    door = FrontDoor(limits, exchanged or through, checked or key_checked, max_body_bytes=edge.max_body_bytes, meter=meter)
    await door.open()
    served = Opened(door, service, data, address, api.edge, through, key_checked)
    try:
        yield served
    finally:
        for client in served.clients:
            client.context.destroy(linger=0)
        service.gate.set()
        await door.close(within_s=5)


async def test_a_request_is_answered_as_over_http():
    async with opened_door() as served:
        status, headers, answer = await served.client().ask(body={"user_id": "ada", "k": 3})
    assert (status, headers["content-type"], answer["user_id"], answer["model_version"]) == (200, "application/json", "ada", "tiny/1")
    assert served.service.asked[0].k == 3


async def test_an_answer_that_is_no_json_costs_the_example_client_that_one_call():
    async with opened_door() as served, example("zeromq_client").Door(served.address, timeout_s=120) as door:
        with pytest.raises(ValueError, match="Expecting value"):
            await door.ask("GET /docs")
        status, answer = await door.ask("POST /v1/recommend", {"user_id": "ada"})
    assert (status, answer["user_id"]) == (200, "ada")


async def test_calls_at_a_door_that_is_away_end_in_time_and_are_not_made_later():
    """However many they are: ZeroMQ takes a thousand for a peer that may come."""
    address, door_of = f"tcp://127.0.0.1:{free_port()}", example("zeromq_client").Door
    async with door_of(address, timeout_s=0.1) as away:
        calls = (away.ask("POST /v1/recommend", {"user_id": "late"}) for _ in range(1100))
        assert {type(outcome) for outcome in await asyncio.gather(*calls, return_exceptions=True)} == {TimeoutError}
        async with opened_door(address=address) as served, door_of(address, timeout_s=120) as door:
            assert (await door.ask("POST /v1/recommend", {"user_id": "ada"}))[0] == 200
            assert [request.user_id for request in served.service.asked] == ["ada"]


async def test_a_req_socket_is_answered_behind_its_empty_frame():
    async with opened_door() as served:
        status, _, answer = await served.client(zmq.REQ).ask(body={"user_id": "ada"})
    assert (status, answer["user_id"]) == (200, "ada")


async def test_requests_under_way_together_are_answered_out_of_order_by_their_ids():
    async with opened_door() as served:
        served.service.gate.clear()
        client = served.client()
        await client.send(b"slow", RECOMMEND, b"", b'{"user_id": "slow"}')
        await served.reached(lambda now: now.in_flight == 1)
        assert (await client.ask(b"GET /healthz", request_id=b"quick"))[0] == 200
        served.service.gate.set()
        request_id, status, _, answer = await client.heard()
    assert (request_id, status, answer["user_id"]) == (b"slow", 200, "slow")


async def test_answers_go_to_the_clients_that_asked():
    async with opened_door() as served:
        clients = [served.client() for _ in range(5)]
        answers = await asyncio.gather(*(client.ask(body={"user_id": str(number)}) for number, client in enumerate(clients)))
    assert [answer["user_id"] for _, _, answer in answers] == ["0", "1", "2", "3", "4"]


MALFORMED = {
    "an id alone": ([b"1"], "frames"),
    "too many frames": ([b"1", RECOMMEND, b"", b"{}", b"more"], "frames"),
    "all the frames that are read": ([b"1", RECOMMEND, *(b"" for _ in range(MOST_FRAMES - 2))], "frames"),
    "no method": ([b"1", b"/v1/recommend"], "call"),
    "another method": ([b"1", b"PATCH /v1/recommend"], "call"),
    "bytes": ([b"1", b"\xff\xfe\x00"], "call"),
    "a path with spaces": ([b"1", b"GET /v1/a b"], "call"),
    "headers that are no JSON": ([b"1", RECOMMEND, b"{"], "headers"),
    "headers that are no UTF-8": ([b"1", RECOMMEND, b"\xff\xfe\xfd"], "headers"),
    "headers nested without end": ([b"1", RECOMMEND, b"[" * 50_000], "headers"),
    "headers that are a list": ([b"1", RECOMMEND, b"[]"], "headers"),
    "another header": ([b"1", RECOMMEND, b'{"host": "x"}'], "headers.host"),
    "half a surrogate pair": ([b"1", RECOMMEND, b'{"\\ud800": "x"}'], "headers.\\ud800"),
    "a header that is a number": ([b"1", RECOMMEND, b'{"priority": 1}'], "headers.priority"),
    "a header of two lines": ([b"1", RECOMMEND, b'{"priority": "u=1\\nx: y"}'], "headers.priority"),
}


async def test_malformed_frames_are_answered_with_a_problem_and_the_next_request_is_answered():
    async with opened_door() as served:
        client = served.client()
        for frames, field in MALFORMED.values():
            await client.send(*frames)
            request_id, status, headers, problem = await client.heard()
            assert (request_id, status, headers["content-type"]) == (frames[0], 422, "application/problem+json"), frames
            assert (problem["errors"][0]["field"], problem["status"]) == (field, 422)
        assert (await client.ask(body={"user_id": "ada"}))[0] == 200
        assert served.door.statistics().refused == {422: len(MALFORMED)}
        served.door.check_health()


async def test_a_request_whose_id_an_answer_would_not_bring_back_is_refused_and_not_carried_out():
    async with opened_door() as served:
        client = served.client()
        await client.send(b"x" * 257, RECOMMEND, b"", b'{"user_id": "ada"}')
        request_id, status, _, problem = await client.heard()
        assert (request_id, status, problem["errors"][0]["field"]) == (b"x" * 256, 422, "request_id")
        assert not served.service.asked
        assert (await client.ask(body={"user_id": "ada"}, request_id=b"x" * 256))[0] == 200


async def test_a_frame_beyond_all_bounds_costs_its_sender_the_connection_and_nobody_else_anything():
    async with opened_door() as served:
        sender, other = served.client(), served.client()
        cut = sender.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await sender.send(b"1", RECOMMEND, b"", b"x" * 200_000)
        await recv_monitor_message(cut)  # what is sent before the connection is cut is lost with it
        sender.socket.disable_monitor()
        assert (await other.ask(body={"user_id": "ada"}))[0] == 200
        assert (await sender.ask(body={"user_id": "ada"}, request_id=b"2"))[0] == 200  # ZeroMQ has connected again
        assert served.door.statistics().served == {200: 2}


@pytest.mark.parametrize(("size", "most_frames"), [(0, MOST_FRAMES), (5_000, 17), (80_000, 1)], ids=["empty", "middling", "large"])
@pytest.mark.worker_loops
async def test_a_message_that_never_ends_is_cut_off_and_nothing_of_it_is_kept(size, most_frames):
    async with opened_door() as served:
        endless = [await RawClient().connected(served.address) for _ in range(5)]
        for client in endless:
            await client.send(frame(bytes(size), MORE) * most_frames)
        for client in endless:
            with suppress(ConnectionError):
                await client.send(frame(bytes(size), MORE))
            await client.is_cut()
        await served.reached(lambda now: now.held_bytes == 0)
        assert (await served.client().ask(body={"user_id": "ada"}))[0] == 200


async def test_a_message_that_is_not_complete_in_time_is_cut_off(monkeypatch):
    async with opened_door() as served:
        client = await RawClient().connected(served.address)
        monkeypatch.setattr("deployments.zeromq.zmtp.MESSAGE_WITHIN_S", 0.2)  # it is for the handshake too
        await client.send(frame(b"1", MORE) + frame(RECOMMEND, MORE) + frame(b"", MORE) + frame(b"x" * 10_000)[:5_000])
        await client.is_cut()
        assert served.door.statistics().held_bytes == 0


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n".ljust(80), GREETING + ready(b"PUB"), GREETING + frame(b"no command"), GREETING + b"\xff" * 9]
)
async def test_what_is_no_socket_that_asks_is_cut_off(said):
    async with opened_door() as served:
        client = await RawClient().opened(served.address)
        await client.send(said)
        await client.is_cut()
        assert (await served.client().ask(body={"user_id": "ada"}))[0] == 200


async def test_where_all_connections_are_at_work_the_next_is_closed_at_once(monkeypatch):
    monkeypatch.setattr("deployments.zeromq.door.MOST_CONNECTIONS", 1)
    async with opened_door() as served:
        served.service.gate.clear()
        at_work = served.client()
        await at_work.send(b"1", RECOMMEND, b"", b'{"user_id": "ada"}')
        await served.reached(lambda now: now.in_flight == 1)
        await (await RawClient().opened(served.address)).is_cut()
        served.service.gate.set()
        assert (await at_work.heard())[:2] == (b"1", 200)


async def test_idle_connections_shut_no_client_out_and_those_that_never_showed_a_key_make_room_first(monkeypatch):
    monkeypatch.setattr("deployments.zeromq.door.MOST_CONNECTIONS", 3)
    async with opened_door({"api_keys": KEYS}) as served:
        shop = {"authorization": "Bearer genrec_shop"}
        known = await RawClient().connected(served.address)
        asked = json.dumps(shop).encode()
        await known.send(frame(b"1", MORE) + frame(RECOMMEND, MORE) + frame(asked, MORE) + frame(b'{"user_id": "ada"}'))
        await asyncio.wait_for(known.reader.readuntil(b'"user_id":"ada"'), 120)
        silent = await RawClient().connected(served.address)
        slow = await RawClient().connected(served.address)
        await slow.send(frame(b"1", MORE))
        for cut in (silent, slow):
            assert (await served.client().ask(body={"user_id": "ada"}, headers=shop))[0] == 200
            await cut.is_cut()
        assert served.door.connections == 3
        assert not known.reader.at_eof()
        assert (await served.client().ask(body={"user_id": "ada"}, headers=shop))[0] == 200
        await known.is_cut()  # among those with a key it is silent for longest


@pytest.mark.worker_loops
async def test_of_two_idle_connections_the_one_that_is_reading_its_answer_is_not_cut(short_directory, monkeypatch):
    monkeypatch.setattr("deployments.zeromq.door.MOST_CONNECTIONS", 2)
    size = 2**22  # far more than what sockets hold
    async with opened_door(address=f"ipc://{short_directory}/door", exchanged=answering(size)) as served:
        reading, writer = await asyncio.open_unix_connection(short_directory / "door", limit=2**16)
        writer.write(GREETING + ready(b"DEALER") + ASKED)
        await served.reached(lambda now: now.served.get(200) == 1)
        others = [served_through_a_file(served, short_directory / "door")]
        assert (await others[0].ask())[0] == 200
        await served.reached(lambda now: 0 < now.held_bytes < size)  # the other has read its own
        others.append(served_through_a_file(served, short_directory / "door"))
        assert (await others[1].ask())[0] == 200
        await asyncio.wait_for(reading.readexactly(size), 120)
        writer.close()


async def test_a_ping_is_answered_also_within_a_message():
    async with opened_door() as served:
        client = await RawClient().connected(served.address)
        ping = frame(b"\x04PING\x00\x0acontext", flags=4)
        await client.send(ping + frame(b"1", MORE) + ping + frame(b"GET /healthz"))
        for _ in range(2):
            await asyncio.wait_for(client.reader.readuntil(b"\x04PONGcontext"), 120)
        await asyncio.wait_for(client.reader.readuntil(b'{"status":"ok"}'), 120)
        client.writer.close()


@pytest.mark.worker_loops
async def test_what_all_requests_hold_has_a_budget_and_what_is_beyond_it_is_refused_at_once():
    async with opened_door(max_bytes=2**16) as served:
        served.service.gate.clear()
        clients = [served.client() for _ in range(4)]
        for number, client in enumerate(clients[:3], 1):
            await client.send(b"1", RECOMMEND, b"", LARGE)
            await served.reached(lambda now, sent=number: now.in_flight == sent)
        await clients[3].send(b"beyond", RECOMMEND, b"", LARGE)
        request_id, status, headers, problem = await clients[3].heard()
        assert (request_id, status, headers["retry-after"]) == (b"beyond", 503, "1")
        held = f"the requests at this door hold {3 * len(LARGE)} of 65536 bytes"
        assert problem["detail"] == f"{held}, and those of one caller no more than are free"
        served.service.gate.set()
        assert [(await client.heard())[1] for client in clients[:3]] == [200, 200, 200]
        assert served.door.statistics().held_bytes == 0


@pytest.mark.worker_loops
async def test_connections_that_have_shown_no_key_leave_room_for_requests_with_one():
    size = 80_000
    async with opened_door(gateway={"api_keys": KEYS}, max_bytes=3 * size + 300) as served:
        known, unfinished = served.client(), []
        shop, large = {"authorization": "Bearer genrec_shop"}, {"user_id": "ada", "blocked": [f"{number}" for number in range(1_500)]}
        assert (await known.ask(b"GET /healthz", headers=shop))[0] == 200
        for _ in range(4):
            unfinished.append(await RawClient().connected(served.address))
            await unfinished[-1].send(frame(b"1", MORE) + frame(RECOMMEND, MORE) + frame(bytes(size), MORE) + PING)
            await asyncio.wait_for(unfinished[-1].reader.readuntil(b"\x04PONG"), 120)
        assert served.door.statistics().held_bytes == 2 * size
        assert (await known.ask(body=large, headers=shop))[0] == 200
        assert (await served.client().ask(body={"user_id": "ada", "blocked": ["x" * 100] * 4}, headers=shop))[0] == 200
        for client in unfinished:
            client.writer.close()
        await served.reached(lambda now: now.held_bytes == 0)


@pytest.mark.worker_loops
async def test_the_large_requests_of_one_key_leave_room_for_those_of_others_over_however_many_connections_they_come():
    async with opened_door(gateway={"api_keys": KEYS}, max_bytes=100_000) as served:
        served.service.gate.clear()
        boss, shop = (json.dumps({"authorization": f"Bearer genrec_{name}"}).encode() for name in ("boss", "shop"))
        greedy = [served.client() for _ in range(3)]
        for number, client in enumerate(greedy, 1):
            await client.send(b"large", RECOMMEND, boss, LARGE)
            await served.reached(lambda now, sent=number: now.in_flight == sent)
        for client in (greedy[0], served.client()):
            await client.send(b"beyond", RECOMMEND, boss, LARGE)
            assert (await client.heard())[:2] == (b"beyond", 503)
        assert served.door.statistics().held_bytes == 3 * len(LARGE)
        await greedy[0].send(b"small", RECOMMEND, boss, b'{"user_id": "ada"' + b" " * 400 + b"}")
        modest = served.client()
        await modest.send(b"large", RECOMMEND, shop, LARGE)
        await served.reached(lambda now: now.in_flight == 5)
        served.service.gate.set()
        assert [(await client.heard())[1] for client in (*greedy, greedy[0], modest)] == [200] * 5
        assert served.door.statistics().held_bytes == 0


async def test_a_frame_that_is_announced_and_not_sent_takes_no_room_from_others():
    async with opened_door(max_bytes=2**16) as served:
        announcing = [await RawClient().connected(served.address) for _ in range(4)]
        for client in announcing:
            await client.send(frame(b"1", MORE) + frame(RECOMMEND, MORE) + frame(b"", MORE) + frame(bytes(20_000))[:9])
        large = {"user_id": "ada", "blocked": [f"{number}" for number in range(1_500)]}
        assert (await served.client().ask(body=large))[0] == 200
        assert served.door.statistics().held_bytes == 0
        for client in announcing:
            client.writer.close()


async def test_of_a_frame_that_does_not_fit_as_a_whole_nothing_is_held():
    reader, budget = asyncio.StreamReader(), ByteBudget(70_000)
    reader.feed_data(GREETING + ready(b"REQ") + framed(20_000, 1) + framed(60_000, 1) + framed(20_000, 0))
    peer = Peer(reader, Deaf(), budget, 200_000)
    await peer.greet()
    heard = await peer.message()
    assert (heard.whole, [len(one) for one in heard.frames], heard.held, budget.held) == (False, [20_000, 0, 0], 20_000, 20_000)


async def test_a_key_that_is_not_known_takes_no_place_in_the_queue():
    async with opened_door(gateway={"api_keys": KEYS}, max_concurrent=1, max_queue=1) as served:
        served.service.gate.clear()
        shop, strangers = served.client(), [served.client() for _ in range(4)]
        await shop.send(b"running", RECOMMEND, b'{"authorization": "Bearer genrec_shop"}', b'{"user_id": "ada"}')
        await served.reached(lambda now: now.in_flight == 1)
        for number, stranger in enumerate(strangers):
            status, headers, problem = await stranger.ask(body={"user_id": "eve"}, headers={"authorization": f"Bearer genrec_{number}"})
            assert (status, "www-authenticate" in headers, problem["instance"]) == (401, True, "zeromq")
            assert (await stranger.ask(b"GET /healthz"))[0] == 401
        assert served.door.statistics().queued == 0
        await shop.send(b"waiting", RECOMMEND, b'{"authorization": "Bearer genrec_shop"}', b'{"user_id": "ada"}')
        await served.reached(lambda now: now.queued == 1)
        served.service.gate.set()
        assert [(await shop.heard())[:2] for _ in range(2)] == [(b"running", 200), (b"waiting", 200)]


async def test_a_key_is_asked_after_once():
    asked = []

    async def counted(request, within_s):
        asked.append(request)
        return await served.check_key(request, within_s)

    async with opened_door(gateway={"api_keys": KEYS}, checked=counted) as served:
        for _ in range(5):
            assert (await served.client().ask(body={"user_id": "ada"}, headers={"authorization": "Bearer genrec_shop"}))[0] == 200
    assert len(asked) == 1


async def test_the_question_whether_a_key_is_known_costs_its_tenant_no_request(monkeypatch):
    monkeypatch.setattr("deployments.zeromq.known_keys.KNOWN_FOR_S", 0.0)
    limits = {"api_keys": KEYS, "rate_limits": {"default": {"per_s": 0.01, "burst": 3}}}
    async with opened_door(gateway=limits) as served:
        client, shop = served.client(), {"authorization": "Bearer genrec_shop"}
        assert [(await client.ask(body={"user_id": "ada"}, headers=shop))[0] for _ in range(4)] == [200, 200, 200, 429]


@pytest.mark.parametrize(("told", "then"), [(401, b"401"), (403, b"403"), (503, b"200"), (None, b"200")])
async def test_requests_with_a_known_key_go_on_while_it_is_checked_again_until_a_gateway_refuses_it(monkeypatch, told, then):
    monkeypatch.setattr("deployments.zeromq.known_keys.KNOWN_FOR_S", 0.0)
    asked, may_answer = [], asyncio.Event()

    async def checked(request, within_s):
        asked.append(request)
        if len(asked) == 1:
            return HttpResponse(204, {}, b"")
        await may_answer.wait()
        if told is None:
            raise BackendUnavailable("no replica of gateway could be reached")
        return HttpResponse(told, {}, b'{"detail": "said by a gateway"}')

    async with opened_door(exchanged=answering(1), checked=checked) as served:
        client = await RawClient().connected(served.address)
        for _ in range(3):
            await client.send(ASKED + PING)
            assert b"200" in await asyncio.wait_for(client.reader.readuntil(b'"x"'), 120)
            await asyncio.wait_for(client.reader.readuntil(b"\x04PONG"), 120)
        assert len(asked) == 2
        may_answer.set()
        await settled()
        await client.send(ASKED + PING)
        assert then in await asyncio.wait_for(client.reader.readuntil(b"\x04PONG"), 120)
        client.writer.close()


@pytest.mark.parametrize("key", [None, "genrec_shop"])
async def test_a_key_that_many_connections_send_at_once_is_asked_after_once_and_none_of_them_is_refused(key):
    asked, may_answer = [], asyncio.Event()

    async def counted(request, within_s):
        asked.append(request)
        await may_answer.wait()
        return await served.check_key(request, within_s)

    async with opened_door(gateway={"api_keys": KEYS} if key else None, checked=counted) as served:
        clients = [served.client() for _ in range(MOST_ASKING + 4)]
        headers = json.dumps({"authorization": f"Bearer {key}"} if key else {}).encode()
        for client in clients:
            await client.send(b"1", RECOMMEND, headers, b'{"user_id": "ada"}')
        await served.reached(lambda _: served.door.connections == len(clients))
        may_answer.set()
        assert {(await client.heard())[1] for client in clients} == {200}
    assert len(asked) == 1


async def test_urgency_orders_the_requests_of_a_key_and_gives_it_nothing_over_others():
    async with opened_door(gateway={"api_keys": KEYS}, max_concurrent=1) as served:
        served.service.gate.clear()
        client = served.client()

        async def send(key, user, urgency):
            headers = json.dumps({"authorization": f"Bearer genrec_{key}", "priority": f"u={urgency}"}).encode()
            await client.send(user.encode(), RECOMMEND, headers, json.dumps({"user_id": user}).encode())

        await send("shop", "running", 3)
        await served.reached(lambda now: now.in_flight == 1)
        for user, urgency in (("third", 5), ("first", 0), ("second", 1)):
            await send("shop", user, urgency)
        await send("boss", "patient", 7)
        await served.reached(lambda now: now.queued == 4)
        served.service.gate.set()
        assert [(await client.heard())[0] for _ in range(5)] == [b"running", b"first", b"patient", b"second", b"third"]


async def test_a_key_has_one_turn_however_it_is_written():
    async with opened_door(gateway={"api_keys": KEYS}, max_concurrent=1) as served:
        served.service.gate.clear()
        client = served.client()
        spellings = ("Bearer genrec_shop", "bearer genrec_shop", "BEARER  genrec_shop", "Bearer genrec_shop ", "Bearer genrec_boss")
        for number, authorization in enumerate(spellings):
            headers = json.dumps({"authorization": authorization}).encode()
            await client.send(b"%d" % number, RECOMMEND, headers, b'{"user_id": "ada"}')
            await served.reached(lambda now, sent=number: (now.in_flight, now.queued) == (1, sent))
        served.service.gate.set()
        assert [(await client.heard())[:2] for _ in spellings] == [(b"0", 200), (b"1", 200), (b"4", 200), (b"2", 200), (b"3", 200)]


async def test_what_a_client_has_waiting_when_it_leaves_is_not_computed():
    async with opened_door(max_concurrent=1) as served:
        served.service.gate.clear()
        staying, leaving = served.client(), served.client()
        await staying.send(b"1", RECOMMEND, b"", b'{"user_id": "running"}')
        await served.reached(lambda now: now.in_flight == 1)
        for number in range(3):
            await leaving.send(b"%d" % number, RECOMMEND, b"", b'{"user_id": "gone"}')
        await served.reached(lambda now: now.queued == 3)
        leaving.context.destroy(linger=0)
        await served.reached(lambda now: served.door.connections == 1)
        served.service.gate.set()
        assert (await staying.heard())[1] == 200
        await served.reached(lambda now: (now.queued, now.in_flight) == (0, 0))
        assert [request.user_id for request in served.service.asked] == ["running"]


def answering(size):
    async def answered(asked, within_s):
        return HttpResponse(200, {}, b'"%b"' % (b"x" * size))

    return answered


@pytest.mark.worker_loops
async def test_an_answer_larger_than_what_may_be_left_unread_arrives():
    async with opened_door(exchanged=answering(2 * UNREAD_BYTES)) as served:
        client = served.client()
        for _ in range(2):
            status, _, answer = await client.ask(b"POST /v1/recommend:batch")
            assert (status, len(answer)) == (200, 2 * UNREAD_BYTES)


@pytest.mark.worker_loops
async def test_a_client_that_reads_none_of_its_answers_is_cut_off():
    async with opened_door(exchanged=answering(UNREAD_BYTES // 2)) as served:
        client = await RawClient().connected(served.address)
        with suppress(ConnectionError):
            for _ in range(8):
                await client.send(frame(b"1", MORE) + frame(RECOMMEND))
        await served.reached(lambda _: served.door.connections == 0)
        client.writer.close()


def served_through_a_file(served, file):
    served.clients.append(Client(f"ipc://{file}"))
    return served.clients[-1]


WRONG = frame(b"1", MORE) + frame(b"wrong")
PING = frame(b"\x04PING\x00\x00", flags=4)


@pytest.mark.parametrize(
    "sent",
    [WRONG * 2000, PING * 2000, frame(b"1", MORE) + PING * 2000 + frame(b"wrong")],
    ids=["malformed messages", "heartbeats", "heartbeats within a message"],
)
async def test_connections_take_turns_however_much_of_one_has_arrived(sent, monkeypatch):
    handled = []
    obey, understand = Peer._obey, understood  # noqa: SLF001 - where heartbeats are handled
    monkeypatch.setattr(Peer, "_obey", lambda self, *command: handled.append("of many") or obey(self, *command))
    monkeypatch.setattr(
        "deployments.zeromq.door.understood",
        lambda frames: handled.append("of many" if frames[0] == b"wrong" else "the other") or understand(frames),
    )
    async with opened_door() as served:
        many, other = [await RawClient().connected(served.address) for _ in range(2)]
        handled.clear()  # READY of both
        many.writer.write(sent)
        other.writer.write(frame(b"1", MORE) + frame(b"GET /healthz"))
        await asyncio.wait_for(other.reader.readuntil(b'{"status":"ok"}'), 120)
        assert handled.index("the other") < 200, "of 2000"
        await served.reached(lambda _: len(handled) >= 2001)
        for client in (many, other):
            client.writer.close()


@pytest.mark.worker_loops
async def test_a_client_without_a_known_key_is_not_heard_while_answers_to_it_are_unread(short_directory):
    async with opened_door(address=f"ipc://{short_directory}/door") as served:
        reader, writer = await asyncio.open_unix_connection(short_directory / "door")
        writer.write(GREETING + ready(b"DEALER"))
        await asyncio.wait_for(reader.readuntil(b"Identity\0\0\0\0"), 120)
        writer.transport.pause_reading()
        sent = 3000  # far more than what the socket holds of the answers to them
        writer.write(WRONG * sent)
        await served.reached(lambda now: now.held_bytes)
        for _ in range(100):
            await asyncio.sleep(0)
            now = served.door.statistics()
            assert (now.held_bytes < 2**10, now.refused[422] < sent) == (True, True)
        assert (await served_through_a_file(served, short_directory / "door").ask(body={"user_id": "ada"}))[0] == 200
        writer.transport.resume_reading()
        for _ in range(sent):
            await asyncio.wait_for(reader.readuntil(b'"instance":"zeromq"'), 120)
        await served.reached(lambda now: (now.refused[422], now.held_bytes) == (sent, 0))
        writer.close()


@pytest.mark.worker_loops
async def test_unread_answers_count_as_held_and_those_left_for_longest_make_room(short_directory):
    size = 2**20
    async with opened_door(address=f"ipc://{short_directory}/door", exchanged=answering(size), max_bytes=4 * size) as served:
        asked, slow = frame(b"1", MORE) + frame(RECOMMEND), []
        for answered, held in enumerate((1, 2, 2, 2), 1):
            _, writer = await asyncio.open_unix_connection(short_directory / "door")
            slow.append(writer)
            writer.transport.pause_reading()
            writer.write(GREETING + ready(b"DEALER") + asked)
            await served.reached(lambda now, answered=answered: now.served.get(200) == answered)
            assert (held - 0.5) * size < served.door.statistics().held_bytes <= 2 * size
        await served.reached(lambda _: served.door.connections == 2)
        status, _, answer = await served_through_a_file(served, short_directory / "door").ask()
        assert (status, len(answer)) == (200, size)
        for writer in slow:
            writer.close()
        await served.reached(lambda now: now.held_bytes == 0)


async def silent(path, *sent):
    """The writer of a connection that sends `sent`, and reads nothing."""
    _, writer = await asyncio.open_unix_connection(path)
    writer.transport.pause_reading()
    writer.write(GREETING + ready(b"DEALER") + b"".join(sent))
    return writer


ASKED = frame(b"1", MORE) + frame(RECOMMEND)


@pytest.mark.worker_loops
async def test_three_clients_that_read_nothing_stop_no_door(short_directory):
    size = UNREAD_BYTES + 2**20
    async with opened_door(address=f"ipc://{short_directory}/door", exchanged=answering(size)) as served:
        writers = [await silent(short_directory / "door", ASKED) for _ in range(3)]
        await served.reached(lambda now: now.served.get(200) == 3 and served.door.connections == 1)
        assert 0 < served.door.statistics().held_bytes <= size + 2**10
        assert (await served_through_a_file(served, short_directory / "door").ask(b"wrong"))[0] == 422
        for writer in writers:
            writer.close()
        await served.reached(lambda now: now.held_bytes == 0)


@pytest.mark.worker_loops
async def test_a_single_client_that_reads_nothing_makes_room_once_the_request_of_another_finds_none(short_directory):
    size, asked = 2**20, {"user_id": "x" * 1000}
    async with opened_door(address=f"ipc://{short_directory}/door", exchanged=answering(size), max_bytes=8 * size) as served:
        writer = await silent(short_directory / "door", ASKED * 13)
        await served.reached(lambda now: now.served.get(200) == 13)
        assert (served.door.statistics().held_bytes > 8 * size, served.door.connections) == (True, 1)
        other = served_through_a_file(served, short_directory / "door")
        status, headers, _ = await other.ask(body=asked)
        assert (status, headers["retry-after"]) == (503, "1")
        assert (await other.ask(body=asked))[0] == 200
        writer.close()


@pytest.mark.worker_loops
async def test_of_two_clients_with_unread_answers_the_one_that_has_read_some_since_keeps_its_connection(short_directory):
    size = 2**20
    async with opened_door(address=f"ipc://{short_directory}/door", exchanged=answering(size), max_bytes=8 * size) as served:
        reader, busy = await asyncio.open_unix_connection(short_directory / "door", limit=2**16)
        busy.write(GREETING + ready(b"DEALER") + ASKED * 2)
        await served.reached(lambda now: now.served.get(200) == 2)
        idle = await silent(short_directory / "door", ASKED * 2)
        await served.reached(lambda now: now.served.get(200) == 4)
        await asyncio.wait_for(reader.readexactly(3 * size // 2), 120)
        last = await silent(short_directory / "door", ASKED * 3)
        await served.reached(lambda now: now.served.get(200) == 7 and served.door.connections == 2)
        await asyncio.wait_for(reader.readexactly(size // 2), 120)
        for writer in (busy, idle, last):
            writer.close()


async def test_a_door_at_a_file_is_its_owners_alone(short_directory):
    file = short_directory / "door"
    async with opened_door(address=f"ipc://{file}") as served:
        assert (await served_through_a_file(served, file).ask(body={"user_id": "ada"}))[0] == 200
        assert file.stat().st_mode & 0o777 == 0o600


async def test_an_empty_message_is_answered_too():
    async with opened_door() as served:
        client = served.client()
        await client.send(b"")
        envelope, request_id, status, *_ = await client.socket.recv_multipart()
    assert (envelope, request_id, status) == (b"", b"", b"422")


@given(frames=st.lists(st.binary(max_size=80), min_size=1, max_size=6))
def test_any_frames_are_a_request_or_a_refusal(frames):
    envelope, rest = opened(frames)
    assert list(envelope.before) == frames[: len(envelope.before)]
    try:
        asked = understood(rest)
    except InvalidRequest as refused:
        problem = problem_of("zeromq", refused)
        asked = None
    assert set(asked.headers) <= set(HEADERS) if asked else problem.model_dump_json().encode()


def framed(size, flags):
    long = flags & 2 or size > 255
    return bytes([flags | 2 if long else flags]) + size.to_bytes(8 if long else 1) + bytes(size)


class Deaf:
    """The writer of a connection that hears nothing."""

    def __init__(self):
        self.transport = self

    def write(self, data): ...
    def set_write_buffer_limits(self, high): ...
    def is_closing(self):
        return False

    def get_write_buffer_size(self):
        return 0


FRAMES = st.builds(framed, st.integers(0, 500), st.integers(0, 8))


@given(greeting=st.sampled_from([b"", GREETING, GREETING + ready(b"REQ")]), then=st.lists(FRAMES | st.binary(max_size=300), max_size=30))
async def test_any_bytes_are_messages_or_the_end_of_a_connection_and_nothing_stays_held(greeting, then):
    reader, budget = asyncio.StreamReader(), ByteBudget(600)
    reader.feed_data(greeting + b"".join(then))
    reader.feed_eof()
    peer = Peer(reader, Deaf(), budget, 1_000)

    async def heard_to_the_end():
        await peer.greet()
        while True:
            heard = await peer.message()
            assert 1 <= len(heard.frames) <= MOST_FRAMES
            budget.give(heard.held, heard.caller)

    with pytest.raises((Broken, EOFError)):
        await heard_to_the_end()
    assert budget.held == 0


async def test_what_is_wrong_with_a_message_is_told_as_over_http():
    async with opened_door(gateway={"max_k": 5}) as served:
        client = served.client()
        for body, field in (({"user_id": "ada", "k": 6}, "k"), ({"user_id": "ada", "nope": 1}, "nope"), (None, "body")):
            status, headers, problem = await client.ask(body=body)
            assert (status, headers["content-type"]) == (422, "application/problem+json")
            assert (problem["errors"][0]["field"], problem["instance"]) == (field, "/v1/recommend")
        assert (await client.ask(b"GET /v1/nothing"))[0] == 404
        status, _, problem = await client.ask(body={"user_id": "a" * 30_000})
        assert (status, problem["title"]) == (413, "Body too large")


async def test_what_gateways_tell_haproxy_is_told_to_no_client():
    told = set()

    async def noted(asked, within_s):
        answered = await served.exchange(asked, within_s)
        told.update(answered.headers)
        return replace(answered, headers={**answered.headers, "genrec-audit": "lost"})

    async with opened_door(gateway={"api_keys": KEYS}, exchanged=noted) as served:
        for key in ("shop", "boss"):
            status, headers, _ = await served.client().ask(body={"user_id": "ada"}, headers={"authorization": f"Bearer genrec_{key}"})
            assert (status, [name for name in headers if name.startswith("genrec-")]) == (200, ["genrec-audit"])
    assert {"genrec-most", "genrec-operates", "genrec-known"} <= told


async def test_keys_and_tenants_hold():
    async with opened_door(gateway={"api_keys": KEYS}) as served:
        client = served.client()
        statuses = [
            (await client.ask(body={"user_id": "ada", **more}, headers=headers))[0]
            for headers, more in (
                ({}, {}),
                ({"authorization": "Bearer genrec_other"}, {}),
                ({"authorization": "Bearer genrec_shop"}, {"tenant": "rival"}),
                ({"authorization": "Bearer genrec_shop"}, {}),
            )
        ]
        assert statuses == [401, 401, 403, 200]
        assert [request.tenant for request in served.service.asked] == ["shop"]
        status, _, problem = await client.ask(b"DELETE /v1/users/ada/history", headers={"authorization": "Bearer genrec_shop"})
        assert (status, "has not the right 'erase'" in problem["detail"]) == (403, True)
        told = [await client.ask(b"statistics", headers={"authorization": f"Bearer genrec_{name}"}) for name in ("nobody", "shop", "boss")]
        assert [status for status, _, _ in told] == [401, 403, 200]


async def test_a_caller_without_a_key_that_is_let_in_operates_nothing_here_either():
    async with opened_door(gateway={"api_keys": KEYS, "allow_anonymous": True}) as served:
        client = served.client()
        statuses = [(await client.ask(body={"user_id": "ada"}))[0], (await client.ask(b"statistics"))[0]]
        statuses += [(await client.ask(body={"user_id": "ada"}, headers={"authorization": "Bearer genrec_other"}))[0]]
    assert statuses == [200, 403, 401]


async def test_keys_that_are_changed_while_it_is_open_count_for_its_statistics_too():
    async with opened_door() as served:
        client = served.client()
        assert (await client.ask(b"statistics"))[0] == 200
        served.edge.reconfigure(GatewaySettings.model_validate({"api_keys": KEYS}))
        told = [await client.ask(b"statistics", headers={"authorization": f"Bearer genrec_{name}"}) for name in ("nobody", "shop", "boss")]
    assert [status for status, _, _ in told] == [401, 403, 200]


async def test_rates_hold_and_say_when_to_come_back():
    async with opened_door(gateway={"rate_limits": {"default": {"per_s": 0.01, "burst": 2}}}) as served:
        client = served.client()
        answers = [await client.ask(body={"user_id": "ada"}) for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 200, 429]
    assert int(answers[2][1]["retry-after"]) > 50
    assert answers[0][1]["ratelimit-remaining"] == "1"


async def test_an_idempotency_key_reaches_the_events():
    async with opened_door() as served:
        event = {"user_id": "ada", "item_id": "1"}
        status, _, _ = await served.client().ask(b"POST /v1/events", event, {"idempotency-key": "order-17"})
    assert status == 201
    assert served.data.events[0].idempotency_key == "order-17"


async def test_a_full_queue_refuses_at_once_and_the_most_urgent_are_next():
    async with opened_door(max_concurrent=1, max_queue=2) as served:
        served.service.gate.clear()
        client = served.client()
        for user, urgency in (("running", 3), ("later", 6), ("sooner", 0)):
            body = json.dumps({"user_id": user}).encode()
            await client.send(user.encode(), RECOMMEND, b'{"priority": "u=%d"}' % urgency, body)
        await served.reached(lambda now: (now.in_flight, now.queued) == (1, 2))
        status, headers, problem = await client.ask(body={"user_id": "one too many"})
        assert (status, headers["retry-after"], problem["title"]) == (503, "1", "Not available now")
        assert "1 requests are under way and 2 wait" in problem["detail"]
        served.service.gate.set()
        assert [(await client.heard())[0] for _ in range(3)] == [b"running", b"sooner", b"later"]
        assert [request.user_id for request in served.service.asked] == ["running", "sooner", "later"]


async def test_a_request_that_has_waited_too_long_is_answered_though_its_turn_has_not_come():
    async def hangs(asked, within_s):
        await asyncio.get_running_loop().create_future()

    async with opened_door(exchanged=hangs, max_concurrent=1, timeout_s=1) as served:
        client = served.client()
        await client.send(b"running", RECOMMEND, b"", b'{"user_id": "ada"}')
        await served.reached(lambda now: now.in_flight == 1)
        status, _, problem = await client.ask(request_id=b"waiting")
        assert (status, problem["detail"]) == (503, "the request has waited at this door for 1 s")
        await served.reached(lambda now: (now.in_flight, now.queued) == (1, 0))


async def test_the_check_of_a_key_takes_of_the_time_of_the_request():
    took_s, left_s = [], []

    async def slow(asked, within_s):
        took_s.append(await passed(0.2))
        return await served.check_key(asked, within_s)

    async def noted(asked, within_s):
        left_s.append(within_s)
        return await served.exchange(asked, within_s)

    async with opened_door(exchanged=noted, checked=slow, timeout_s=120) as served:
        assert (await served.client().ask(body={"user_id": "ada"}))[0] == 200
        assert left_s[0] <= 120 - took_s[0]


async def test_a_caller_that_fills_the_queue_makes_room_for_one_that_has_fewer_waiting():
    async with opened_door(max_concurrent=1, max_queue=3) as served:
        served.service.gate.clear()
        greedy, modest = served.client(), served.client()
        for number in range(4):
            await greedy.send(b"%d" % number, RECOMMEND, b"", json.dumps({"user_id": f"greedy-{number}"}).encode())
        await served.reached(lambda now: (now.in_flight, now.queued) == (1, 3))
        await modest.send(b"1", RECOMMEND, b"", b'{"user_id": "modest-1"}')
        assert (await greedy.heard())[:2] == (b"3", 503)
        status, *_ = await modest.ask(request_id=b"2")
        assert status == 503, "it has as many waiting then"
        served.service.gate.set()
        assert (await modest.heard())[:2] == (b"1", 200)
        assert [(await greedy.heard())[:2] for _ in range(3)] == [(b"0", 200), (b"1", 200), (b"2", 200)]
        await served.reached(lambda now: (now.in_flight, now.queued, now.held_bytes) == (0, 0, 0))


async def test_connections_without_a_key_that_fill_the_queue_make_room_for_a_key_and_take_one_turn_in_two():
    async with opened_door(gateway={"api_keys": KEYS, "allow_anonymous": True}, max_concurrent=1, max_queue=3) as served:
        served.service.gate.clear()
        strangers, shop = [served.client() for _ in range(4)], served.client()
        for number, stranger in enumerate(strangers):
            await stranger.send(b"1", RECOMMEND, b"", json.dumps({"user_id": f"stranger-{number}"}).encode())
            await served.reached(lambda now, sent=number: (now.in_flight, now.queued) == (1, sent))
        await shop.send(b"1", RECOMMEND, b'{"authorization": "Bearer genrec_shop"}', b'{"user_id": "ada"}')
        assert (await strangers[3].heard())[1] == 503
        served.service.gate.set()
        assert {(await client.heard())[1] for client in [*strangers[:3], shop]} == {200}
        assert [request.user_id for request in served.service.asked] == ["stranger-0", "stranger-1", "ada", "stranger-2"]


async def test_statistics_count_what_was_done():
    async with opened_door() as served:
        client = served.client()
        for body in ({"user_id": "ada"}, {"user_id": "ada", "k": 0}):
            await client.ask(body=body)
        await client.send(b"1")
        await client.heard()
        status, _, told = await client.ask(b"statistics")
    assert status == 200
    assert (told["queued"], told["in_flight"], told["served"], told["refused"]) == (0, 1, {"200": 1, "422": 1}, {"422": 1})
    assert 0 < told["p50_ms"] <= told["p95_ms"] <= told["p99_ms"]


async def test_what_the_door_refuses_is_counted_once_and_apart_from_what_gateways_do():
    noted = Noted()
    async with opened_door(gateway={"api_keys": KEYS}, meter=noted, max_concurrent=1, max_queue=1) as served:
        served.service.gate.clear()
        client, shop = served.client(), {"authorization": "Bearer genrec_shop"}
        assert (await client.ask(b"PATCH /v1/recommend", headers=shop))[0] == 422
        assert (await client.ask(body={"user_id": "eve"}))[0] == 401
        for number, holds in enumerate((lambda now: now.in_flight == 1, lambda now: now.queued == 1)):
            await client.send(b"%d" % number, RECOMMEND, json.dumps(shop).encode(), b'{"user_id": "ada"}')
            await served.reached(holds)
        assert (await client.ask(body={"user_id": "ada"}, headers=shop, request_id=b"too many"))[0] == 503
        served.service.gate.set()
        assert {(await client.heard())[1] for _ in range(2)} == {200}
    refused = {dict(labels)["status"]: count for (name, labels), count in noted.sums.items() if name == m.REFUSALS.name}
    assert refused == {"422": 1, "401": 1, "503": 1}
    assert noted.total(m.REFUSALS, route="zeromq") == 3
    assert noted.total(m.HTTP_REQUESTS, status="200") == noted.total(m.HTTP_REQUESTS) == 2


async def test_gateways_that_do_not_answer_are_a_problem():
    async def nobody(asked, within_s):
        assert 0 < within_s <= 3
        raise BackendUnavailable("no replica of gateway answered within 3 s")

    async with opened_door(exchanged=nobody, timeout_s=3) as served:
        status, headers, problem = await served.client().ask(body={"user_id": "ada"})
    assert (status, headers["retry-after"], problem["detail"]) == (503, "2", "no replica of gateway answered within 3 s")


@pytest.mark.parametrize(
    ("call", "route"), [(RECOMMEND, "/v1/recommend"), (b"GET /v1/users/ada/events?limit=3", "other"), (b"statistics", "other")]
)
async def test_what_no_gateway_answers_is_counted_as_a_failed_answer_and_as_no_refusal(call, route):
    async def dead(asked, within_s):
        raise BackendUnavailable("no replica of gateway could be reached")

    async def broken(asked, within_s):
        raise RuntimeError("an answer that cannot be read")

    async def raised(asked, within_s):
        raise BackendFailed("gateway raised ValueError(); its log has the trace")

    noted = Noted()
    async with opened_door(exchanged=raised, meter=noted) as served:
        assert (await served.client().ask(call))[0] == 503
        assert served.door.statistics().failed == {503: 1}
    assert noted.total(m.HTTP_REQUESTS) == 0, "the gateway has counted it"
    async with opened_door(exchanged=dead, meter=noted) as served:
        assert (await served.client().ask(call))[0] == 503
        assert (served.door.statistics().failed, served.door.statistics().refused) == ({503: 1}, {})
    async with opened_door(exchanged=broken, meter=noted) as served:
        assert (await served.client().ask(call))[0] == 500
    async with opened_door(checked=dead, meter=noted) as served:
        assert (await served.client().ask(call))[0] == 503, "the key cannot be checked"
    assert noted.total(m.REFUSALS) == 0
    assert [noted.total(m.HTTP_REQUESTS, route=route, status=status) for status in ("503", "500")] == [2, 1]
    assert noted.total(m.HTTP_REQUESTS) == 3


async def test_an_error_of_ours_is_a_problem_that_tells_nothing(caplog):
    async def broken(asked, within_s):
        raise RuntimeError("a secret")

    async with opened_door(exchanged=broken) as served:
        status, _, problem = await served.client().ask(body={"user_id": "ada"})
    assert (status, "secret" in json.dumps(problem), "a secret" in caplog.text) == (500, False, True)


@pytest.mark.worker_loops
async def test_a_client_that_leaves_costs_the_others_nothing():
    async with opened_door() as served:
        served.service.gate.clear()
        leaving = served.client()
        await leaving.send(b"1", RECOMMEND, b"", b'{"user_id": "gone"}')
        await served.reached(lambda now: now.in_flight == 1)
        leaving.context.destroy(linger=0)
        served.service.gate.set()
        assert (await served.client().ask(body={"user_id": "ada"}))[0] == 200
        await served.reached(lambda now: now.served == {200: 2})


async def test_a_door_that_closes_answers_what_is_under_way_first():
    async with opened_door(max_concurrent=1) as served:
        client, idle = served.client(), served.client()
        assert (await idle.ask(b"GET /healthz"))[0] == 200
        served.service.gate.clear()
        for name in (b"running", b"waiting"):
            await client.send(name, RECOMMEND, b"", b'{"user_id": "ada"}')
        await served.reached(lambda now: (now.in_flight, now.queued) == (1, 1))
        closing = asyncio.create_task(served.door.close(within_s=120))
        for one in (idle, client):
            status, headers, problem = await one.ask(body={"user_id": "ada"}, request_id=b"late")
            assert (status, headers["retry-after"], problem["detail"]) == (503, "1", "this door is being closed; ask again")
        assert not closing.done()
        served.service.gate.set()
        await closing
        assert [(await client.heard())[:2] for _ in range(2)] == [(b"running", 200), (b"waiting", 200)]


async def test_a_request_with_a_key_under_check_is_told_that_the_door_closes():
    checking = asyncio.Event()

    async def checked(request, within_s):
        checking.set()
        await asyncio.get_running_loop().create_future()

    async with opened_door(checked=checked) as served:
        client = served.client()
        await client.send(b"1", RECOMMEND, b"", b'{"user_id": "ada"}')
        await checking.wait()
        await served.door.close(within_s=0)
        assert (await client.heard())[:2] == (b"1", 503)


async def test_a_door_that_must_close_tells_those_it_cannot_answer():
    async with opened_door(max_concurrent=1) as served:
        served.service.gate.clear()
        client = served.client()
        for name in (b"running", b"waiting"):
            await client.send(name, RECOMMEND, b"", b'{"user_id": "ada"}')
        await served.reached(lambda now: (now.in_flight, now.queued) == (1, 1))
        await served.door.close(within_s=0.05)
        assert {(await client.heard())[:2] for _ in range(2)} == {(b"running", 503), (b"waiting", 503)}


async def test_its_address_is_taken_over_once_it_is_free():
    async with opened_door() as served:
        again = FrontDoor(ZeroMQSettings(address=served.address), served.exchange, served.check_key, max_body_bytes=20_000)
        opening = asyncio.create_task(again.open())
        await asyncio.sleep(0.3)
        assert not opening.done()
        await served.door.close()
        await opening
        assert (await served.client().ask(body={"user_id": "ada"}))[0] == 200
        await again.close()
        await served.door.open()  # for the fixture to close


async def test_a_file_that_a_living_door_listens_at_is_not_taken_over_and_one_that_a_dead_door_left_is(short_directory):
    file = short_directory / "door"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(file))
    async with opened_door(address=f"ipc://{file}") as served:
        again = FrontDoor(ZeroMQSettings(address=f"ipc://{file}"), served.exchange, served.check_key, max_body_bytes=20_000)
        opening = asyncio.create_task(again.open())
        assert (await served_through_a_file(served, file).ask(body={"user_id": "ada"}))[0] == 200
        assert not opening.done()
        await served.door.close()
        await opening
        assert (await served_through_a_file(served, file).ask(body={"user_id": "ada"}))[0] == 200
        await again.close()
        await served.door.open()  # for the fixture to close


async def test_an_address_that_cannot_be_had_is_refused_by_name():
    door = FrontDoor(ZeroMQSettings(address="ipc:///no/such/directory/door"), None, None, max_body_bytes=20_000)
    with pytest.raises(
        ConfigError, match=r"zeromq cannot listen at ipc:///no/such/directory/door .*; give zeromq.address one of this node's"
    ):
        await door.open()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.0.2.77:5555", "tcp://[::]:5555", "tcp://host:5555"])
def test_an_address_that_other_machines_reach_is_refused_with_the_cure(address):
    with pytest.raises(ConfigError, match=r"open to other machines.*give tcp://127\.0\.0\.1:5555 or ipc:.*a tunnel that encrypts"):
        parse({"zeromq": {"address": address}})


@pytest.mark.parametrize("address", ["ipc://genrec.sock", "ipc://run/door", "ipc://./door"])
def test_a_relative_path_is_refused_with_the_reason(address):
    with pytest.raises(ConfigError, match=r"is relative, and replicas run in directories of Ray's; give ipc:///a/file"):
        parse({"zeromq": {"address": address}})


def test_a_name_without_a_file_is_refused_as_every_user_of_the_machine_may_connect_to_it():
    with pytest.raises(ConfigError, match=r"ipc://@door is a name without a file, open to every user of the machine; give ipc:///a/file"):
        parse({"zeromq": {"address": "ipc://@door"}})


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5555", "ipc:///run/genrec/door", "ipc:///run/@door"]
)
def test_an_address_of_this_machine_alone_is_taken(address):
    assert parse({"zeromq": {"address": address}}).zeromq.address == address


def test_it_is_off_unless_configured_and_its_address_is_checked():
    assert parse({}).zeromq is None
    assert parse({"zeromq": {}}).zeromq.address == "tcp://127.0.0.1:5555"
    with pytest.raises(ConfigError, match=r"zeromq\.address = 'localhost:5555'"):
        parse({"zeromq": {"address": "localhost:5555"}})
    with pytest.raises(ConfigError, match=r"zeromq\.max_bytes \(65536\) must be at least gateway\.max_body_bytes \(100000\)"):
        parse({"zeromq": {"max_bytes": 65536}, "gateway": {"max_body_bytes": 100_000}})


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_the_application_has_a_door_where_it_is_configured(tmp_path, placement):
    make_bundle(tmp_path / "tiny")
    tree = {"model_dir": str(tmp_path / "tiny"), "placement": placement}
    without, with_it = build(tree), build({**tree, "zeromq": {}})
    assert "zeromq" not in {one.name for one in deployments_of(without)}
    (door,) = (one for one in deployments_of(with_it) if one.name == "zeromq")
    assert (door.num_replicas, most_on_a_node(door)) == (1, 1)
