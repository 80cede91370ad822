"""`genrec bench serve` against the real HTTP interface over a service of the test's own, and `genrec bench interleave`."""

import asyncio
import json
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from starlette.responses import JSONResponse
from typer.testing import CliRunner

from cluster.config import GatewaySettings
from cluster.errors import BackendUnavailable, ConfigError, UnknownChoice
from cluster.values import CacheReport, Item, Recommendation, ScoredItem, StageReport
from deployments.cli.bench import app
from deployments.cli.bench_driver import Endpoint, Watch, closed_loop, connect
from deployments.cli.bench_figures import Answer, Reading, Run, Seen, Served, Target, check_targets, figures_of, parse_targets, samples_of
from deployments.cli.bench_files import read_measurement
from deployments.cli.bench_interleave import order, timed
from deployments.cli.bench_processes import ServerProcesses, Usage
from deployments.cli.bench_requests import LENGTHS, SHAPES, Workload
from deployments.cli.bench_serve import catalogue_items
from deployments.http.api import create_api
from deployments.http.messages import RecommendIn
from tests.ports import free_port
from tests.waiting import until

CATALOGUE = [ScoredItem(Item(str(number), f"film {number}"), 1 / number, "encode") for number in range(1, 61)]
ITEMS = [scored.item.item_id for scored in CATALOGUE]
STAGE = StageReport("encode", "torch", 1.5)


class Service:
    """Answers after `delay_s`, a user's second time from a cache; each `breaks`-th request has no answer. Streams all items at once.
    Requests after the two that come alone are first answered once `together` of them run.
    """

    def __init__(self, delay_s=0.0, breaks=0, together=1):
        self.delay_s, self.breaks, self.together, self.gathered = delay_s, breaks, together, asyncio.Event()
        self.asked, self.streamed, self.users, self.running, self.most_running = 0, 0, Counter(), 0, 0

    async def recommend(self, request):
        self.asked += 1
        if self.breaks and request.behaviours and self.asked % self.breaks == 0:
            raise BackendUnavailable("no replica could be reached")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.work()
        finally:
            self.running -= 1
        self.users[request.user_id] += 1
        return self.answer(request, CacheReport("computed" if self.users[request.user_id] == 1 else "l1"))

    async def work(self):
        if self.running == self.together:
            self.gathered.set()
        if self.asked > 2:
            await asyncio.wait_for(self.gathered.wait(), 25)
        await asyncio.sleep(self.delay_s)

    async def stream(self, request):
        self.streamed += 1
        yield STAGE
        for item in CATALOGUE[: request.k]:
            yield item
        await asyncio.sleep(self.delay_s)
        yield self.answer(request, None)

    def answer(self, request, cache):
        items = tuple(CATALOGUE[: request.k])
        return Recommendation(request.user_id, items, (STAGE,), "tiny/1", degraded=request.user_id.endswith("-0"), cache=cache)


@contextmanager
def serving(asgi):
    """The URL of an ASGI application, served over real connections by a thread."""
    server = uvicorn.Server(uvicorn.Config(asgi, lifespan="off", log_config=None, ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


def bench_serve(service, path, *arguments):
    with serving(create_api(service, None, GatewaySettings())) as url:
        return run("serve", "--url", url, "--json", path, *arguments)


def run(*arguments):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(one) for one in arguments], catch_exceptions=False)


# A run


def test_a_run_measures_what_the_server_does_and_files_it(tmp_path):
    service, path = Service(delay_s=0.02), tmp_path / "new" / "found.json"
    answer = bench_serve(service, path, "--iterations", 20, "--warm-up", 4, "--users", 4, "--shape", "single")
    assert answer.exit_code == 0, answer.output
    found = read_measurement(path)
    assert json.loads(path.read_text())["schema"] == 1
    assert [len(found.samples[name]) for name in ("end_to_end_ms", "first_item_ms", "per_item_ms")] == [20, 5, 20]
    assert 20 <= found.figures["p50_ms"] <= found.figures["p95_ms"] <= found.figures["p99_ms"]
    assert found.figures["first_item_p50_ms"] > 0
    assert found.figures["per_item_ms"] == pytest.approx(found.figures["p50_ms"] / 10, rel=1e-3)
    assert 0 < found.figures["requests_per_s"] <= 1 / 0.02
    assert found.figures["items_per_s"] == pytest.approx(10 * found.figures["requests_per_s"], rel=0.01)
    assert (found.figures["errors"], found.figures["hits"]) == (0, {"l1": 1.0}), "the warm-up has met every user"
    assert found.figures["degraded"] == 5 + 2, "the first of four users in turns: of 20 answers, and of 5 streams"
    assert found.scenario.workload == {"scenario": "short", "users": 4, "k": 10, "cache": "use", "strategy": None, "callers": 1}
    assert (found.scenario.name, found.scenario.warm_up, found.scenario.iterations) == ("serve/short/single", 4, 20)
    assert found.versions["model"] == "tiny/1"
    assert found.versions.keys() >= {"python", "genrec", "numpy"}
    assert found.machine["cores"] >= 1
    for words in ("p99_ms", "first_item_p50_ms", "requests_per_s", "answers: l1", "tiny/1"):
        assert words in answer.output


def test_the_warm_up_does_not_count_and_every_request_is_sent_once(tmp_path):
    service = Service()
    bench_serve(service, tmp_path / "found.json", "--iterations", 12, "--warm-up", 7, "--users", 100)
    assert service.asked == 1 + 1 + 7 + 12, "for items, to see that all is well, the warm-up, and what counts"
    assert service.streamed == 1 + 12 // 4
    figures = read_measurement(tmp_path / "found.json").figures
    assert figures["hits"] == {"l1": 0.5833, "computed": 0.4167}
    assert figures["stage_ms"] == {"encode": 1.5}, "of what was computed"
    assert figures["served_by"] == {"encode=torch": 5}


def test_as_many_ask_at_a_time_as_the_shape_says(tmp_path):
    service = Service(delay_s=0.02, together=8)
    bench_serve(service, tmp_path / "found.json", "--shape", "concurrent", "--iterations", 32, "--warm-up", 8)
    assert service.most_running == SHAPES["concurrent"].callers == 8


def test_a_missed_target_ends_with_status_one_after_the_file_is_written(tmp_path):
    path = tmp_path / "found.json"
    answer = bench_serve(Service(delay_s=0.01), path, "--iterations", 8, "--target", "p99_ms=1, errors=0", "--target", "requests_per_s=0.1")
    assert answer.exit_code == 1
    targets = read_measurement(path).targets
    assert {name: one["met"] for name, one in targets.items()} == {"p99_ms": False, "errors": True, "requests_per_s": True}
    assert targets["p99_ms"]["limit"] == 1
    assert targets["p99_ms"]["measured"] > 10
    assert "1: missed" in answer.output
    met = bench_serve(Service(), path, "--iterations", 8, "--target", "p99_ms=60000,errors=0")
    assert (met.exit_code, "missed" in met.output) == (0, False)


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    service = Service()
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        bench_serve(service, tmp_path)
    assert service.most_running == 0
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        run("interleave", "--baseline", "false", "--candidate", "true", "--json-baseline", tmp_path / "a", "--json-candidate", tmp_path)
    assert not list(tmp_path.iterdir())


def test_requests_without_an_answer_are_counted_by_what_came_instead(tmp_path):
    answer = bench_serve(Service(breaks=4), tmp_path / "found.json", "--iterations", 16, "--warm-up", 0, "--target", "errors=0")
    found = read_measurement(tmp_path / "found.json")
    assert found.figures["problems"] == {"status 503": 4}
    assert (found.figures["errors"], found.figures["requests"], len(found.samples["end_to_end_ms"])) == (4, 16 + 4, 12)
    assert answer.exit_code == 1
    assert "requests without an answer: 4 x status 503" in answer.output


def test_where_nobody_listens_that_is_the_error(tmp_path):
    port = free_port()
    with pytest.raises(
        ConfigError, match=f"http://127.0.0.1:{port}/? cannot be asked: .*; start it \\(genrec serve\\) or give another --url"
    ):
        run("serve", "--url", f"http://127.0.0.1:{port}", "--json", tmp_path / "found.json")
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://host:80000"])
def test_a_url_that_is_none_is_refused(tmp_path, url):
    with pytest.raises(ConfigError, match="is no URL"):
        run("serve", "--url", url, "--json", tmp_path / "found.json")


def test_another_kind_of_server_is_told_from_genrec(tmp_path):
    with (
        serving(JSONResponse({"hello": "world"})) as url,
        pytest.raises(ConfigError, match=r"names no items: status 200, '.\"hello\":\"world\".'"),
    ):
        run("serve", "--url", url, "--json", tmp_path / "found.json")


def test_an_unknown_target_or_one_without_a_limit_is_refused_before_anything_is_asked():
    with pytest.raises(UnknownChoice, match="unknown target 'p98_ms'; choose from degraded, errors"):
        run("serve", "--url", "http://127.0.0.1:1", "--json", "unwritten.json", "--target", "p98_ms=5")
    for text in ("p99_ms", "p99_ms=fast", "p99_ms=-1", "p99_ms=nan"):
        with pytest.raises(ConfigError, match=f"target '{text}' has no limit"):
            parse_targets([text])
    assert parse_targets(["p99_ms = 50, errors=0,", "items_per_s=1e3"]) == {"p99_ms": 50, "errors": 0, "items_per_s": 1000}


# Its parts


@pytest.mark.parametrize("scenario", list(LENGTHS))
def test_a_scenarios_histories_have_its_lengths_and_are_the_same_every_time(scenario):
    bodies = Workload(scenario, users=50, strategy="retrieval").bodies(ITEMS)
    assert bodies == Workload(scenario, users=50, strategy="retrieval").bodies(ITEMS)
    requests = [RecommendIn.model_validate_json(body) for body in bodies]
    fewest, most = LENGTHS[scenario]
    assert all(fewest <= len(request.behaviours) <= most for request in requests)
    assert len({len(request.behaviours) for request in requests}) > 5
    assert len({request.user_id for request in requests}) == 50
    assert all(request.behaviours[-1].timestamp < request.request_time for request in requests)


def test_a_history_repeats_items_only_where_the_catalogue_is_shorter():
    for scenario, repeats in (("short", False), ("long", True)):
        for body in Workload(scenario, users=10).bodies(ITEMS):
            items = [one["item_id"] for one in json.loads(body)["behaviours"]]
            assert (len(set(items)) < len(items)) is repeats


def test_items_are_those_of_the_models_catalogue(three_versions):
    assert len(set(catalogue_items(three_versions))) == 40


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (httpx.ReadTimeout("late"), "out of time"),
        (httpx.ConnectError("refused"), "no connection"),
        (httpx.RemoteProtocolError("gone"), "connection lost"),
    ],
)
async def test_a_request_that_is_lost_is_told_how(error, problem):
    def respond(request):
        raise error

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://genrec") as client:
        assert (await Endpoint(client).ask(b"{}")).problem == problem
        assert (await Endpoint(client).ask_streamed(b"{}")).problem == problem


async def test_a_stream_that_ends_with_an_error_or_early_has_no_answer():
    ends = [b'event: error\ndata: {"status": 503}\n\n', b"", b"event: ans"]

    def respond(request):
        return httpx.Response(200, content=b'event: item\ndata: {"item_id": "1"}\n\n' + ends.pop(0))

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://genrec") as client:
        for _ in range(3):
            seen = await Endpoint(client).ask_streamed(b"{}")
            assert (seen.answer, seen.problem) == (None, "no answer of genrec")


async def test_a_streams_first_item_is_timed_as_it_comes_and_its_answer_at_the_end():
    async def parts():
        yield b'event: item\ndata: {"item_id": "1"}\n\n'
        await asyncio.sleep(0.02)
        yield b'event: answer\ndata: {"items": [{}], "stages": [], "cache": null, "degraded": false, "model_version": "m/1"}\n\n'

    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=parts()))
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        seen = await Endpoint(client).ask_streamed(b"{}")
    assert 0 < seen.first_item_ms <= seen.duration_ms - 20


async def test_a_caller_sends_its_key_and_a_server_with_few_items_names_them_still():
    limits = GatewaySettings(max_k=50)
    asgi = httpx.ASGITransport(create_api(Service(), None, limits))
    async with httpx.AsyncClient(transport=asgi, base_url="http://genrec") as client:
        assert await Endpoint(client).item_ids() == ITEMS[:10], "1000 and 100 are more than it takes"
    async with connect("https://genrec/prefix", key="secret", callers=2) as client:
        request = client.build_request("POST", "/v1/recommend")
    assert (request.headers["authorization"], str(request.url)) == ("Bearer secret", "https://genrec/prefix/v1/recommend")


async def test_callers_take_the_bodies_in_turns_and_never_wait_for_each_other():
    sent, gate = [], asyncio.Event()

    async def ask(body):
        sent.append(body)
        if body == b"slow":
            await gate.wait()
        elif len(sent) == 7:
            gate.set()
        return Seen(1.0)

    seen, seconds = await closed_loop(ask, [b"slow", b"a", b"b", b"c", b"d", b"e", b"f"], 2, 7)
    assert sent == [b"slow", b"a", b"b", b"c", b"d", b"e", b"f"]
    assert len(seen) == 7
    assert seconds > 0


def answered(ms, items=10, tier="computed", first=None):
    return Seen(ms, Answer(items, degraded=False, tier=tier, stages=(Served("encode", "torch", ms / 2),), model_version="m/1"), "", first)


def test_figures_are_of_the_answers_there_are():
    run = Run(
        [answered(10), answered(30, tier="l1"), answered(20, items=0), Seen(5000, problem="out of time")], 2.0, [answered(9, first=4)]
    )
    figures = figures_of(run)
    assert samples_of(run) == {"end_to_end_ms": [10, 30, 20], "first_item_ms": [4], "per_item_ms": [1, 3]}
    assert (figures.p50_ms, figures.per_item_ms, figures.first_item_p99_ms) == (20, 2, 4)
    assert (figures.requests_per_s, figures.items_per_s) == (1.5, 10)
    assert (figures.errors, figures.problems) == (1, {"out of time": 1})
    assert figures.stage_ms == {"encode": 7.5}, "a kept answer's stages ran for another request"
    assert figures.hits == {"computed": 0.6667, "l1": 0.3333}
    checked = check_targets(figures, {"p50_ms": 12, "items_per_s": 10})
    assert checked == {"p50_ms": Target(12, 20, met=False), "items_per_s": Target(10, 10, met=True)}


def read_at(*readings):
    return [Reading(at_s, answered, None if used is None else Usage(*used, processes=3)) for at_s, answered, used in readings]


def test_what_the_server_uses_is_known_between_two_readings_and_overall():
    first = [(0, 0, (100, 5.0)), (1, 10, (120, 5.4)), (2, 10, (150, 5.5))]
    then = [(2 + n, 10 + 20 * n, (130, 5.5 + 0.3 * n)) for n in range(1, 6)]
    run = Run([answered(10)] * 110, 7.0, readings=read_at(*first, *then))
    samples = samples_of(run)
    assert samples["resident_mib"] == [100, 120, 150, 130, 130, 130, 130, 130]
    assert samples["processor_ms"] == [40, 20, *[15] * 4], "what was used while nothing was answered counts to the next answers"
    assert samples["between_answers_ms"] == [100, 100, *[50] * 4]
    figures = figures_of(run)
    assert (figures.resident_mib, figures.peak_resident_mib) == (130, 150)
    assert (figures.processor_ms, figures.processor_cores) == (18.182, 0.29), "2 s for 110 answers in 7 s"
    checked = check_targets(figures, {"peak_resident_mib": 140, "processor_ms": 20, "processor_cores": 0.5})
    assert {name: one.met for name, one in checked.items()} == {"peak_resident_mib": False, "processor_ms": True, "processor_cores": True}


def test_of_a_server_that_answers_less_often_than_it_is_looked_at_all_time_counts():
    run = Run([answered(10)] * 10, 10.0, readings=read_at(*((n / 4, n // 4, (100, n / 100)) for n in range(41))))
    samples = samples_of(run)
    assert (samples["between_answers_ms"], samples["processor_ms"]) == ([1000] * 10, [40] * 10)
    assert (figures_of(run).processor_ms, figures_of(run).requests_per_s) == (40, 1)


def test_readings_that_are_too_few_to_compare_are_no_samples():
    run = Run([answered(10)], 1.0, readings=read_at((0, 0, (100, 5.0)), (1, 1, (100, 5.0)), (2, 2, (100, 5.0)), (3, 3, (100, 5.0))))
    assert samples_of(run).keys() == {"end_to_end_ms", "per_item_ms"}
    longer = read_at(*((n, n, (100, 5.0)) for n in range(6)))
    assert samples_of(Run([answered(10)], 1.0, readings=longer)).keys() >= {"between_answers_ms", "resident_mib"}
    assert "processor_ms" not in samples_of(Run([answered(10)], 1.0, readings=longer)), "no tick of the clock: to 0 there is no ratio"


def test_of_a_server_that_cannot_be_looked_at_the_rate_alone_is_a_sample():
    run = Run([answered(10)], 1.0, readings=read_at(*((n, n, None) for n in range(6))))
    assert samples_of(run)["between_answers_ms"] == [1000] * 5
    figures = figures_of(run)
    assert (figures.resident_mib, figures.peak_resident_mib, figures.processor_ms, figures.processor_cores) == (None,) * 4


async def test_a_watch_reads_before_beside_and_after_what_it_counts():
    looks = []

    def look():
        looks.append(Usage(10, len(looks), 1))
        return looks[-1]

    async def ask(body):
        await until(lambda: len(looks) >= 3)
        return answered(1) if body == b"good" else Seen(1.0)

    watch = Watch(look)
    async with watch.kept():
        await closed_loop(watch.counted(ask), [b"good", b"bad"], 1, 4)
    assert [reading.usage for reading in watch.readings] == looks
    assert (watch.readings[0].answered, watch.readings[-1].answered) == (0, 2)


def test_a_target_for_what_could_not_be_measured_is_missed():
    figures = figures_of(Run([answered(10)], 1.0))
    assert check_targets(figures, {"resident_mib": 1e6})["resident_mib"] == Target(1e6, None, met=False)
    assert figures.first_item_p50_ms is None


def test_the_processes_of_a_server_here_are_found_by_its_port():
    with serving(create_api(Service(), None, GatewaySettings())) as url:
        server = ServerProcesses(url)
        first = server.look()
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass
        after = server.look()
    assert server.reason == ""
    assert first.resident_mib > 10
    assert first.processes >= 1
    assert first.processor_s == 0
    assert after.processor_s > 0.05, "the server is in this process, which has worked for a tenth of a second"


def test_processes_that_cannot_be_found_are_left_out_with_the_reason(monkeypatch):
    port = free_port()
    nothing = ServerProcesses(f"http://127.0.0.1:{port}")
    assert (nothing.reason, nothing.look()) == (f"no process that this user may look into listens on port {port}", None)
    assert ServerProcesses("http://192.0.2.7:8000").reason == "192.0.2.7 is another machine"
    monkeypatch.setitem(sys.modules, "psutil", None)
    without = ServerProcesses("http://127.0.0.1:8000")
    assert (without.reason, without.look()) == ("psutil is not installed (pip install psutil)", None)


# Interleaving


def test_turns_are_taken_so_that_a_drift_is_shared():
    assert "".join(side[0] for side in order(4)) == "bccbbccb"


def test_two_commands_are_run_in_turns_and_their_samples_filed_for_a_comparison(tmp_path):
    files, log = [tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "log"
    code = f"import sys; open({str(log)!r}, 'a').write(sys.argv[1])"
    commands = [f'{sys.executable} -S -c "{code}" {side}' for side in "AB"]
    arguments = ("--baseline", commands[0], "--candidate", commands[1], "--json-baseline", files[0], "--json-candidate", files[1])
    answer = run("interleave", *arguments, "--rounds", 5, "--warm-up", 1)
    assert answer.exit_code == 0
    assert log.read_text() == "AB" + "ABBAABBAAB"
    for path, side in zip(files, "AB", strict=True):
        found = read_measurement(path)
        assert len(found.samples["wall_clock_s"]) == len(found.samples["processor_s"]) == 5
        assert all(used > 0 for used in found.samples["wall_clock_s"])
        assert found.scenario.source.endswith(f" {side}")
    assert run("compare", *files, "--metric", "wall_clock_s", "--failures", 1, "--tolerance", 100).exit_code == 0


def test_one_file_for_both_sides_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "linked").symlink_to(tmp_path)
    files = ("--json-baseline", tmp_path / "a.json", "--json-candidate", tmp_path / "linked/a.json")
    with pytest.raises(ConfigError, match=r"both name .*a\.json; give each side a file of its own"):
        run("interleave", "--baseline", "false", "--candidate", "false", *files)


def test_a_command_that_fails_is_told_with_what_it_said():
    with pytest.raises(ConfigError, match=r"ended with status 3: no luck"):
        timed([sys.executable, "-S", "-c", "import sys; print('no luck', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(ConfigError, match=r"not-a-command --x cannot be run: .*No such file.*; no shell runs it"):
        timed(["./not-a-command", "--x"])


@pytest.mark.parametrize(
    ("command", "complaint"), [("'open", '--candidate "\'open" is no command: No closing quotation'), (" ", "--candidate is empty")]
)
def test_a_command_that_is_none_is_refused_before_anything_runs(tmp_path, command, complaint):
    with pytest.raises(ConfigError, match=complaint):
        run(
            "interleave",
            "--baseline",
            "false",
            "--candidate",
            command,
            "--json-baseline",
            tmp_path / "a",
            "--json-candidate",
            tmp_path / "b",
        )
