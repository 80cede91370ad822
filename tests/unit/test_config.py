"""One configuration tree: what is wrong in it is named, and ray_config.yaml says what is true."""

import inspect
import re
import socket
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from ray.serve import config as serve_config
from ray.serve import schema
from ray.serve.config import HTTPOptions
from typer.testing import CliRunner

from cluster import ports, profile, serve_keys
from cluster.bundle_store import BundleStore
from cluster.cache.tier_values import TierSettings
from cluster.config import Settings, parse, with_changes
from cluster.config_file import read, read_document
from cluster.engines.controller import FrameworkController
from cluster.engines.roster import Choice
from cluster.errors import ConfigError
from cluster.events.rules import LARGEST_BATCH
from cluster.registry import resolve
from cluster.traffic import router_keys
from cluster.values import Availability
from deployments.app import build
from deployments.cli import _register, app
from deployments.cli import serve as serve_module
from pipelines.recommend import Recommender
from tests.bundles import make_bundle, make_generative_bundle
from tests.fakes.applications import deployment_of, deployments_of
from tests.ports import free_port

DEFAULTS = Settings()
RAY_CONFIG = Path(__file__).resolve().parents[2] / "ray_config.yaml"
ONE_MACHINE = RAY_CONFIG.parent / "cluster" / "launch" / "one_machine.yaml"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"modeldir": "x"}, "modeldir = 'x': Extra inputs are not permitted"),
        ({"encoder": {"order": ["tensort"]}}, r"order names tensort, but no such encoder is registered; there are .*tensorrt, torch"),
        ({"encoder": {"order": ["torch", "torch"]}}, "order names torch more than once"),
        ({"encoder": {"order": ["torch"], "disabled": ["mine"]}}, r"disabled names mine, which order \(torch\) does not"),
        ({"encoder": {"selection": "best"}}, "encoder.selection = 'best': Input should be 'ordered' or 'fastest'"),
        ({"encoder": {"batching": {"max_requests": 0}}}, "encoder.batching.max_requests = 0"),
        ({"encoder": {"backends": {"x": "nocolon"}}}, "backends names 'nocolon', which is not of the form 'module:Class'"),
        ({"encoder": {"breaker": {"growth": float("nan")}}}, "encoder.breaker.growth = nan: Input should be greater than or equal to 1"),
        ({"gateway": {"deadline_s": float("inf")}}, "gateway.deadline_s = inf: Input should be less than or equal to 3600"),
        ({"encoder": {"breaker": {"pause_s": -1}}}, "encoder.breaker.pause_s = -1: Input should be greater than 0"),
        ({"generator": {"order": ["torch"]}}, r"order names torch, but no such generator is registered; there are torch_beam, vllm"),
        ({"generator": {"options": {"vlm": {}}}}, "options names vlm, but no such generator is registered"),
        ({"generator": {"beam": 0}}, "generator.beam = 0"),
        ({"gateway": {"deadline_s": "soon"}}, "gateway.deadline_s = 'soon'"),
        ({"version": 0}, "version = 0"),
        ({"placement": "together"}, "placement = 'together': Input should be 'split' or 'colocated'"),
        ({"gateway": {"flags": {"hedging": True}}}, "gateway.flags.hedging = True: Extra inputs are not permitted"),
        ({"gateway": {"flags": {"strategy": "popular"}}}, "gateway.flags.strategy = 'popular'"),
        (
            {"gateway": {"max_held_bytes": 2**16}},
            r"gateway\.max_held_bytes \(65536\) must be at least twice gateway\.max_body_bytes \(1048576\)",
        ),
        ({"gateway": {"deadline_s": 60}}, r"deadline_s \(60\) must be less than request_within_s \(30\), at which a request ends \(504\)"),
        ({"gateway": {"generation_deadline_s": 30}}, r"generation_deadline_s \(30\) must be less than request_within_s \(30\)"),
        ({"gateway": {"request_within_s": 1.5, "deadline_s": 1, "generation_deadline_s": 1}}, r"ranking_deadline_s \(2\) .* \(1\.5\)"),
        (
            {"gateway": {"max_events": LARGEST_BATCH + 1}},
            f"gateway.max_events = {LARGEST_BATCH + 1}: Input should be less than or equal to",
        ),
        ({"gateway": {"hosts": ["a.org", "b.org:8000"]}}, r"hosts has 'b\.org:8000'; give names alone, without a scheme, a port or a path"),
        ({"gateway": {"hosts": ["https://b.org"]}}, "hosts has 'https://b.org'; give names alone"),
        ({"gateway": {"hosts": ["10.0.0.7:8000"]}}, "hosts has '10.0.0.7:8000'; give names alone"),
        ({"zeromq": {"address": "tcp://127.0.0.1:65536"}}, "has the port 65536; give one from 1 to 65535, as in tcp://127.0.0.1:5555"),
        ({"zeromq": {"address": "tcp://127.0.0.1:0"}}, "has the port 0; give one from 1 to 65535"),
        ({"events": {"url": "postgres://host/events"}}, "url is no event store's; write it as postgresql://user@host/database"),
        ({"events": {"url": "events.db"}}, "url is no event store's"),
        ({"events": {"url": "sqlite://events.db"}}, "url is no event store's"),
        ({"events": {"url": "sqlite:///events.db?ledger=erased"}}, "event store: the ledger 'erased' is no absolute path; write"),
        ({"events": {"url": "postgresql://u@h/d?ledger=erased"}}, "event store: the ledger 'erased' is no absolute path; write"),
        ({"events": {"url": "sqlite:///e.db?mode=ro"}}, "event store 'sqlite:///e.db.mode=ro': 'mode=ro' is no option of SQLite's"),
        ({"events": {"url": "sqlite:///e.db?ledger=/l&mode=ro"}}, "'mode=ro' is no option of SQLite's; the only one is .ledger=/a/file"),
        ({"cache": {"l2": "redis", "redis_url": "http://host:6379"}}, r"cache.redis_url = 'http://host:6379': String should match"),
        ({"gateway": {"rate_limits": {"tenants": {"a shop": None}}}}, "no request could name the tenant 'a shop'; give 1 to 64 letters"),
        ({"cache": {"l2_shards": 3, "l2_max_shards": 2}}, r"l2_max_shards \(2\) must be greater than or equal to l2_shards \(3\)"),
    ],
)
def test_a_wrong_key_is_named_with_its_value_and_the_rule(tree, message):
    with pytest.raises(ConfigError, match=message):
        parse(tree)


def test_a_call_may_carry_as_many_events_as_a_store_takes_together():
    assert parse({"gateway": {"max_events": LARGEST_BATCH}}).gateway.max_events == LARGEST_BATCH


@pytest.mark.parametrize("host", ["rec.example.org", "REC", "xn--bcher-kva.example", "10.0.0.7", "::1", "fe80::1"])
def test_a_host_is_a_name_or_an_address(host: str):
    assert parse({"gateway": {"hosts": [host]}}).gateway.hosts == [host]


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError, match=r"version = 0.*gateway\.max_k = 0"):
        parse({"version": 0, "gateway": {"max_k": 0}})


@pytest.mark.parametrize(
    "content", ["", "applications: []", "applications: 7", "- a list", "a: [", "applications: [genrec]", "applications: [{}, genrec]"]
)
def test_a_file_that_is_no_serve_config_is_refused_by_name(tmp_path: Path, content: str):
    path = tmp_path / "other.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"other\.yaml"):
        read_document(path)


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path):
    keys = "gateway: {max_k: 5}\n      cache: {enabled: false}\n      gateway: {playground: false}"
    (tmp_path / "other.yaml").write_text(f"applications:\n  - args:\n      {keys}\n")
    with pytest.raises(ConfigError, match=r"(?s)other\.yaml cannot be read as YAML: the key 'gateway' stands there twice.*line 5"):
        read(tmp_path / "other.yaml")
    merged = "x-cache: &x {enabled: true, ttl_s: 5}\napplications:\n  - args:\n      cache: {<<: *x, enabled: false}\n"
    (tmp_path / "other.yaml").write_text(merged)
    cache = read(tmp_path / "other.yaml").cache
    assert (cache.enabled, cache.ttl_s) == (False, 5)


def test_a_date_that_there_is_not_is_refused_with_its_line(tmp_path: Path):
    keys = "gateway:\n        api_keys: [{name: shop, expires: 2027-02-30}]"
    (tmp_path / "other.yaml").write_text(f"applications:\n  - args:\n      {keys}\n")
    with pytest.raises(ConfigError, match=r"(?s)other\.yaml cannot be read as YAML: '2027-02-30' is none of YAML's values \(day .*line 4"):
        read(tmp_path / "other.yaml")


def test_a_missing_file_is_refused_with_the_cure(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist; give the path of a Serve config file"):
        read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"http_options": [{"host": "127.0.0.1"}]}, r"http_options = \[{'host': '127.0.0.1'}\]"),
        ({"http_options": {"host": 127}}, r"http_options\.host = 127"),
        ({"deployments": {"gateway": {"num_replicas": 2}}}, r"deployments = {'gateway'.*valid list"),
        ({"deployments": ["gateway"]}, r"deployments\.0 = 'gateway'"),
        ({"deployments": [{"name": "encoder", "user_config": ["order"]}]}, r"deployments\.0\.user_config = \['order'\]"),
        ({"deployments": [{"name": "gateway", "autoscaling_config": 3}]}, r"deployments\.0\.autoscaling_config = 3"),
        ({"deployments": [{"name": "encoder", "graceful_shutdown_timeout_s": "long"}]}, r"graceful_shutdown_timeout_s = 'long'"),
        ({"deployments": [{"name": "gateway", "num_replicas": "abc"}]}, r"deployments\.0\.num_replicas.* = 'abc'"),
        ({"deployments": [{"name": "gateway", "num_replicas": 0}]}, r"deployments\.0\.num_replicas.* = 0"),
        ({"http_options": {"port": 99999}}, r"http_options\.port = 99999: Input should be less than or equal to 65535"),
        ({"http_options": {"port": None}}, r"http_options\.port = None: Input should be a valid integer"),
        ({"deployments": [{"name": "gatway"}]}, "with placement split, unknown deployment 'gatway'; choose from encoder, gateway, "),
    ],
)
def test_what_serve_is_told_in_another_form_than_it_takes_is_refused_by_name(tmp_path: Path, changes, message):
    document = yaml.safe_load(RAY_CONFIG.read_text())
    of_application = {name: value for name, value in changes.items() if name == "deployments"}
    of_file = {name: value for name, value in changes.items() if name != "deployments"}
    document = {**document, **of_file, "applications": [{**document["applications"][0], **of_application}]}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=rf"other\.yaml: .*{message}"):
        read(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("http_options:", "http_option:"),
        ("port: 8000", "prt: 8000"),
        ("args:", "arg:"),
        ("deployments:", "deployment:"),
        ("ray_actor_options:", "ray_actor_option:"),
        ("num_cpus:", "num_cpu:"),
        ("max_ongoing_requests:", "max_ongoing_request:"),
        ("max_replicas:", "max_replica:"),
        ("request_router_class:", "request_router_clas:"),
        ("num_replicas:", "num_replica:"),
        ("# user_config: {order:", "user_confg: {order:"),
        ("max_queued:", "max_queud:"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_one_that_it_resembles(tmp_path: Path, right: str, wrong: str):
    text = RAY_CONFIG.read_text()
    assert right in text
    (tmp_path / "other.yaml").write_text(text.replace(right, wrong, 1))
    meant = right.removeprefix("# ").partition(":")[0]
    with pytest.raises(ConfigError, match=rf"other\.yaml: .*{wrong.partition(':')[0]} = .*not permitted; did you mean {meant}\?"):
        read(tmp_path / "other.yaml")


def test_a_setting_of_genrecs_that_stands_beside_args_is_refused_with_its_place(tmp_path: Path):
    for text, place in (("encoder: {order: [torch]}\napplications: [{args: {}}]", r"applications\[0\]\.args"),
                        ("applications: [{args: {}, encoder: {order: [torch]}}]", "args")):  # fmt: skip
        (tmp_path / "other.yaml").write_text(text)
        with pytest.raises(ConfigError, match=rf"other\.yaml: encoder = {{'order': \['torch'\]}}: .*; it belongs under {place}$"):
            read(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("ours", "rays"),
    [
        (serve_keys.ServeFile, schema.ServeDeploySchema),
        (serve_keys.ServeApplication, schema.ServeApplicationSchema),
        (serve_keys.Deployment, schema.DeploymentSchema),
        (serve_keys.HttpOptions, schema.HTTPOptionsSchema),
        (serve_keys.RayActorOptions, schema.RayActorOptionsSchema),
        (serve_keys.Autoscaling, serve_config.AutoscalingConfig),
        (serve_keys.RequestRouter, serve_config.RequestRouterConfig),
    ],
)
def test_the_keys_that_are_known_are_those_that_serve_reads(ours: type[BaseModel], rays: type[BaseModel]):
    assert set(ours.model_fields) == set(rays.model_fields)


@pytest.mark.parametrize(("vllm_for_gpus", "order"), [(True, ["vllm", "torch_beam"]), (False, ["torch_beam", "vllm"])])
def test_the_generators_stand_in_the_order_of_their_speed_on_the_machine_unless_an_order_is_given(
    monkeypatch: pytest.MonkeyPatch, vllm_for_gpus: bool, order: list[str]
):
    monkeypatch.setattr("cluster.config._vllm_is_for_gpus", lambda: vllm_for_gpus)
    assert parse({}).generator.in_order() == order
    assert parse({"generator": {"order": ["vllm"]}}).generator.in_order() == ["vllm"]
    assert parse({"generator": {"disabled": ["vllm"]}}).generator.disabled == ["vllm"]
    with pytest.raises(ConfigError, match=f"disabled names vlm, which order \\({', '.join(order)}\\) does not"):
        parse({"generator": {"disabled": ["vlm"]}})


@pytest.mark.parametrize(("stage", "wrong"), [("encoder", "tensort"), ("generator", "torch")])
def test_a_wrong_user_config_is_refused_before_anything_is_deployed(tmp_path: Path, stage: str, wrong: str):
    document = yaml.safe_load(RAY_CONFIG.read_text())
    deployment = next(one for one in document["applications"][0]["deployments"] if one["name"] == stage)
    deployment["user_config"] = {"order": [wrong]}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=rf"other\.yaml: user_config of the {stage}: .*order names {wrong}"):
        read(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        ("encoder", {"onnxruntime": {"treads": 2}}, "options of the encoder onnxruntime: .*'treads'"),
        ("encoder", {"tensorrt": {"precisions": ["fp8"]}}, "options of the encoder tensorrt: .*fp8"),
        ("generator", {"vllm": {"dtype": "fp7"}}, "options of the generator vllm: unknown dtype of vllm 'fp7'; choose from"),
        ("ranker", {"torch": {"state_bytes": -1}}, "options of the ranker torch: .*state_bytes"),
    ],
)
def test_options_that_a_backend_of_genrecs_does_not_take_are_refused_before_anything_is_deployed(tmp_path, stage, options, message):
    for changes in (
        {"args": {stage: {"options": options}}},
        {"deployments": [{"name": stage, "user_config": {"options": options}}]},
        {"args": {"placement": "colocated"}, "deployments": [{"name": "gateway", "user_config": {stage: {"options": options}}}]},
    ):
        (tmp_path / "other.yaml").write_text(yaml.safe_dump({"applications": [changes]}))
        with pytest.raises(ConfigError, match=rf"other\.yaml: .*{message}"):
            read(tmp_path / "other.yaml")
    with pytest.raises(ConfigError, match=message):
        build({stage: {"options": options}})


def test_genrec_config_warns_of_options_that_a_backend_of_ones_own_does_not_take(tmp_path: Path, caplog):
    _register()
    file, backends = tmp_path / "other.yaml", {"mine": "tests.broken_backends:Sound", "away": "no_such_module:Mine"}

    def told(args, user_config):
        given = {"encoder": {"backends": backends, "options": args}}
        deployments = [{"name": "encoder", "user_config": {"options": user_config}}]
        file.write_text(yaml.safe_dump({"applications": [{"args": given, "deployments": deployments}]}))
        caplog.clear()
        assert CliRunner().invoke(app, ["config", "--config", str(file)]).exit_code == 0
        return [record.getMessage() for record in caplog.records if record.name == "cluster.config_file"]

    wrong = {"mine": {"devise": "cuda"}}
    said = "options of the encoder mine: TypeError: Sound() takes no arguments; it will not be available"
    assert told({}, wrong) == [f"{file}: user_config of the encoder: {said}"]
    assert told(wrong, {"torch": {"state_bytes": 0}}) == [f"{file}: {said}"], "once"
    assert told(wrong, {"mine": {}}) == [f"{file}: {said}"]
    assert told({"away": {"devise": "cuda"}}, {"mine": {}}) == [], "it cannot be imported here"


def test_genrec_config_warns_of_a_backend_of_an_order_that_cannot_be_imported_here(tmp_path: Path, caplog):
    _register()
    file, backends = tmp_path / "other.yaml", {"mine": "tests.broken_backends:Sound", "away": "no_such_module:Mine"}

    def told(*order):
        engines = {"backends": backends, "order": [*order, "torch"]}
        deployments = [{"name": "encoder", "user_config": {"order": engines["order"]}}]
        file.write_text(yaml.safe_dump({"applications": [{"args": {"encoder": engines}, "deployments": deployments}]}))
        caplog.clear()
        assert CliRunner().invoke(app, ["config", "--config", str(file)]).exit_code == 0
        return [record.getMessage() for record in caplog.records if record.name == "cluster.config_file"]

    assert told("mine") == told() == []
    (said,) = told("mine", "away")
    absence = "ModuleNotFoundError: No module named 'no_such_module'; install it, or put its directory into PYTHONPATH"
    assert said.startswith(f"{file}: encoder away (no_such_module:Mine) cannot be imported here: {absence}")


def test_what_a_backend_of_ones_own_prints_is_no_part_of_the_configuration_that_genrec_config_prints(tmp_path: Path, monkeypatch):
    _register()
    monkeypatch.syspath_prepend(tmp_path)
    made = "class Mine:\n    def __init__(self, **options):\n        print('it is made')\n"
    (tmp_path / "talkative_encoder.py").write_text(f"print('it is imported')\n{made}")
    mine = {"backends": {"mine": "talkative_encoder:Mine"}, "order": ["mine", "torch"], "options": {"mine": {"device": "cuda"}}}
    (file := tmp_path / "other.yaml").write_text(yaml.safe_dump({"applications": [{"args": {"encoder": mine}}]}))
    told = CliRunner().invoke(app, ["config", "--config", str(file)])
    assert yaml.safe_load(told.stdout)["encoder"]["order"] == ["mine", "torch"]
    assert told.stderr.splitlines() == ["it is imported", "it is made"]


def test_genrec_config_warns_of_keys_in_force_that_have_expired_or_expire_within_two_weeks(tmp_path: Path, caplog):
    _register()
    file, now = tmp_path / "other.yaml", datetime.now(UTC)

    def key(name, days):
        return {"name": name, "sha256": sha256(name.encode()).hexdigest(), "expires": (now + timedelta(days=days)).isoformat()}

    keys = [key("tomorrow", 1), key("later", 15), key("past", -1), {"name": "never", "sha256": "0" * 64}]
    of_gateway = [{"name": "gateway", "user_config": {"api_keys": keys}}]
    for args, deployments in (({"gateway": {"api_keys": keys}}, []), ({"gateway": {"api_keys": [key("replaced", 1)]}}, of_gateway)):
        file.write_text(yaml.safe_dump({"applications": [{"args": args, "deployments": deployments}]}))
        caplog.clear()
        assert CliRunner().invoke(app, ["config", "--config", str(file)]).exit_code == 0
        warned = [re.findall(r"the API key '(\w+)' (expires|has expired) at", text) for text in caplog.messages if "the API key '" in text]
        assert warned == [[("tomorrow", "expires")], [("past", "has expired")]]


@pytest.mark.parametrize(
    ("router", "keys", "message"),
    [
        ("user_router:UserAffinityRouter", {"bond": 1.25}, "UserAffinityRouter takes bound, slack, slow_times, not bond"),
        ("user_router:UserAffinityRouter", {"bound": 0.5}, "bound is 0.5 and slack 8; give a finite bound of 1 or more"),
        ("user_router:UserAffinityRouter", {"bound": "high"}, "bound is high"),
        ("user_router:UserAffinityRouter", {"slow_times": None}, "slow_times is None"),
        ("routers:LeastLoadedRouter", {"slack": 1}, "LeastLoadedRouter takes no options, not slack"),
        ("routers:WeightedRouter", {"weights": {"zone-a": 0}}, "the weights of WeightedRouter are numbers greater than 0"),
        ("routers:WeightedRouter", {"weights": "zone-a"}, "weights is zone-a; give a weight by node id or availability zone"),
    ],
)
def test_keys_that_a_request_router_does_not_take_are_refused_before_anything_is_deployed(tmp_path: Path, router, keys, message):
    given = {"request_router_class": f"deployments.{router}", "request_router_kwargs": keys}
    tree = {"applications": [{"deployments": [{"name": "encoder", "request_router_config": given}]}]}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=rf"other\.yaml: request_router_kwargs of encoder: {message}"):
        read(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        ({"name": "switchboard", "num_replicas": 2}, "the switchboard has num_replicas 2; all replicas follow a single one: give it"),
        ({"name": "switchboard", "num_replicas": "auto"}, "the switchboard has num_replicas auto"),
        ({"name": "switchboard", "autoscaling_config": {"max_replicas": 1}}, "the switchboard has an autoscaling_config"),
        ({"name": "switchboard", "user_config": {}}, "switchboard has a user_config, and nothing of it changes without a restart"),
        ({"name": "zeromq", "user_config": {"max_queue": 5}}, "zeromq has a user_config, and nothing of it changes without a restart"),
    ],
)
def test_what_cannot_be_said_of_the_switchboard_or_the_door_is_refused_before_anything_is_deployed(tmp_path: Path, deployment, message):
    tree = {"applications": [{"args": {"zeromq": {}}, "deployments": [deployment]}]}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=rf"other\.yaml: {message}"):
        read(tmp_path / "other.yaml")


@pytest.mark.parametrize("router", router_keys.ROUTERS)
def test_the_routers_whose_keys_are_known_are_there(router: str):
    assert resolve(router).__qualname__ == router.partition(":")[2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"args": {"gatway": {}}}, "gatway"),
        (
            {"deployments": [{"name": "encoder", "user_config": {"order": ["tensort"]}}]},
            "user_config of the encoder: .*order names tensort",
        ),
        ({"deployments": ["gateway"]}, "deployments"),
    ],
)
def test_every_application_of_a_file_is_checked_and_a_problem_names_it(tmp_path: Path, wrong, message):
    first = {**yaml.safe_load(RAY_CONFIG.read_text())["applications"][0], "name": "shop"}
    second = {**first, "name": "news", "route_prefix": "/news", **wrong}
    file = tmp_path / "other.yaml"
    for applications, name in (([first, second], "news"), ([{**first, **wrong}, {**first, "name": "news"}], "shop")):
        file.write_text(yaml.safe_dump({"applications": applications}))
        with pytest.raises(ConfigError, match=rf"other\.yaml: application '{name}'.*{message}"):
            read(file)
    file.write_text(yaml.safe_dump({"applications": [first, {"name": "hello", "import_path": "hello:app", "args": {"gatway": {}}}]}))
    assert read(file) == Settings()


def test_two_applications_with_one_address_of_their_zeromq_doors_are_refused(tmp_path: Path):
    first, second = ({"name": name, "import_path": "deployments.app:build", "args": {"zeromq": {}}} for name in ("shop", "news"))
    file = tmp_path / "other.yaml"
    file.write_text(yaml.safe_dump({"applications": [first, second]}))
    with pytest.raises(ConfigError, match=r"'news': zeromq\.address tcp://127\.0\.0\.1:5555 is that of 'shop', too"):
        read(file)
    file.write_text(yaml.safe_dump({"applications": [first, {**second, "args": {"zeromq": {"address": "ipc:///run/news"}}}]}))
    assert read(file).zeromq is not None


@pytest.mark.parametrize(
    ("placement", "encoder", "message"),
    [
        ("split", {"order": ["torch"]}, "has encoder, and placement is split; put it under user_config of that deployment"),
        ("colocated", ["torch"], r"encoder = \['torch'\]: give its keys, as in encoder: \{selection: fastest\}"),
        ("colocated", None, "encoder = None: give its keys"),
    ],
)
def test_what_the_gateways_user_config_says_of_a_stage_is_refused_where_it_would_change_nothing(tmp_path, placement, encoder, message):
    deployments = [{"name": "gateway", "user_config": {"max_k": 5, "encoder": encoder}}]
    tree = {"applications": [{"args": {"placement": placement}, "deployments": deployments}]}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=rf"other\.yaml: user_config of the gateway.*{message}"):
        read(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"l2_shards": 2}, r"has l2_shards, which cannot change without a restart; put it under args\.cache"),
        ({"l1_bytes": 5}, r"cache\.l1_bytes = 5"),
        ({"l1_byts": 2**20}, r"cache\.l1_byts"),
        (2**20, r"cache = 1048576: give its keys, as in cache: \{l1_bytes: 134217728\}"),
    ],
)
def test_of_the_cache_the_gateways_user_config_takes_the_size_of_l1_alone(tmp_path: Path, cache: object, message: str):
    file = tmp_path / "other.yaml"

    def told(cache: object) -> Settings:
        tree = {"applications": [{"args": {}, "deployments": [{"name": "gateway", "user_config": {"cache": cache}}]}]}
        file.write_text(yaml.safe_dump(tree))
        return read(file)

    with pytest.raises(ConfigError, match=rf"other\.yaml: user_config of the gateway.*{message}"):
        told(cache)
    assert told({"l1_bytes": 2**20}) == Settings()


def test_ray_config_is_a_valid_serve_config_whose_values_are_the_defaults():
    schema.ServeDeploySchema.model_validate(yaml.safe_load(RAY_CONFIG.read_text()))
    assert read(RAY_CONFIG) == Settings()


COMMENTED = re.compile(r"^( *)# (?!also:|api_keys:)\w+: .*\n(?:\1#   .*\n)*", re.MULTILINE)
"""A setting that a launch file shows in a comment, with the lines that belong to it; but for digests of keys, which are none there."""
SHOWN = [(file, found) for file in (RAY_CONFIG, ONE_MACHINE) for found in COMMENTED.finditer(file.read_text())]


@pytest.mark.parametrize(("file", "found"), SHOWN, ids=[found[0].split(":")[0].strip(" #") for _, found in SHOWN])
def test_a_setting_in_a_comment_is_read_once_it_is_no_comment(tmp_path: Path, file: Path, found: re.Match[str]):
    setting = re.sub(rf"^{found[1]}# ?", found[1], found[0], flags=re.MULTILINE)
    before, after = found.string[: found.start()], found.string[found.end() :]
    (tmp_path / file.name).write_text(before + setting + after)
    assert read_document(tmp_path / file.name) != read_document(file)
    read(tmp_path / file.name)


def test_ray_config_mentions_every_key():
    text = RAY_CONFIG.read_text()
    missing = [name for name in _names(Settings.model_json_schema()) if f"{name}:" not in text]
    assert missing == []


@pytest.mark.parametrize("make", [make_bundle, make_generative_bundle])
def test_ray_config_names_the_deployments_there_are_with_a_decoder_and_without(tmp_path: Path, make):
    make(tmp_path / "tiny")
    application = build({"model_dir": str(tmp_path / "tiny")})
    named = {deployment["name"] for deployment in yaml.safe_load(RAY_CONFIG.read_text())["applications"][0]["deployments"]}
    assert named == {one.name for one in deployments_of(application)} == set(Settings().deployments)


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_the_deployments_that_a_file_may_name_are_those_that_there_are(tmp_path: Path, placement: str):
    make_bundle(tmp_path / "tiny")
    tree = {"model_dir": str(tmp_path / "tiny"), "placement": placement, "zeromq": {}}
    assert {one.name for one in deployments_of(build(tree))} == set(parse(tree).deployments)


@pytest.mark.parametrize("make", [make_bundle, make_generative_bundle])
def test_colocated_the_stages_are_no_deployments_of_their_own(tmp_path: Path, make):
    make(tmp_path / "tiny")
    settings = read(ONE_MACHINE)
    assert settings.placement == "colocated"
    application = build({**settings.model_dump(mode="json"), "model_dir": str(tmp_path / "tiny")})
    named = {deployment["name"] for deployment in yaml.safe_load(ONE_MACHINE.read_text())["applications"][0]["deployments"]}
    assert named == {one.name for one in deployments_of(application)} == {"gateway", "switchboard"}


def test_a_version_is_pinned_only_where_it_is_asked_for(tmp_path: Path):
    make_bundle(tmp_path / "tiny")
    assert [_settings(build({"model_dir": str(tmp_path / "tiny"), **more}))["version"] for more in ({}, {"version": 1})] == [None, 1]


def test_building_the_application_refuses_a_model_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="gateway"):
        build({"model_dir": str(tmp_path), "gateway": 5})
    assert BundleStore(tmp_path).versions() == []


def test_genrec_config_prints_the_resolved_tree_and_its_schema():
    _register()
    shown = CliRunner().invoke(app, ["config", "--config", str(RAY_CONFIG)])
    assert parse(yaml.safe_load(shown.stdout)) == Settings()
    schema = CliRunner().invoke(app, ["config", "--schema"])
    assert yaml.safe_load(schema.stdout) == Settings.model_json_schema()


SECRETS = {
    "cache": {"l2": "redis", "redis_url": "redis://me:hunter2@cache:6379/0"},
    "events": {"url": "postgresql://me:hun/ter@2@db/shop?sslpassword=hunter2&application_name=x"},
    "encoder": {
        "backends": {"mine": "mine:Encoder"},
        "options": {"mine": {"api_key": "hunter2", "max_tokens": 8, "headers": {"Authorization": "Basic hunter2"}}},
    },
}


def test_genrec_config_prints_no_password_and_neither_does_a_repr_or_an_error(tmp_path: Path):
    _register()
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"args": SECRETS}]}))
    printed = CliRunner().invoke(app, ["config", "--config", str(path)])
    with pytest.raises(ConfigError) as refused:
        parse({**SECRETS, "cache": SECRETS["cache"] | {"ttl_s": 0, "l2": "disk"}, "events": {"url": SECRETS["events"]}})
    with pytest.raises(ConfigError, match=r"gateway\.token = '\*\*\*': Extra") as misplaced:
        parse({"gateway": {"token": "hunter2"}})
    with pytest.raises(ConfigError, match=r"'Authorization': '\*\*\*'") as nested:
        parse({"encoder": {"headers": {"Authorization": "Basic hunter2", "X-Api-Key": "hunter2"}}})
    for text in (printed.stdout, repr(parse(SECRETS)), str(refused.value), str(misplaced.value), str(nested.value)):
        assert not re.search("hunter2|hun/ter", text)
    assert "redis_url: redis://me:***@cache:6379/0\n" in printed.stdout
    assert "url: postgresql://me:***@db/shop?sslpassword=***&application_name=x\n" in printed.stdout
    assert "max_tokens: 8" in printed.stdout
    assert parse(SECRETS).cache.redis_url == SECRETS["cache"]["redis_url"], "what is used is whole"


def test_every_key_is_described():
    undescribed = [
        f"{section.__name__}.{name}"
        for section in [Settings, *_sections(Settings)]
        for name, field in section.model_fields.items()
        if not field.description and not (isinstance(field.annotation, type) and field.annotation.__doc__)
    ]
    assert undescribed == []


def _settings(application):
    """What the gateway is given."""
    return deployment_of(application).init_args[0]


def _sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    own = [f.annotation for f in section.model_fields.values() if isinstance(f.annotation, type) and issubclass(f.annotation, BaseModel)]
    return [*own, *(below for one in own for below in _sections(one))]


def _names(schema) -> set[str]:
    objects = [schema, *schema.get("$defs", {}).values()]
    return {name for one in objects for name in one.get("properties", {})}


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        (None, "sqlite:////models/shop/events.db"),
        ("sqlite:///here.db", f"sqlite:///{Path.cwd()}/here.db"),
        ("sqlite:////there/events.db", "sqlite:////there/events.db"),
        ("postgresql://genrec@host/genrec", "postgresql://genrec@host/genrec"),
    ],
)
def test_an_event_store_in_a_file_is_named_by_its_absolute_path(url, stored):
    assert parse({"model_dir": "/models/shop", "events": {"url": url}}).event_store_url == stored


@pytest.mark.parametrize("document", ["docs/deploy.md", "docs/operating-changes.md"])
def test_the_documents_name_the_launch_files_in_which_old_replicas_stop_before_new_ones_serve(document):
    stops_first = set()
    for file in ONE_MACHINE.parent.glob("*.yaml"):
        for manifest in yaml.safe_load_all(file.read_text()):
            config = yaml.safe_load(manifest.get("spec", {}).get("serveConfigV2", "{}")) or manifest
            deployments = [one for application in config.get("applications", []) for one in application["deployments"]]
            if any(one.get("max_surge_percent") != 100 for one in deployments if "max_ongoing_requests" in one):  # the others are not asked
                stops_first.add(file.name)
    assert stops_first == {"one_machine.yaml"}
    lines = (RAY_CONFIG.parent / document).read_text().splitlines()
    (said,) = [line for line in lines if "new replicas serve before old ones stop" in line]
    assert "`one_machine.yaml`" in said


def test_serve_hands_over_another_model_and_port_than_the_files(tmp_path, monkeypatch):
    make_bundle(tmp_path / "shop")
    handed_over = []
    monkeypatch.setattr(serve_module.os, "execve", lambda command, arguments, _: handed_over.append(arguments))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    serve_module.serve(ONE_MACHINE, model_dir=tmp_path / "shop", port=(port := free_port()))
    ((*_, run, written),) = handed_over
    document, shipped = read_document(Path(written)), read_document(ONE_MACHINE)
    Path(written).unlink()
    assert run == "deployments.cli.run"
    assert document["applications"][0]["args"].pop("model_dir") == str(tmp_path / "shop")
    assert document["http_options"].pop("port") == port
    shipped["applications"][0]["args"].pop("model_dir")
    shipped["http_options"].pop("port")
    assert document == shipped


def test_serve_runs_the_file_itself_where_nothing_is_changed(tmp_path, monkeypatch):
    make_bundle(tmp_path / "ml-100k")
    config = tmp_path / "serve.yaml"
    text = ONE_MACHINE.read_text().replace("models/ml-100k", str(tmp_path / "ml-100k"))
    config.write_text(text.replace("port: 8000", f"port: {free_port()}"))
    handed_over = []
    monkeypatch.setattr(serve_module.os, "execve", lambda command, arguments, _: handed_over.append(arguments))
    serve_module.serve(config)
    assert handed_over[0][1:] == ["-m", "deployments.cli.run", str(config)]


def test_serve_listens_at_an_ipv6_address(tmp_path, monkeypatch):
    make_bundle(tmp_path / "shop")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    handed_over = []
    monkeypatch.setattr(serve_module.os, "execve", lambda command, arguments, _: handed_over.append(arguments))
    if not ports.is_free(port := free_port(), "::1"):
        pytest.skip("this machine has no IPv6")
    serve_module.serve(ONE_MACHINE, model_dir=tmp_path / "shop", host="::1", port=port)
    Path(handed_over[0][-1]).unlink()


def test_serve_does_not_share_a_port_with_another_service(tmp_path, monkeypatch):
    """Serve's own proxy sets SO_REUSEPORT: two of them would each get a part of the connections."""
    make_bundle(tmp_path / "shop")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(serve_module.os, "execve", lambda *_: pytest.fail("it was started"))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port := free_port()))
        other.listen()
        with pytest.raises(ConfigError, match=f"port {port} of this machine cannot be had"):
            serve_module.serve(ONE_MACHINE, model_dir=tmp_path / "shop", port=port, profile="default")


def test_serve_does_not_have_https_and_plain_http_on_one_port(tmp_path, monkeypatch):
    make_bundle(tmp_path / "shop")
    (tmp_path / "certificate.pem").touch()
    for name, value in {"CERTIFICATE": tmp_path / "certificate.pem", "TLS_PORT": (port := free_port())}.items():
        monkeypatch.setenv(f"GENREC_HAPROXY_{name}", str(value))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(profile, "works", Availability.yes)
    monkeypatch.setattr(serve_module.os, "execve", lambda *_: pytest.fail("it was started"))
    with pytest.raises(ConfigError, match=f"HTTPS and plain HTTP cannot both be served on port {port}"):
        serve_module.serve(ONE_MACHINE, model_dir=tmp_path / "shop", port=port)


def test_keys_of_args_that_the_gateways_user_config_leaves_out_are_told(tmp_path: Path, caplog):
    shop, boss, new = ({"name": name, "sha256": digit * 64} for name, digit in (("shop", "1"), ("boss", "2"), ("shop", "3")))
    file = tmp_path / "other.yaml"

    def told(*keys):
        gateway = {"name": "gateway", "user_config": {"api_keys": list(keys)}}
        file.write_text(yaml.safe_dump({"applications": [{"args": {"gateway": {"api_keys": [shop, boss]}}, "deployments": [gateway]}]}))
        caplog.clear()
        read(file)
        return caplog.messages

    (said,) = told(new, boss)
    assert (
        said
        == f"{file}: user_config of the gateway: its api_keys take the place of those in args; refused, as they are not among them: shop"
    )
    assert told(shop, boss, new) == []


def test_what_changes_for_one_backend_leaves_the_others_as_they_are_in_args():
    given = {
        "backends": {"mine": "mine:Encoder", "yours": "yours:Encoder"},
        "options": {"onnxruntime": {"threads": 2}, "torch": {"index": "exact", "state_bytes": 0}},
    }
    changes = {"backends": {"yours": "yours:Other"}, "options": {"torch": {"state_bytes": 5}}}
    changed = with_changes(parse({"encoder": given}), "encoder", changes, "a test").encoder
    assert changed.backends == {"mine": "mine:Encoder", "yours": "yours:Other"}
    assert changed.options == {"onnxruntime": {"threads": 2}, "torch": {"state_bytes": 5}}


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("encoder", {"batching": {"max_requests": 8}}),
        ("generator", {"beam": 5}),
        ("gateway", {"deadline_s": 1.0}),
        ("cache", {"ttl_s": 5.0}),
    ],
)
def test_what_cannot_change_while_it_runs_is_refused_before_it_is_deployed(section: str, changes: dict[str, object]):
    with pytest.raises(
        ConfigError, match=rf"has {next(iter(changes))}, which cannot change without a restart; put it under args.{section}"
    ):
        with_changes(Settings(), section, changes, "other.yaml: user_config")


KEY = {"name": "operator", "sha256": "0" * 64, "rights": ["operate"]}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "rec.example.org"])
def test_an_address_that_other_machines_reach_takes_keys_or_a_word(tmp_path, host):
    def read_with(gateway, host, instead=None):
        tree = {"http_options": {"host": host}, "applications": [{"args": {"gateway": gateway}}]}
        (tmp_path / "serve.yaml").write_text(yaml.safe_dump(tree))
        return read(tmp_path / "serve.yaml", instead)

    for file, instead in ((host, None), ("127.0.0.1", host)):
        with pytest.raises(ConfigError, match=rf"http_options\.host = {host} lets other machines in.*genrec keys new --name shop"):
            read_with({}, file, instead)
    read_with({"api_keys": [KEY]}, host)
    read_with({"allow_anonymous": True}, host)
    for own in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        read_with({}, own)
        read_with({}, host, own)


def test_the_application_is_refused_where_serve_listens_for_others_and_there_are_no_keys(tmp_path, monkeypatch, caplog):
    make_bundle(tmp_path / "tiny")
    tree = {"model_dir": str(tmp_path / "tiny")}
    monkeypatch.setattr("deployments.app._http_options", lambda: HTTPOptions(host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"http_options\.host = 0\.0\.0\.0 lets other machines in"):
        build(tree)
    build({**tree, "gateway": {"api_keys": [KEY]}})
    assert "allow_anonymous" not in caplog.text
    build({**tree, "gateway": {"allow_anonymous": True}})
    assert "gateway.allow_anonymous: a caller without a key may read histories and store events" in caplog.text
    monkeypatch.setattr("deployments.app._http_options", lambda: HTTPOptions(host="127.0.0.1"))
    build(tree)


def test_the_application_is_refused_where_gateways_would_speak_tls_which_haproxy_does_not_to_them(tmp_path, monkeypatch):
    make_bundle(tmp_path / "tiny")
    http = HTTPOptions(ssl_keyfile="key.pem", ssl_certfile="certificate.pem")
    monkeypatch.setattr("deployments.app._http_options", lambda: http)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(ConfigError, match=r"ssl_certfile .* plain HTTP; .* GENREC_HAPROXY_CERTIFICATE"):
        build({"model_dir": str(tmp_path / "tiny")})
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY")
    build({"model_dir": str(tmp_path / "tiny")})


def test_gateways_are_told_whether_their_machine_alone_reaches_them(tmp_path, monkeypatch):
    """By that they refuse callers without a key that call by a foreign name."""
    make_bundle(tmp_path / "tiny")
    told = []
    for host in ("127.0.0.1", "::1", "0.0.0.0", None):
        http = HTTPOptions(host=host) if host else None
        monkeypatch.setattr("deployments.app._http_options", lambda http=http: http)
        application = build({"model_dir": str(tmp_path / "tiny"), "gateway": {"allow_anonymous": True}})
        told.append(application._bound_deployment.init_kwargs["local"])  # noqa: SLF001 - Serve has no other door
    assert told == [True, True, False, False]


@pytest.mark.parametrize("gateway", [{"api_keys": [KEY]}, {"allow_anonymous": True}], ids=["keys", "anonymous"])
def test_not_every_caller_becomes_an_operator_by_the_way(gateway):
    settings = parse({"gateway": gateway})
    with pytest.raises(ConfigError, match="gateway leaves no api_keys and no allow_anonymous: every caller could operate"):
        with_changes(settings, "gateway", {"api_keys": [], "allow_anonymous": False}, "user_config of the gateway")
    for guarded in ({"api_keys": [], "allow_anonymous": True}, {"api_keys": [KEY], "allow_anonymous": False}):
        assert not with_changes(settings, "gateway", guarded, "user_config of the gateway").gateway.unguarded
    assert parse({}).gateway.unguarded


def test_serve_listens_where_it_is_told_to(tmp_path, monkeypatch):
    make_bundle(tmp_path / "shop")
    handed_over = []
    monkeypatch.setattr(serve_module.os, "execve", lambda command, arguments, _: handed_over.append(arguments))
    with pytest.raises(ConfigError, match=r"one_machine\.yaml: http_options\.host = 0\.0\.0\.0 lets other machines in"):
        serve_module.serve(ONE_MACHINE, model_dir=tmp_path / "shop", host="0.0.0.0")
    serve_module.serve(ONE_MACHINE, model_dir=tmp_path / "shop", host="127.0.0.2", port=free_port())
    ((*_, written),) = handed_over
    assert read_document(Path(written))["http_options"]["host"] == "127.0.0.2"
    Path(written).unlink()


@pytest.mark.parametrize(("within_s", "grace"), [(20, {}), (8, {"graceful_shutdown_timeout_s": 8}), (20, None)])
def test_a_handover_that_serve_would_not_wait_for_is_refused(tmp_path, within_s, grace):
    """`grace` None: the encoder's deployment is not listed, and has Serve's own time."""
    document = read_document(RAY_CONFIG)
    application = document["applications"][0]
    application["args"]["encoder"]["handover"] |= {"max_bytes": 1, "within_s": within_s}
    encoder = next(one for one in application["deployments"] if one["name"] == "encoder")
    if grace is None:
        application["deployments"].remove(encoder)
    else:
        encoder.update(grace)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    with pytest.raises(
        ConfigError, match=rf"within_s \({within_s}\) must be less than the encoder's graceful_shutdown_timeout_s \({within_s}\)"
    ):
        read(config)
    application["args"]["encoder"]["handover"]["max_bytes"] = 0
    config.write_text(yaml.safe_dump(document))
    read(config)


@pytest.mark.parametrize(
    ("made", "parameters", "section"),
    [
        (Recommender, ["beam"], DEFAULTS.generator),
        (Recommender, ["pool", "rank_pool", "deadline_s", "generation_deadline_s", "ranking_deadline_s"], DEFAULTS.gateway),
        (TierSettings, ["ttl_s", "stale_s", "negative_ttl_s", "hot_per_minute"], DEFAULTS.cache),
        (FrameworkController, ["retries", "probe_interval_s"], DEFAULTS.encoder),
        (Choice, ["selection", "returning"], DEFAULTS.encoder),
    ],
)
def test_what_is_made_without_a_configuration_has_the_configurations_defaults(made, parameters, section):
    own = inspect.signature(made).parameters
    assert {name: own[name].default for name in parameters} == {name: getattr(section, name) for name in parameters}


@pytest.mark.parametrize(
    ("tree", "within_s"),
    [({}, 30.0), ({"gateway": {"request_within_s": 3600.0}}, 3600.0), ({"zeromq": {"timeout_s": 300.0}}, 300.0)],
)
def test_the_longest_request_is_one_whose_last_computation_begins_as_it_ends(tree, within_s):
    settings = parse(tree)
    assert settings.longest_request_s >= within_s + max(settings.gateway.deadline_s, settings.gateway.generation_deadline_s)
