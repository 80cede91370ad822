"""The demo without Ray: what counts as its first answer and as its best, and the compiler that runs beside it."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from benchmarks import first_answer as benchmark
from cluster.config import parse
from cluster.engines.health import LOADING
from cluster.errors import ConfigError
from cluster.traffic import api_keys
from deployments.cli import compiling, demo, demo_answers, local_serve
from deployments.cli.compiling import CompiledBeside
from deployments.cli.demo import guarded, tell_where
from deployments.cli.demo_answers import Asked, best_answer, first_answer
from deployments.cli.evaluate import open_with_dataset
from deployments.cli.local_serve import LocalServe, local_document
from deployments.shipped import RAY_CONFIG
from deployments.training.dataset_options import DatasetOptions
from deployments.training.plan import ModelPlan
from deployments.training.pretrained import export_pretrained
from deployments.training.publishing import publish
from pipelines.training_run import new_model
from tests.fakes.clock import Clock
from tests.histories import taste_data
from tests.ports import free_port
from tests.unit.test_datasets_fetch import zipped

ROOT = Path(__file__).resolve().parents[2]
REQUEST = {"user_id": "ada", "k": 3}


def answer(encode: str, generate: str, *, version: int = 1, degraded: bool = False, waits_for: str = "") -> dict[str, Any]:
    skipped = [{"backend": waits_for, "reason": LOADING}] if waits_for else []
    stages = [
        {"stage": "encode", "backend": encode, "duration_ms": 1.0, "fallback_from": []},
        {"stage": "generate", "backend": generate, "duration_ms": 1.0, "fallback_from": skipped},
        {"stage": "blend", "backend": "blend", "duration_ms": 1.0, "fallback_from": []},
    ]
    return {"user_id": "ada", "items": [], "model_version": f"ml/{version}", "degraded": degraded, "stages": stages}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch):
    """Gives these, one a request: answers, status codes and errors."""
    monkeypatch.setattr(demo_answers, "ASK_EVERY_S", 0.0)
    asked: list[Any] = []

    def script(*replies: Any) -> list[Any]:
        left = list(replies)

        def post(url: str, json: Any, timeout: float) -> httpx.Response:
            asked.append(json)
            reply = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(reply, Exception):
                raise reply
            request = httpx.Request("POST", url)
            return httpx.Response(reply, request=request) if isinstance(reply, int) else httpx.Response(200, json=reply, request=request)

        monkeypatch.setattr(demo_answers.httpx, "post", post)
        return asked

    return script


class Serving:
    """A LocalServe that never waits."""

    url = "http://127.0.0.1:1"

    def wait_until(self, holds) -> None:
        while not holds():
            pass


class Noted(Serving):
    """One that notes what is done to it."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def start(self) -> None:
        self._done.append("started")

    def deploy(self) -> None:
        self._done.append("deployed")

    def close(self) -> None:
        self._done.append("closed")


@pytest.fixture
def shown(_as_in_the_background: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """The demo of a compiled version ml/2 for two users, with an end by Ctrl-C or another signal: what was done, its log's name first."""

    def run(*, once: bool, stopped_by: signal.Signals = signal.SIGINT) -> list[str]:
        done: list[str] = []

        def wait() -> None:
            done.append("serves on")
            handler = signal.getsignal(stopped_by)
            assert callable(handler), "the signal reaches no code of Python's"
            handler(stopped_by, None)

        def local_serve(*_: Any, log: Path, **__: Any) -> Noted:
            done.append(str(log))
            return Noted(done)

        monkeypatch.setattr(demo, "LocalServe", local_serve)
        monkeypatch.setattr(demo, "threading", SimpleNamespace(Event=lambda: SimpleNamespace(wait=wait)))
        demo.demo(once=once, port=(port := free_port()), users=2, k=3, model_dir=tmp_path)
        return [step.replace(str(port), "PORT") for step in done]

    manifest = SimpleNamespace(compiled_from=1, blend=None, quality={"hr@10": 0.25}, model=SimpleNamespace(family="hstu"))
    monkeypatch.setattr(demo, "open_dataset", lambda _: taste_data())
    monkeypatch.setattr(demo, "published", lambda *_: SimpleNamespace(version="ml/2", manifest=manifest))
    return run


def test_the_first_answer_is_the_first_that_lacks_no_stage_computed_whatever_is_cached(says):
    asked = says(httpx.ConnectError("refused"), 404, 503, answer("popularity", "none", degraded=True), answer("torch", "torch_beam"))
    first = first_answer(Serving(), REQUEST)
    assert first.served_by == {"encode": "torch", "generate": "torch_beam"}
    assert len(asked) == 5
    assert asked[-1] == {**REQUEST, "cache": "bypass"}


def test_the_best_answer_is_the_final_versions_once_no_engine_is_waited_for_and_the_next_engine_is_told(says):
    says(
        answer("torch", "torch_beam", waits_for="vllm"),
        503,
        answer("torch", "vllm"),
        answer("onnxruntime", "torch_beam", version=2, waits_for="vllm"),
        answer("popularity", "none", version=2, degraded=True),
        answer("onnxruntime", "vllm", version=2),
    )
    told: list[tuple[dict[str, str], dict[str, str]]] = []
    first = Asked(REQUEST, answer("torch", "torch_beam"))
    best = best_answer("http://127.0.0.1:1", first, lambda: "ml/2", lambda before, now: told.append((before.served_by, now.served_by)))
    assert (best.answer["model_version"], best.served_by) == ("ml/2", {"encode": "onnxruntime", "generate": "vllm"})
    assert [now for _, now in told] == [
        {"encode": "torch", "generate": "vllm"},
        {"encode": "onnxruntime", "generate": "torch_beam"},
        {"encode": "onnxruntime", "generate": "vllm"},
    ]


def test_as_long_as_the_final_version_is_not_known_no_answer_is_the_best(says):
    says(answer("torch", "vllm"))
    versions = iter([None, None, "ml/1"])
    best = best_answer("http://127.0.0.1:1", Asked(REQUEST, answer("torch", "vllm")), lambda: next(versions), lambda *_: None)
    assert best.answer["model_version"] == "ml/1"
    assert next(versions, "all asked") == "all asked"


def test_a_best_answer_that_does_not_come_is_an_error_with_the_place_to_look(says, monkeypatch):
    monkeypatch.setattr(demo_answers, "BEST_WITHIN_S", 0.0)
    says(answer("torch", "vllm"))
    with pytest.raises(ConfigError, match=r"ml/2 does not answer .* see http://127.0.0.1:1/v1/backends"):
        best_answer("http://127.0.0.1:1", Asked(REQUEST, answer("torch", "vllm")), lambda: "ml/2", lambda *_: None)


def test_the_best_answer_is_waited_for_as_long_as_better_engines_come(says, monkeypatch):
    """Each question takes 600 s; 900 s is the longest wait for another engine or the final version."""
    clock = Clock()
    monkeypatch.setattr(demo_answers, "time", SimpleNamespace(monotonic=clock, sleep=lambda _: clock.advance(600)))
    replies = [answer("torch", "torch_beam"), answer("onnxruntime", "torch_beam", version=2, waits_for="vllm")]
    says(*replies, answer("onnxruntime", "vllm", version=2))
    best = best_answer("http://127.0.0.1:1", Asked(REQUEST, answer("torch", "torch_beam")), lambda: "ml/2", lambda *_: None)
    assert best.served_by == {"encode": "onnxruntime", "generate": "vllm"}


def test_the_demo_ends_with_its_best_answer_and_names_its_files_by_its_port(says, shown, capsys):
    """Another demo in the same directory has files of its own."""
    says(answer("onnxruntime", "vllm", version=2))
    assert shown(once=True) == [".genrec/serve-PORT.log", "started", "deployed", "closed"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["model_version"] == "ml/2"


@pytest.mark.parametrize("stopped_by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_demo_serves_on_without_its_best_engines_until_it_is_stopped(stopped_by, says, shown, monkeypatch, capsys):
    monkeypatch.setattr(demo_answers, "BEST_WITHIN_S", 0.0)
    says(answer("torch", "torch_beam"))
    assert shown(once=False, stopped_by=stopped_by)[1:] == ["started", "deployed", "serves on", "closed"]
    assert (
        "ml/2 does not answer by its best engines, and no other engine has come for 0 s; see http://127.0.0.1:1/v1/backends"
        in capsys.readouterr().out
    )


def test_the_demo_that_answers_once_fails_without_its_best_engines(says, shown, monkeypatch):
    monkeypatch.setattr(demo_answers, "BEST_WITHIN_S", 0.0)
    says(answer("torch", "torch_beam"))
    with pytest.raises(ConfigError, match="does not answer by its best engines"):
        shown(once=True)


@pytest.mark.parametrize("lost", [404, 503, httpx.ReadTimeout("late")])
def test_the_demo_asks_again_for_a_user_whose_answer_does_not_come(lost, says, shown):
    asked = says(answer("torch", "vllm"), lost, answer("torch", "vllm"), answer("onnxruntime", "vllm", version=2))
    assert shown(once=True)[-1] == "closed"
    users = [request["user_id"] for request in asked]
    assert users[1] == users[2] != users[0] == users[3]


def test_the_printed_address_and_the_call_that_operates_carry_a_key_of_which_what_is_served_has_the_hash_alone(tmp_path, capsys):
    key = api_keys.new_key()
    tell_where("http://127.0.0.1:8000", Asked({**REQUEST, "behaviours": []}, answer("torch", "vllm")), key)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"page   http://127.0.0.1:8000/#key={key}"
    recommends, operates = (line for line in printed if line.startswith("curl"))
    assert "authorization" not in recommends
    assert operates == f"curl -s http://127.0.0.1:8000/v1/backends -H 'authorization: Bearer {key}'"
    document = local_document(RAY_CONFIG, {"model_dir": str(tmp_path), "gateway": guarded(key)}, 8000, checked=False)
    gateway = parse(document["applications"][0]["args"]).gateway
    entry = api_keys.find(key.encode(), gateway.api_keys)
    assert entry is not None
    assert (gateway.allow_anonymous, entry.rights) == (True, ["read", "events", "erase", "operate"])
    assert key not in yaml.safe_dump(document)


def test_what_ends_before_it_serves_is_told_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(local_serve, "run_command", lambda *_: ["/bin/false"])
    log = tmp_path / "serve.log"
    serving = LocalServe(ROOT / "ray_config.yaml", {"model_dir": str(tmp_path / "none yet")}, port=free_port(), log=log)
    serving.start()
    with pytest.raises(ConfigError, match=r"the service ended with status 1; the end of .*serve\.log"):
        serving.wait_until(lambda: False)
    serving.close()
    serving.close()


def test_everything_else_goes_before_compiling_and_a_model_that_cannot_be_compiled_is_told(tmp_path, monkeypatch, capsys):
    niced: list[int] = []
    monkeypatch.setattr(compiling.os, "nice", niced.append)
    monkeypatch.setattr(compiling.signal, "signal", lambda *_: None)
    compiling.main(tmp_path / "none")
    assert niced == [19]
    assert "nothing was compiled: no version in" in capsys.readouterr().out


def test_what_is_being_compiled_ends_with_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "compile_command", lambda _: ["/bin/sleep", "3600"])
    monkeypatch.setattr(compiling, "STOP_WITHIN_S", 0.5)  # a shell that starts tests in the background has interrupts ignored
    with CompiledBeside(tmp_path) as compiled:
        assert compiled.under_way
    assert not compiled.under_way


def test_the_benchmark_compares_the_medians_with_the_limit_that_is_kinder():
    slow_machine = "\n".join(benchmark.report([20.0, 21.0, 90.0], [40.0, 41.0, 39.0]))
    assert "1.9 times" in slow_machine
    assert "within 42 s" in slow_machine
    assert "beyond 30 s" in "\n".join(benchmark.report([8.0], [31.0]))


def test_the_demos_model_says_which_data_set_it_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ml-100k.zip").write_bytes(zipped("ml-100k"))
    monkeypatch.setenv("GENREC_CACHE", str(tmp_path))
    asked, record = DatasetOptions(name="ml-100k", cache=tmp_path), ModelPlan(dim=8, layers=1, max_history=8).record(items=3)
    data = asked.read()
    made = publish(tmp_path / "made", record, new_model(record, seed=0), data, training={}, quality={})
    export_pretrained(made, tmp_path / "export", "genrec train ml-100k")
    monkeypatch.setattr(demo, "DEMO_MODEL", tmp_path / "export")
    bundle = demo.published(tmp_path / "models" / "ml-100k", data, asked)
    assert open_with_dataset(DatasetOptions(), bundle.path.parent)[1].source == data.source
