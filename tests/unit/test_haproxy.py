"""A real HAProxy, started by haproxy.sh with what Ray Serve writes, in front of a small gateway: what it refuses, and how it says so."""

import csv
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from cluster import profile
from tests.ports import free_port
from tests.waiting import eventually

OTHER = "127.0.0.2"
"""An address that is not exempt."""
FLOOD = 10**9
"""So many requests in 10 s are too many for 20 s."""
URGENT, OPERATES, USUAL, OTHERS = (f"Bearer genrec_{name}" for name in ("urgent", "operates", "usual", "others"))
"""Keys: one that may be urgent, an operator's, and two that are known."""
MARKS = {key: ["Genrec-Known"] for key in (URGENT, OPERATES, USUAL, OTHERS)}
MARKS[URGENT] += ["Genrec-Urgent"]
MARKS[OPERATES] += ["Genrec-Operates"]
NO_ANSWERS = {"/closed": b"", "/cut": b"HTTP/1.1 200 OK\r\ncontent-", "/nonsense": b"nonsense\r\n\r\n", "/silent": b""}
"""What a gateway sends in place of an answer before it closes the connection; `/silent` once the gate is open."""


@pytest.fixture(scope="module", autouse=True)
def _with_haproxy() -> None:
    if not (available := profile.works()).ok:
        pytest.skip(available.reason)


class Gateway(ThreadingHTTPServer):
    """Answers with what it was sent; `/held`, batches and erasures once the gate is open, `/most` what it takes: `most`, of `bytes`
    at most, `part` of each caller, for `longest_ms`. Each of MARKS has its marks.
    """

    daemon_threads = True
    request_queue_size = 256  # of 5, the default, HAProxy finds the server down where many requests come at once

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.gate, self.asked = threading.Event(), list[str]()
        self.most, self.bytes, self.part, self.longest_ms = 8, 1000, 2, 300_000

    def handle_error(self, request: object, client_address: object) -> None:
        """HAProxy closes connections that it has no use for."""


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_GET(self) -> None:
        if self.path.startswith("/unread"):
            self.refuse_unread(int(self.path.removeprefix("/unread/")))
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path != "/-/healthz":
            self.server.asked.append(self.path)
        if unquote(self.path).endswith(("/held", "/v1/recommend:batch")) or self.command == "DELETE":
            self.server.gate.wait(300)
        if self.path in NO_ANSWERS:
            self.break_off()
            return
        told = {
            "path": self.path,
            "body": len(body),
            "told": self.headers.get("x-request-disconnect-disabled"),
            "key": self.headers.get("idempotency-key"),
            "refused": self.headers.get_all("genrec-refused"),
        }
        answer = json.dumps(told).encode()
        self.send_response({"unknown": 401, "none": 503}.get(self.path.rpartition("/")[2], 200))
        if self.path.endswith("/docs/none"):
            self.send_header("Genrec-Pages", "none")
        if self.path.endswith("/most"):
            said = self.server.most, self.server.bytes, self.server.part, self.server.longest_ms
            self.send_header("Genrec-Most", ", ".join(map(str, said)))
        for mark in MARKS.get(self.headers.get("authorization"), []):
            self.send_header(mark, "1")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        if self.path == "/paused":
            self.wfile.write(answer[:1])
            self.server.gate.wait(300)
            answer = answer[1:]
        self.wfile.write(answer)

    do_POST = do_DELETE = do_GET

    def break_off(self) -> None:
        if self.path == "/silent":
            self.server.gate.wait(300)
        with suppress(BrokenPipeError):
            self.wfile.write(NO_ANSWERS[self.path])
        self.close_connection = True

    def refuse_unread(self, status: int) -> None:
        """As a gateway refuses a request while its body is on the way."""
        problem = json.dumps({"title": "No", "status": status, "detail": 'say "please", für alle'}, ensure_ascii=False).encode()
        self.send_response(status)
        for name, value in {"Retry-After": "7", "WWW-Authenticate": 'Bearer realm="genrec", error="invalid_token"'}.items():
            self.send_header(name, value)
        for name, value in {"Limit": "5", "Remaining": "0", "Reset": "7"}.items() if status == 429 else ():
            self.send_header(f"RateLimit-{name}", value)
        self.send_header("Genrec-Unread", b64encode(problem).decode())
        self.send_header("content-length", str(len(problem)))
        self.end_headers()
        self.wfile.write(problem)
        with suppress(ConnectionResetError):
            self.rfile.read()  # until the proxy closes it
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


class Proxy:
    """HAProxy before the gateway. `log`: what it sends its log to."""

    def __init__(
        self, gateway: Gateway, directory: Path, log: socket.socket, limits: dict[str, int], silent_s: int, gateway_s: int, host: str
    ) -> None:
        self.gateway, self.port, self.config, self.log = gateway, free_port(), directory / "haproxy.cfg", log
        self.ports = {"stats_port": free_port(), "metrics_port": free_port()}
        self.url = f"http://{'[::1]' if host == '::1' else '127.0.0.1'}:{self.port}"
        self.environment = os.environ | profile.fast() | {f"GENREC_HAPROXY_{name}": str(value) for name, value in limits.items()}
        self.settings = HAProxyConfig(
            http_options=HTTPOptions(host=host, port=self.port),
            socket_path=f"{directory}/admin.sock",
            log_target="{}:{}".format(*log.getsockname()),
            enable_hap_optimization=False,
            metrics_enabled=False,
            nbthread=1,
            timeout_connect_s=1,
            timeout_server_s=gateway_s,
            timeout_client_s=silent_s,
            has_received_routes=True,
            has_received_servers=True,
            **self.ports,
        )
        self.write(gateway)

    def write(self, gateway: Gateway) -> None:
        """The configuration as Serve writes it, with this gateway."""
        servers = [ServerConfig("one", "127.0.0.1", gateway.server_port)]
        there = {
            name: BackendConfig(name, prefix, servers=servers, app_name=name)
            for name, prefix in (("http-genrec", "/"), ("http-other", "/other"))
        }
        HAProxyApi(self.settings, there, str(self.config))._generate_config_file_internal()  # noqa: SLF001 - Ray has no other door

    def command(self, *more: str) -> list[str]:
        return [str(profile.STARTER), "-db", "-f", str(self.config), "-dR", *more]

    @contextmanager
    def running(self, *more: str) -> Iterator["Proxy"]:
        process = self.process = subprocess.Popen(self.command(*more), env=self.environment)
        try:
            eventually(
                lambda: process.poll() is not None or (httpx.get(f"{self.url}/-/healthz").status_code == 200 and self.pid() == process.pid)
            )
            assert process.poll() is None, "HAProxy has ended; it says above why"
            for backend in ("http-genrec", "http-other"):  # a gateway that waits for its turn of a core is not down
                self.administer(f"disable health {backend}/one")
            yield self
        finally:
            self.gateway.gate.set()
            process.kill()
            process.wait()

    def taking_over(self) -> AbstractContextManager["Proxy"]:
        """Another HAProxy in place of the one that runs, as Ray starts it."""
        return self.running("-sf", str(self.process.pid))

    def client(self, source: str = OTHER) -> httpx.Client:
        return httpx.Client(base_url=self.url, transport=httpx.HTTPTransport(local_address=source), timeout=300)

    def administer(self, command: str) -> str:
        """What HAProxy answers its administrator."""
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as admin:
            admin.connect(str(self.config.with_name("admin.sock")))
            admin.sendall(f"{command}\n".encode())
            return received(admin).decode()

    def pid(self) -> int | None:
        """The process that answers its administrator; None while none does."""
        with suppress(ConnectionError):
            return int(self.administer("show info").partition("\nPid: ")[2].partition("\n")[0])
        return None

    def table(self, name: str) -> str:
        """What it counts in a table."""
        return self.administer(f"show table {name}")

    def has_counted(self, times: int, table: str, source: str = OTHER) -> None:
        """Have the table say that this address came so many times in the latest 10 s, as it says for 10 s from now on."""
        self.administer(f"set table {table} key ::ffff:{source} data.http_req_rate {times}")

    def under_way(self) -> int:
        """How many requests gateways work on."""
        rows = csv.DictReader(self.administer("show stat -1 2 -1").removeprefix("# ").splitlines())
        return sum(int(row["scur"]) for row in rows)

    def fill(self, open_ones: ExitStack, count: int = 8, prefix: str = "", key: str = "") -> None:
        """Requests that a gateway works on until its gate is open."""
        before = len(self.gateway.asked)
        sent = f"GET {prefix}/held HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\npriority: u=0\r\n\r\n".encode()
        for _ in range(count):
            open_ones.enter_context(closing(self.connection(sent)))
        eventually(lambda: self.gateway.asked[before:] == [f"{prefix}/held"] * count)

    def connection(self, sent: bytes = b"", source: str = OTHER) -> socket.socket:
        with ExitStack() as unless_sent:  # the proxy may have closed it by then
            made = unless_sent.enter_context(closing(socket.create_connection(("127.0.0.1", self.port), 300, (source, 0))))
            made.sendall(sent)
            unless_sent.pop_all()
        return made


@pytest.fixture
def proxied(short_directory: Path) -> Iterator[object]:
    with ExitStack() as stack:

        def make(silent_s: int = 300, gateway_s: int = 300, host: str = "0.0.0.0", **limits: int) -> Proxy:
            gateway = stack.enter_context(Gateway())
            threading.Thread(target=gateway.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            stack.callback(gateway.shutdown)
            log = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            log.bind(("127.0.0.1", 0))
            log.settimeout(300)
            return Proxy(gateway, short_directory, log, limits, silent_s, gateway_s, host)

        yield make


def received(connection: socket.socket) -> bytes:
    """All that comes until it is closed."""
    parts = list[bytes]()
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def problem_of(answer: bytes) -> dict[str, object]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head.lower()
    return json.loads(body)


def warnings_of(proxy: Proxy, program: str) -> list[str]:
    """What HAProxy says of its configuration; it takes it."""
    command = [program, *proxy.command("-c")[1:]]
    done = subprocess.run(command, env=proxy.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.partition(" : ")[2] for line in done.stderr.splitlines() if "[WARNING]" in line or "[ALERT]" in line]


def test_haproxy_takes_what_is_made_of_serves_configuration_and_warns_of_nothing_new(proxied):
    proxy = proxied()
    serves_own = warnings_of(proxy, proxy.environment[profile.PROGRAM])
    assert warnings_of(proxy, str(profile.STARTER)) == serves_own
    once = proxy.config.read_text()
    warnings_of(proxy, str(profile.STARTER))
    assert proxy.config.read_text() == once
    server = next(line for line in once.splitlines() if line.startswith("    server one "))
    assert server.endswith(" maxconn 1024")
    assert once.count("    maxconn 4000\n") == 1


def refused_in_the_end(client: httpx.Client, path: str, headers: dict[str, str]) -> httpx.Response:
    """The first answer that is no 200: of the third request at the earliest, later where the machine takes more than 10 s for these."""
    answers = [client.get(path, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    while (answer := client.get(path, headers=headers)).status_code == 200:
        pass
    return answer


def test_a_key_or_an_address_that_asks_too_often_is_answered_429_and_no_other_is(proxied):
    with proxied(PER_CALLER=5).running() as proxy, proxy.client() as other, proxy.client("127.0.0.3") as third:
        for headers in ({}, {"authorization": USUAL}):
            third.get("/x", headers=headers)  # from then on the key is known
            refused = refused_in_the_end(other, '/a"b', headers)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json().keys() == {"title", "status", "detail", "instance", "errors"}
            assert [third.get("/x").status_code, other.get("/-/healthz").status_code] == [200, 200]
        for same in (USUAL, USUAL.replace("Bearer ", "bearer   ")):  # the key's limit, wherever it comes from, however written
            eventually(lambda said=same: third.get("/x", headers={"authorization": said}).status_code == 429)
        assert third.get("/x", headers={"authorization": OTHERS}).status_code == 200
        asked = len(proxy.gateway.asked)
        assert [httpx.get(f"{proxy.url}/x", timeout=300).status_code for _ in range(5)] == [200] * 5  # the machine itself
        assert len(proxy.gateway.asked) == asked + 5


def test_invented_keys_count_as_their_address_and_take_no_room_of_known_ones(proxied):
    with proxied(PER_CALLER=5).running() as proxy, proxy.client() as client:

        def status(key: str) -> int:
            return client.get("/unknown" if "invented" in key else "/x", headers={"authorization": key}).status_code

        assert status(USUAL) == 200
        seen = [status(f"Bearer genrec_invented{number}") for number in range(4)]
        assert seen == [401] * 4
        eventually(lambda: client.get("/x").status_code == 429)
        proxy.administer(f"set table genrec_callers key {OTHER} data.http_req_rate {FLOOD}")
        assert [status(USUAL), client.get("/x").status_code] == [200, 429]
        assert status(OTHERS) == 200, "a few with keys that are not known yet"
        proxy.has_counted(FLOOD, "genrec_newcomers")
        assert [status(OTHERS), status(URGENT), status("Bearer genrec_invented4")] == [200, 429, 429], "of these one is known"
        assert proxy.table("genrec_callers").count(" key=") == 3, "the two known keys' and the address's"


def test_connections_of_an_address_beyond_its_limit_are_closed(proxied):
    def closed_at_once() -> bool:
        with suppress(ConnectionResetError), closing(proxy.connection()) as beyond:
            return received(beyond) == b""
        return True

    def room() -> bool:
        with proxy.client() as client:
            return client.get("/x").status_code == 200

    with proxied(PER_ADDRESS=2).running() as proxy, ExitStack() as open_ones:
        kept = [open_ones.enter_context(closing(proxy.connection(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"))) for _ in range(2)]
        assert [connection.recv(12, socket.MSG_WAITALL) for connection in kept] == [b"HTTP/1.1 200"] * 2
        eventually(closed_at_once)
        eventually(lambda: httpx.get(f"{proxy.url}/x").status_code == 200, "the machine itself is let in")
        kept[0].close()
        eventually(room)


def test_idle_connections_of_a_few_addresses_leave_room_for_others_and_are_closed_where_they_are_too_many(proxied):
    asked = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"
    with proxied(CONNECTIONS=40, PER_ADDRESS=10).running() as proxy, ExitStack() as open_ones:

        def answered(source: str) -> socket.socket | None:
            """A connection after an answer; None where it was closed."""
            with suppress(ConnectionResetError, BrokenPipeError):
                made = open_ones.enter_context(closing(proxy.connection(asked, source)))
                if made.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200":
                    return made
            return None

        addresses = [f"127.0.0.{number}" for number in range(2, 8)]
        idle = {source: [made for _ in range(10) if (made := answered(source))] for source in addresses}
        kept = [len(idle[source]) for source in addresses]
        assert kept[:2] == [10, 10], "half of the connections are for those that come first"
        assert all(1 <= fewer <= earlier for earlier, fewer in pairwise(kept))
        assert sum(kept) < 40
        with proxy.client("127.0.0.9") as another:
            assert another.get("/x").status_code == 200
        first = idle[addresses[0]][0]
        first.sendall(asked)
        assert b"connection: close" in received(first).lower(), "it has more than its share by now"


def test_http_2_is_not_spoken_so_that_a_connection_is_one_request_at_a_time(proxied):
    settings = b"\0\0\0\4\0\0\0\0\0"
    with proxied().running() as proxy, closing(proxy.connection(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)) as client:
        assert client.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 400"
        received(client)  # it is closed
        assert proxy.gateway.asked == []


def test_what_a_gateway_cannot_take_is_answered_503_with_when_to_come_again(proxied):
    with proxied(PER_GATEWAY=1).running() as proxy, ExitStack() as open_ones:
        held = open_ones.enter_context(closing(proxy.connection(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")))
        eventually(lambda: proxy.gateway.asked == ["/held"])
        refused = httpx.get(f"{proxy.url}/x", timeout=300)
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["content-type"]) == (
            503,
            "2",
            "application/problem+json",
        )
        assert (refused.json()["status"], proxy.gateway.asked) == (503, ["/held"])
        proxy.gateway.gate.set()
        assert held.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
        assert httpx.get(f"{proxy.url}/x", timeout=300).status_code == 200


def test_more_than_a_gateway_takes_is_refused_before_it(proxied):
    with proxied().running() as proxy, ExitStack() as open_ones, httpx.Client(base_url=proxy.url, timeout=300) as client:
        proxy.fill(open_ones)
        assert client.get("/x").status_code == 200, "it has not said how many it takes"
        told = client.get("/most")
        assert (told.status_code, "genrec-most" in told.headers) == (200, False)
        refused = client.get("/refused")
        assert (refused.status_code, refused.headers["retry-after"], refused.json()["title"]) == (503, "2", "Not available now")
        assert client.get("/other/x").status_code == 200, "another application, which has room"
        assert "/refused" not in proxy.gateway.asked
        proxy.gateway.gate.set()
        eventually(lambda: client.get("/x").status_code == 200, "there is room")


@pytest.mark.parametrize("forged", [{}, {"genrec-refused": "1000"}, {"GENREC-Refused": "7, 8"}], ids=["", "one", "several"])
def test_a_gateway_is_told_once_how_many_requests_it_was_spared_and_a_client_tells_it_nothing(proxied, forged):
    with proxied().running() as proxy, ExitStack() as open_ones, httpx.Client(base_url=proxy.url, timeout=300, headers=forged) as client:
        assert client.get("/most").json()["refused"] is None, "nothing was refused"
        proxy.fill(open_ones)
        for refused in (3, 2):
            eventually(lambda: client.get("/x").status_code == 503)
            told = int(client.get("/readyz").json()["refused"][0])
            assert told >= 1
            assert [client.post("/v1/recommend").status_code for _ in range(refused)] == [503] * refused
            assert client.get("/other/x").json()["refused"] is None, "another application, which refused nothing"
            assert [client.get("/readyz").json()["refused"] for _ in range(2)] == [[str(refused)], None]
        proxy.gateway.gate.set()
        eventually(lambda: client.get("/x").status_code == 200, "there is room")
        assert client.get("/x").json()["refused"] is None


@pytest.mark.parametrize("prefix", ["", "/other"])
def test_operators_reach_a_full_gateway_and_so_do_a_few_others_that_call_there_or_ask_how_it_is(proxied, prefix):
    paths = (
        "/v1/backends/encoder", "/v1/gateway", "/v1/cache:invalidate", "/v1/models", "/v1/%62ackends/x", "/v1/cache%3Ainvalidate",
        "/readyz",
    )  # fmt: skip
    calls = [f"{prefix}{path}" for path in paths]
    with proxied().running() as proxy, ExitStack() as open_ones, proxy.client() as client:

        def status(path: str, key: str = "", method: str = "GET") -> int:
            return client.request(method, path, headers={"authorization": key} if key else {}).status_code

        def after(times: int, path: str, key: str = "") -> int:
            proxy.has_counted(times, "genrec_spared")
            return status(path, key)

        assert [status(f"{prefix}/most", key) for key in (OPERATES, URGENT)] == [200, 200]
        for key in (OPERATES, URGENT):  # neither has few
            proxy.fill(open_ones, 4, prefix, key)
        assert [status(path) for path in calls] == [200] * len(calls)
        assert after(49, calls[0], "Bearer genrec_invented") == 200
        eventually(lambda: after(50, calls[0], "Bearer genrec_invented") == 503)
        assert {after(FLOOD, path, key) for path in calls for key in (URGENT, "", "Bearer genrec_invented")} == {503}
        assert [after(FLOOD, path, OPERATES) for path in calls] == [200] * 6 + [503], "a probe is no operator's call"
        assert "genrec-operates" not in client.get(calls[0], headers={"authorization": OPERATES}).headers
        with proxy.client("127.0.0.3") as other:
            assert [other.get(path).status_code for path in calls] == [200] * len(calls), "from another address"
        proxy.gateway.gate.set()
        eventually(lambda: status(f"{prefix}/x") == 200, "there is room")
        eventually(lambda: proxy.under_way() == 0, "no later answer tells of the key")
        assert status(f"{prefix}/unknown", OPERATES) == 401
        proxy.gateway.gate.clear()
        proxy.fill(open_ones, prefix=prefix)
        eventually(lambda: status(f"{prefix}/x") == 503)
        assert after(FLOOD, calls[0], OPERATES) == 503, "the key is gone"


@pytest.mark.parametrize("prefix", ["", "/other"])
def test_while_a_gateway_gives_no_pages_it_is_asked_for_none_until_the_second_is_over(proxied, prefix):
    pages = [
        f"{prefix}{path}"
        for path in ("/", "/docs", "/%64ocs", "/docs/swagger-ui.css", "/docs%2Fswagger-ui.css", "/playground/app.js", "/openapi.json")
    ]
    with proxied().running() as proxy, proxy.client() as client:

        def refused_by_haproxy(page: str) -> bool:
            refused = client.get(f"{prefix}/docs/none")
            assert refused.status_code == 503
            assert "genrec-pages" not in refused.headers
            proxy.gateway.asked.clear()
            there, answer = client.get(page), client.get(f"{prefix}/v1/recommend")
            assert answer.json()["refused"] is None, "a page that is refused is no sign of an overload"
            return [there.status_code, answer.status_code] == [503, 200] and len(proxy.gateway.asked) == 1

        for page in pages:
            eventually(lambda page=page: refused_by_haproxy(page), "both come in one second")
        eventually(lambda: [client.get(page).status_code for page in pages] == [200] * len(pages), "the second is over")


@pytest.mark.parametrize("key", ["", OPERATES])
def test_no_path_of_a_user_or_an_item_is_taken_for_an_operators_or_a_probes(proxied, key):
    paths = (
        "/v1/users/x/v1/cache/history", "/v1/items/readyz", "/v1/items//v1/models", "/v1/items/x/healthz", "/x/readyz",
        "/v1/recommend?x=/v1/gateway", "/shop/v1/backends", "//v1/gateway", "/v1/backendsx", "/v1/cache:x", "/v1/gateway/x", "/v1/models/x",
        "/v1/%2562ackends", "/v1/gateway%3Fx", "/%2Fv1/gateway", "/v1/gateway%zz",
    )  # fmt: skip
    with proxied().running() as proxy, ExitStack() as open_ones, proxy.client() as client:
        headers = {"authorization": key} if key else {}
        assert client.get("/most", headers=headers).status_code == 200
        proxy.fill(open_ones, key=key)
        assert [path for path in paths if client.get(path, headers=headers).status_code != 503] == []
        assert client.post("/readyz", headers=headers).status_code == 503, "no probe"


@pytest.mark.parametrize(("most", "part", "few"), [(1, 1, 1), (1, 9, 7), (8, 1, 1), (8, 4, 4), (8, 0, 0)])
def test_a_key_with_few_requests_reaches_a_gateway_that_another_has_filled(proxied, most, part, few):
    """As many as the gateway says are each caller's part, until it has eight times as many as it takes."""
    with proxied().running() as proxy, ExitStack() as open_ones, proxy.client() as client:

        def status(key: str) -> int:
            return client.get("/x", headers={"authorization": key} if key else {}).status_code

        proxy.gateway.most, proxy.gateway.part = most, part
        assert [client.get("/most", headers={"authorization": key}).status_code for key in (USUAL, OTHERS)] == [200, 200]
        proxy.fill(open_ones, most, key=OTHERS)
        eventually(lambda: status("") == 503)
        for _ in range(few):
            answer = client.get("/x", headers={"authorization": USUAL})
            assert (answer.status_code, "genrec-known" in answer.headers) == (200, False)
            proxy.fill(open_ones, 1, key=USUAL)
        assert [status(key) for key in (USUAL, OTHERS)] == [503, 503]


def test_a_key_that_a_proxy_knows_nothing_of_reaches_a_full_gateway_so_often_from_each_address(proxied):
    """As where it calls less than once a minute, or where another HAProxy has begun in a flood."""
    with proxied().running() as proxy, ExitStack() as open_ones, proxy.client() as client:

        def status(key: str, path: str = "/x", at: httpx.Client = client) -> int:
            return at.get(path, headers={"authorization": key} if key else {}).status_code

        def after(times: int, key: str) -> int:
            proxy.has_counted(times, "genrec_newcomers")
            return status(key)

        assert status(OTHERS, "/most") == 200
        proxy.fill(open_ones, key=OTHERS)
        eventually(lambda: status("") == 503)
        assert [status(OTHERS), status(USUAL), status(USUAL)] == [503, 200, 200]
        assert after(49, "Bearer genrec_invented") == 200
        eventually(lambda: after(50, "Bearer genrec_invented") == 503)
        assert after(FLOOD, URGENT) == 503
        assert [status(USUAL), status("", "/readyz")] == [200, 200], "one that is known, and a probe, need no such way"
        with proxy.client("127.0.0.3") as other:
            assert status(URGENT, at=other) == 200, "from another address"


def test_an_ipv6_address_is_counted_with_all_of_its_network(proxied):
    """A host has 2**64 of them."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"::1 cannot be bound here: {error}")
    with proxied(host="::1").running() as proxy, httpx.Client(base_url=proxy.url, timeout=300) as client:
        assert client.get("/x").status_code == 200
        assert [f" key={key} " in proxy.table(name) for name, key in (("genrec_addresses", "::"), ("genrec_callers", "::"))] == [True, True]


def test_a_body_of_more_than_a_gateway_takes_is_refused_before_it(proxied):
    with proxied().running() as proxy, proxy.client() as client:
        assert client.post("/x", content=bytes(1001)).status_code == 200, "it has not said how many bytes it takes"
        assert client.get("/most").status_code == 200
        refused = client.post('/lar"ge', content=bytes(1001))
        assert (refused.status_code, refused.headers["content-type"]) == (413, "application/problem+json")
        problem = refused.json()
        assert (problem["title"], problem["instance"], problem["errors"][0]["field"]) == ("Body too large", "/lar%22ge", "body")
        assert "1000 bytes" in problem["detail"]
        assert proxy.gateway.asked == ["/x", "/most"]
        assert [client.post("/x", content=bytes(1000)).status_code, client.post("/other/x", content=bytes(1001)).status_code] == [200] * 2
        assert client.post("/x", content=iter([bytes(1001)])).status_code == 200, "of an unknown length: the gateway counts"


def test_a_gateway_whose_limit_of_bodies_was_raised_tells_it_to_a_client_that_sends_large_ones_alone(proxied):
    with proxied().running() as proxy, proxy.client() as client:
        assert client.get("/most").status_code == 200
        proxy.gateway.bytes = 2000
        assert client.post("/most", content=bytes(1500)).status_code == 413
        proxy.administer("experimental-mode on; set var proc.genrec_told_http_genrec expr date,sub(10)")  # as 10 s later
        assert [client.post("/most", content=bytes(size)).status_code for size in (1500, 1500, 2500)] == [200, 200, 413]


@pytest.mark.parametrize("status", [401, 403, 408, 413, 429, 503])
def test_an_upload_that_is_refused_ends_there_and_shuts_no_other_out(proxied, status):
    """It would be counted among those under way until its client has sent all of it, which it may never do."""
    sent = f"POST /unread/{status} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode() + b"11170\r\n" + bytes(70_000)
    with proxied().running() as proxy, ExitStack() as open_ones, httpx.Client(base_url=proxy.url, timeout=300) as client:
        assert client.get("/most").status_code == 200
        answers = [received(open_ones.enter_context(closing(proxy.connection(sent)))) for _ in range(10)]
        assert {answer.split(b" ")[1] for answer in answers} == {str(status).encode()}
        assert problem_of(answers[0]) == {"title": "No", "status": status, "detail": 'say "please", für alle'}
        head = answers[0].partition(b"\r\n\r\n")[0].lower()
        assert (b"retry-after: 7" in head, b'error="invalid_token"' in head) == (status in (429, 503), status == 401)
        assert [b"ratelimit-%b" % figure in head for figure in (b"limit: 5", b"remaining: 0", b"reset: 7")] == [status == 429] * 3
        assert b"genrec-unread" not in head
        assert client.get("/x").status_code == 200, "more than 8 would be refused"


def test_a_client_that_falls_silent_is_left_and_an_answer_that_pauses_is_not(proxied):
    upload = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + bytes(70_000)
    asked = b"GET /paused HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with proxied(silent_s=1).running() as proxy, closing(proxy.connection(asked)) as paused:
        begun = b""
        while not begun.endswith(b"\r\n\r\n{"):  # the headers and the first byte may come apart
            begun += (part := paused.recv(2**16))
            assert part, begun
        with closing(proxy.connection(upload)) as silent:
            received(silent)
        proxy.gateway.gate.set()
        assert received(paused).endswith(b"}")


def test_an_urgent_request_of_a_key_that_may_be_urgent_reaches_a_gateway_that_is_full(proxied):
    with proxied().running() as proxy, ExitStack() as open_ones, proxy.client() as client:

        def status(path: str, key: str, priority: str = "u=1, i") -> int:
            return client.get(path, headers={"authorization": key, "priority": priority}).status_code

        assert [status("/most", key) for key in (URGENT, USUAL)] == [200, 200]
        for key in (URGENT, USUAL):  # neither has few
            proxy.fill(open_ones, 4, key=key)
        eventually(lambda: status("/x", USUAL) == 503)
        assert [status("/x", key) for key in (URGENT, USUAL)] == [200, 503]
        assert [status("/x", URGENT, priority) for priority in ("u=3", "u=7", "")] == [503] * 3
        assert "genrec-urgent" not in client.get("/v1/models", headers={"authorization": URGENT}).headers
        proxy.fill(open_ones, key=URGENT)
        assert status("/x", URGENT) == 503, "not more than twice as many"
        proxy.gateway.gate.set()
        eventually(lambda: status("/x", USUAL, "") == 200, "there is room")
        eventually(lambda: proxy.under_way() == 0, "no later answer tells of the key")
        assert status("/unknown", URGENT) == 401
        proxy.gateway.gate.clear()
        proxy.fill(open_ones, key=USUAL)
        eventually(lambda: status("/x", USUAL) == 503)
        proxy.has_counted(FLOOD, "genrec_newcomers")
        assert status("/x", URGENT) == 503, "the key is gone"


def test_a_service_without_a_gateway_is_answered_503_not_500(proxied):
    with proxied().running() as proxy:
        proxy.gateway.shutdown()
        proxy.gateway.server_close()
        refused = httpx.get(f"{proxy.url}/x", timeout=300)
        assert (refused.status_code, refused.json()["title"]) == (503, "Not available now")


@pytest.mark.parametrize("path", NO_ANSWERS)
def test_a_gateway_that_breaks_off_or_is_silent_is_answered_503_not_500(proxied, path):
    with proxied(gateway_s=1).running() as proxy:
        lost = httpx.get(f"{proxy.url}{path}", timeout=300)
        eventually(lambda: path in proxy.gateway.asked, "the gateway, which may have its turn late, was asked")
        assert (lost.status_code, lost.headers["retry-after"], lost.headers["content-type"]) == (503, "0", "application/problem+json")
        assert (lost.json()["title"], lost.json()["status"]) == ("Not available now", 503)
        assert "the gateway broke off or was silent" in lost.json()["detail"]


LONG = [
    ("POST", "/v1/recommend:batch"), ("DELETE", "/v1/users/ada/history"), ("POST", "/other/v1/recommend:batch"),
    ("POST", "/v1/recommend%3Abatch"), ("POST", "/other/%761/recommend%3abatch"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), LONG)
def test_a_batch_or_an_erasure_that_takes_longer_than_other_answers_is_begun_once_and_answered(proxied, method, path):
    with proxied(gateway_s=1).running() as proxy:
        begun = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        with closing(proxy.connection(begun)) as long:
            eventually(lambda: path in proxy.gateway.asked)
            assert httpx.get(f"{proxy.url}/held", timeout=300).status_code == 503, "of another answer it has waited too long by now"
            proxy.gateway.gate.set()
            assert received(long).startswith(b"HTTP/1.1 200")
        eventually(lambda: "/held" in proxy.gateway.asked, "the gateway, which may have its turn late, was asked")
        assert proxy.gateway.asked == [path, "/held"]


@pytest.mark.parametrize(("method", "path"), LONG)
def test_a_batch_or_an_erasure_has_as_long_as_its_gateway_says(proxied, method, path):
    with proxied().running() as proxy, httpx.Client(base_url=proxy.url, timeout=300) as client:
        proxy.gateway.longest_ms = 100
        assert client.get(f"{'/other' if path.startswith('/other') else ''}/most").status_code == 200
        lost = client.request(method, path)
        assert (lost.status_code, "was silent" in lost.json()["detail"]) == (503, True)


def test_headers_that_do_not_end_are_answered_408(proxied):
    with proxied(HEADERS_S=1).running() as proxy, closing(proxy.connection(b"GET /x HTTP/1.1\r\nhost: x\r\n")) as slow:
        answer = received(slow)
    assert answer.startswith(b"HTTP/1.1 408")  # in HAProxy's own words, which no setting changes: there is no request yet
    assert proxy.gateway.asked == []


def test_a_body_that_does_not_arrive_reaches_no_gateway(proxied):
    begun = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1234"
    with proxied(BODY_S=1).running() as proxy, closing(proxy.connection(begun)) as slow:
        answer = received(slow)
        assert answer.startswith(b"HTTP/1.1 408")
        assert problem_of(answer)["status"] == 408
        assert proxy.gateway.asked == []


def test_a_body_larger_than_what_haproxy_holds_reaches_the_gateway_whole(proxied):
    with proxied().running() as proxy:
        answer = httpx.post(f"{proxy.url}/x", content=bytes(500_000), timeout=300)
        assert answer.json() == {"path": "/x", "body": 500_000, "told": "?1", "key": None, "refused": None}


def test_events_without_a_key_are_given_one_so_that_a_second_gateway_knows_them_again(proxied):
    with proxied().running() as proxy, proxy.client() as client:
        given = [client.post(path, content=b"{}").json()["key"] for path in ("/v1/events", "/v1/events", "/other/v1/%65vents")]
        assert [len(key) for key in given] == [36] * 3
        assert len(set(given)) == 3
        assert client.post("/v1/events", content=b"{}", headers={"idempotency-key": "mine"}).json()["key"] == "mine"
        assert client.get("/v1/events").json()["key"] is None


@pytest.fixture
def certified(tmp_path: Path) -> object:
    """Writes a new certificate of localhost, with its key, into a file; what trusts that one alone."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("there is no openssl to make a certificate with")

    def write(file: Path) -> ssl.SSLContext:
        key, certificate = tmp_path / "key", tmp_path / "certificate"
        made = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        subprocess.run([openssl, "req", *made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        file.write_text(certificate.read_text() + key.read_text())
        return ssl.create_default_context(cafile=certificate)

    return write


def test_with_a_certificate_https_is_served_too_with_the_same_limits(proxied, certified, tmp_path):
    trusting = certified(certificate := tmp_path / "certificate.pem")
    port = free_port()
    with (
        proxied(CERTIFICATE=certificate, TLS_PORT=port, PER_CALLER=3).running() as proxy,
        httpx.Client(verify=trusting, timeout=300) as client,
    ):
        url = f"https://localhost:{port}/x"
        assert client.get(url).json()["path"] == "/x"
        refused = refused_in_the_end(client, url, {"authorization": USUAL})
        assert (refused.status_code, client.get(f"{proxy.url}/x").status_code) == (429, 200)
        assert proxy.config.with_name("haproxy.cfg.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("spoilt", ["empty", "half", "without its key", "missing"])
def test_a_renewed_certificate_that_cannot_be_loaded_keeps_no_proxy_from_learning_of_gateways(proxied, certified, tmp_path, capfd, spoilt):
    trusting = certified(certificate := tmp_path / "certificate.pem")
    port = free_port()
    proxy = proxied(CERTIFICATE=certificate, TLS_PORT=port)
    with proxy.running(), Gateway() as second:
        threading.Thread(target=second.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        whole = certificate.read_text()
        certificate.write_text(
            {"empty": "", "half": whole[:900], "without its key": whole.partition("-----BEGIN PRIVATE")[0]}.get(spoilt, "")
        )
        if spoilt == "missing":
            certificate.unlink()
        proxy.write(second)
        with proxy.taking_over():
            answers = [httpx.get(f"{proxy.url}/new", timeout=300)]
            with httpx.Client(verify=trusting, timeout=300) as client:
                answers.append(client.get(f"https://localhost:{port}/new"))
        second.shutdown()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (second.asked, proxy.gateway.asked) == (["/new", "/new"], [])
    assert f"HTTPS goes on with the certificate before, as {certificate} cannot be loaded: " in capfd.readouterr().err


def test_a_certificate_that_could_never_be_loaded_leaves_plain_http_alone(proxied, tmp_path, capfd):
    (certificate := tmp_path / "certificate.pem").touch()
    port = free_port()
    with proxied(CERTIFICATE=certificate, TLS_PORT=port).running() as proxy:
        assert httpx.get(f"{proxy.url}/x", timeout=300).status_code == 200
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
    assert f"HTTPS is not served, as {certificate} cannot be loaded: " in capfd.readouterr().err


SOCAT = f"""#!{sys.executable}
import socket, sys
admin = socket.socket(socket.AF_UNIX)
admin.connect(sys.argv[2].removeprefix("unix:"))
admin.sendall(sys.stdin.buffer.read())
while part := admin.recv(2**16):
    sys.stdout.buffer.write(part)
"""


@pytest.fixture
def given(tmp_path: Path) -> object:
    """Gives a renewed certificate to a HAProxy that runs, as docs/operating-security.md says."""
    page = (Path(__file__).parents[2] / "docs" / "operating-security.md").read_text()
    documented = page.partition("\nfor config in ")[2].partition("```")[0]
    (programs := tmp_path / "programs").mkdir()
    (programs / "socat").write_text(SOCAT)
    (programs / "socat").chmod(0o755)

    def give(proxy: Proxy) -> None:
        loop = "for config in " + documented.replace("/tmp/haproxy-serve/*/haproxy.cfg", str(proxy.config), 1)
        subprocess.run(["sh", "-c", loop], env=proxy.environment | {"PATH": f"{programs}:{os.environ['PATH']}"}, check=True)

    return give


def test_a_renewed_certificate_that_is_given_to_haproxy_is_served_also_by_the_next_one_and_one_that_cannot_be_loaded_is_not(
    proxied, certified, given, tmp_path
):
    certified(certificate := tmp_path / "certificate.pem")
    port = free_port()
    proxy = proxied(CERTIFICATE=certificate, TLS_PORT=port)
    with proxy.running():
        trusting = certified(certificate)
        given(proxy)
        certificate.write_text(certificate.read_text().partition("-----BEGIN PRIVATE")[0])
        given(proxy)
        proxy.write(proxy.gateway)
        for running in (nullcontext(), proxy.taking_over()):
            with running, httpx.Client(verify=trusting, timeout=300) as client:
                assert client.get(f"https://localhost:{port}/x").status_code == 200
        copy = proxy.config.with_name("haproxy.cfg.pem")
        assert [*proxy.config.parent.glob(f"{copy.name}*")] == [copy]
        assert copy.stat().st_mode & 0o777 == 0o600


def test_neither_a_user_nor_a_query_nor_a_key_stands_in_the_log_of_requests(proxied):
    users = ["/v1/users/ada/history?tenant=ada", "/shop/v1/users/ada/history", "/v1/%75sers/ada/history", "/v1/users%2Fa%0Aada"]
    users += ["/v1/users/ada%zz"]
    with proxied().running() as proxy, proxy.client() as client:
        for path in [*users, "/v1/items?query=ada"]:
            assert client.get(path, headers={"authorization": "Bearer genrec_ada"}).status_code == 200
        logged = list[str]()
        while len(logged) <= len(users):  # other lines are of health checks
            logged += [line for line in [proxy.log.recv(2**16).decode()] if " http_frontend " in line]
    lines = ["GET /v1/users/... HTTP/1.1"] * (len(users) - 1) + ["GET ... HTTP/1.1", "GET /v1/items HTTP/1.1"]
    assert [line.split('"')[1] for line in logged] == lines
    assert "ada" not in "".join(logged)


def test_the_names_and_prefixes_of_applications_are_told_to_this_machine_alone(proxied):
    with proxied().running() as proxy, proxy.client() as other:
        assert httpx.get(f"{proxy.url}/-/routes", timeout=300).json() == {"/": "http-genrec", "/other": "http-other"}
        told = [other.get(path) for path in ("/-/routes", "/-/Routes?x=1", "/%2D/routes")]
        assert [(one.status_code, "http-genrec" in one.text) for one in told] == [(404, False)] * 3
        assert [other.get(path).status_code for path in ("/-/healthz", "/x")] == [200, 200]
        assert proxy.gateway.asked == ["/x"]


def test_statistics_and_metrics_are_closed_to_other_addresses(proxied):
    with proxied().running() as proxy:
        assert {httpx.get(f"http://127.0.0.1:{port}/", timeout=300).status_code for port in proxy.ports.values()} <= {200, 404, 503}
        for port in proxy.ports.values():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((OTHER, port), timeout=10)
