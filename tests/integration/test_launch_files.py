"""The launch files are what the tools that read them expect, and agree with this repository."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any

import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr as read_by_the_autoscaler
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from cluster import profile
from cluster.addresses import is_loopback
from cluster.config import Settings, parse, require_keys
from cluster.config_file import read_document
from cluster.errors import ConfigError
from cluster.events.ledger import split_ledger
from deployments.cli.init import filled_in
from deployments.shipped import LAUNCH, RAY_CONFIG
from integrations.vllm.library import CPU_BUILD, ITS_PACKAGE
from tests.documents import DOCUMENTS, ROOT

KUBERNETES = "1.34"
DOCKERFILES = ["Dockerfile", "Dockerfile.gpu"]
BIN = "/usr/local/bin"
RAY_UP_FILES = ["ray_up.yaml", "ray_up_on_premise.yaml"]
HARD_LIMIT = getrlimit(RLIMIT_NOFILE)[1]
PREPARED = 'env=$(genrec cluster env) && eval "$env" && ray start --'

# KubeRay's custom resource RayService (ray.io/v1), as far as the manifest uses it: a field's name and its type; "?": may be left out.
# We know of no package of PyPI that carries its schema; this is written from reading KubeRay's API types.
RAY_SERVICE = {
    "serveConfigV2": str,
    "excludeHeadPodFromServeSvc?": bool,
    "rayClusterDeletionDelaySeconds?": int,
    "upgradeStrategy?": {"type": str},
    "rayClusterConfig": {
        "rayVersion?": str,
        "authOptions?": {"mode": {"token", "disabled"}},
        "enableInTreeAutoscaling?": bool,
        "autoscalerOptions?": {
            "version?": {"v1", "v2"},
            "upscalingMode?": {"Default", "Aggressive", "Conservative"},
            "idleTimeoutSeconds?": int,
            "resources?": dict,
            "securityContext?": {"allowPrivilegeEscalation?": bool, "capabilities?": {"drop?": list}},
        },
        "gcsFaultToleranceOptions?": {
            "redisAddress?": str,
            "redisUsername?": {"value?": str, "valueFrom?": dict},
            "redisPassword?": {"value?": str, "valueFrom?": dict},
            "externalStorageNamespace?": str,
        },
        "headGroupSpec": {"rayStartParams": {str: str}, "template": "PodTemplateSpec", "serviceType?": str, "resources?": {str: str}},
        "workerGroupSpecs?": [
            {
                "groupName": str,
                "replicas?": int,
                "minReplicas": int,
                "maxReplicas": int,
                "idleTimeoutSeconds?": int,
                "numOfHosts?": int,
                "rayStartParams": {str: str},
                "resources?": {str: str},
                "template": "PodTemplateSpec",
            }
        ],
    },
}


def misfits(value: Any, shape: Any, path: str = "spec") -> Iterator[str]:
    """Where `value` is not of the shape, which is a type, the allowed values, or a dictionary or list of shapes."""
    match shape:
        case "PodTemplateSpec":
            yield from (f"{path}: {problem}" for problem in problems_of_pod(value))
        case type() if type(value) is not shape:
            yield f"{path} = {value!r} is not a {shape.__name__}"
        case set() if value not in shape:
            yield f"{path} = {value!r} is none of {shape}"
        case [item]:
            for index, one in enumerate(value):
                yield from misfits(one, item, f"{path}[{index}]")
        case dict() if str in shape:
            yield from (f"{path}.{key} is not text: {one!r}" for key, one in value.items() if not isinstance(one, shape[str]))
        case dict():
            yield from misfits_of_fields(value, shape, path)


def misfits_of_fields(value: Mapping[str, Any], shape: Mapping[str, Any], path: str) -> Iterator[str]:
    fields = {name.removesuffix("?"): inner for name, inner in shape.items()}
    yield from (f"{path}.{name} is unknown" for name in value if name not in fields)
    yield from (f"{path}.{name} is missing" for name in shape if not name.endswith("?") and name not in value)
    for name in fields.keys() & value.keys():
        yield from misfits(value[name], fields[name], f"{path}.{name}")


def problems_of_pod(template: Mapping[str, Any]) -> list[str]:
    """What Kubernetes' schema has against a pod template, asked as a Pod of its own."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", **template.get("metadata", {})}, "spec": template["spec"]}
    try:
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / "kuberay.yaml").read_text()))


def ray_service() -> dict[str, Any]:
    return next(one["spec"] for one in manifests() if one["kind"] == "RayService")


def groups() -> dict[str, dict[str, Any]]:
    cluster = ray_service()["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"], **{group["groupName"]: group for group in cluster["workerGroupSpecs"]}}


def pods() -> dict[str, dict[str, Any]]:
    return {name: group["template"]["spec"] for name, group in groups().items()}


def settings_of(serve_config: dict[str, Any]) -> Settings:
    """What Ray Serve and genrec make of a Serve configuration; both raise at what they don't know."""
    ServeDeploySchema.model_validate(serve_config)
    return parse(serve_config["applications"][0]["args"])


def deployments_of(serve_config: dict[str, Any]) -> set[str]:
    return {one["name"] for one in serve_config["applications"][0]["deployments"]}


@pytest.mark.parametrize("manifest", manifests(), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_kubernetes_takes_each_manifest(manifest):
    if manifest["kind"] == "RayService":
        assert manifest["apiVersion"] == "ray.io/v1"
        assert list(misfits(manifest["spec"], RAY_SERVICE)) == []
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_checks_of_the_ray_service_find_what_is_wrong():
    spec = ray_service()
    spec["rayClusterConfig"]["autoscalerOptions"]["version"] = "v3"
    spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    del spec["rayClusterConfig"]["workerGroupSpecs"][0]["minReplicas"]
    spec["rayClusterConfig"]["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    found = "\n".join(misfits(spec, RAY_SERVICE))
    assert all(part in found for part in ("'v3' is none of", "num-cpus is not text", "[0].minReplicas is missing", "readynessProbe"))


def test_the_ray_service_deploys_an_application_that_serve_and_genrec_take():
    config = yaml.safe_load(ray_service()["serveConfigV2"])
    settings = settings_of(config)
    assert settings.model_dir.is_absolute()
    assert deployments_of(config) == {"gateway", "encoder", "generator", "ranker", "switchboard"}


def test_every_pod_has_the_fast_profile_and_the_models():
    for name, pod in pods().items():
        container = pod["containers"][0]
        environment = {one["name"]: one.get("value") for one in container["env"]}
        paths = {"RAY_SERVE_HAPROXY_BINARY_PATH": f"{BIN}/genrec-haproxy", profile.PROGRAM: f"{BIN}/haproxy"}
        expected = {name: value for name, value in profile.fast().items() if name not in profile.TOKEN} | paths
        assert expected.items() <= environment.items(), name
        model_dir = settings_of(yaml.safe_load(ray_service()["serveConfigV2"])).model_dir
        assert any(model_dir.is_relative_to(mount["mountPath"]) for mount in container["volumeMounts"]), name
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}, name


def test_rays_object_store_fits_into_the_shared_memory_of_each_pod():
    for name, group in groups().items():
        (shm,) = [volume["emptyDir"] for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shm"]
        room = int(shm["sizeLimit"].removesuffix("Gi")) * 2**30
        assert room / 2 < int(group["rayStartParams"]["object-store-memory"]) < room * 0.95, name
        mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in mounts, name


def test_the_pods_of_gateways_make_the_directory_of_the_ledger_that_they_share():
    """Where it is not there, the ledger is one file, to which several machines add over a network: lines may be lost."""
    url = settings_of(yaml.safe_load(ray_service()["serveConfigV2"])).event_store_url
    (makes,) = pods()["cpu"]["initContainers"]
    assert makes["command"] == ["mkdir", "--parents", str(split_ledger(url)[1])]
    assert makes["volumeMounts"] == pods()["cpu"]["containers"][0]["volumeMounts"]


def test_a_pod_without_probes_of_its_own_has_an_image_with_what_the_operators_call():
    """KubeRay before 1.6 gives it a readiness and a liveness probe that run wget in it."""
    containers = [pod["containers"][0] for pod in pods().values()]
    images = {one["image"] for one in containers if not {"readinessProbe", "livenessProbe"} <= one.keys()}
    assert images == {"genrec:cpu"}
    for name in DOCKERFILES:
        assert re.search(r"apt-get install [^&]*\bwget\b", (LAUNCH / name).read_text()), name


def test_an_image_with_vllms_cpu_build_has_the_library_that_it_loads():
    images = {name: (LAUNCH / name).read_text() for name in DOCKERFILES}
    on_cpus = {name for name, text in images.items() if CPU_BUILD in text}
    assert on_cpus == {"Dockerfile"}
    assert all(re.search(rf"apt-get install [^&]*\b{ITS_PACKAGE}\b", images[name]) for name in on_cpus)


def test_what_listens_for_other_machines_has_keys_or_is_refused():
    ours = [yaml.safe_load((LAUNCH / name).read_text()) for name in ("one_machine.yaml", "ray_config.yaml")]
    assert [is_loopback(config["http_options"]["host"]) for config in ours] == [True, True]
    config = yaml.safe_load(ray_service()["serveConfigV2"])
    with pytest.raises(ConfigError, match=r"genrec keys new --name shop"):
        require_keys(settings_of(config), config["http_options"]["host"])
    for name in DOCKERFILES:  # the file within must have keys, or `genrec serve` refuses it
        assert '"--host", "0.0.0.0"' in (LAUNCH / name).read_text()


def test_ray_asks_for_a_token_wherever_it_starts():
    assert ray_service()["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    for name in (*RAY_UP_FILES, "genrec.service"):
        assert "RAY_AUTH_MODE=token" in (LAUNCH / name).read_text(), name
    starts = {
        document.name: list(starts_of_ray(document.read_text())) for document in [*DOCUMENTS, *LAUNCH.iterdir()] if document.is_file()
    }
    assert {name: lines for name, lines in starts.items() if any(not guarded for _, guarded in lines)} == {}
    assert sum(map(len, starts.values())) > 5


def starts_of_ray(text: str) -> Iterator[tuple[str, bool]]:
    """The lines that start Ray or deploy to it, and whether token authentication stands before that."""
    for block in re.split(r"\n(?=```|\w+_commands:)|\n\s*\n", text):
        guarded = False
        for line in block.splitlines():
            guarded |= "RAY_AUTH_MODE=token" in line or "genrec cluster env" in line
            if re.search(r"^[^`]*(ray start --|serve deploy \w)", line):
                yield line, guarded


def test_the_files_for_ray_up_ask_for_the_same_configuration():
    asked = ("absolute model_dir", "events.url that every node reaches", "ledger of erasures", "genrec keys new", "`host: 0.0.0.0`")
    assert all(one in (LAUNCH / name).read_text() for name in RAY_UP_FILES for one in asked)


@pytest.mark.parametrize("file", [LAUNCH / name for name in RAY_UP_FILES] + [ROOT / "docs/deploy.md"], ids=lambda file: file.name)
def test_where_nodes_are_started_the_databases_password_is_told(file: Path):
    """Gateways inherit it from `ray start`; `serve deploy` does not pass it on."""
    assert re.search(r"PGPASSWORD.*?~/\.pgpass", file.read_text(), re.DOTALL)


def test_no_pod_is_root_and_strangers_reach_the_api_alone():
    for name, pod in pods().items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert [one["securityContext"]["capabilities"]["drop"] for one in pod["containers"]] == [["ALL"]], name
        assert [one["securityContext"]["capabilities"]["drop"] for one in pod.get("initContainers", [])] in ([], [["ALL"]]), name
        assert pod.get("automountServiceAccountToken", True) is (name == "head"), name  # the head's autoscaler asks Kubernetes for pods
    assert ray_service()["rayClusterConfig"]["autoscalerOptions"]["securityContext"] == pods()["head"]["containers"][0]["securityContext"]
    policy = next(one["spec"] for one in manifests() if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", "genrec"))
    labels = [group["template"]["metadata"]["labels"] for group in groups().values()]
    assert all(policy["podSelector"]["matchLabels"].items() <= one.items() for one in labels)
    assert [rule["ports"] for rule in policy["ingress"] if "from" not in rule] == [[{"port": 8000}]]


def test_the_pod_that_takes_the_model_is_confined_as_the_others_are():
    (overrides,) = re.findall(r"--overrides='(.*?)'", (ROOT / "docs/deploy.md").read_text())
    pod, head = json.loads(overrides)["spec"], pods()["head"]
    assert problems_of_pod({"spec": pod}) == []
    assert pod["securityContext"] == head["securityContext"]
    assert [one["securityContext"] for one in pod["containers"]] == [head["containers"][0]["securityContext"]]


def test_a_drain_leaves_a_pod_of_each_group_and_does_not_wait_for_ever():
    """An eviction takes one ready pod more than the budget keeps, and a pod with a replica is ready: each of the least pods needs one."""
    cluster = ray_service()["rayClusterConfig"]
    kinds = read_by_the_autoscaler({"metadata": {"name": "genrec", "namespace": "default"}, "spec": cluster})["available_node_types"]
    budgets = [one["spec"] for one in manifests() if one["kind"] == "PodDisruptionBudget"]
    for name, group in groups().items():
        labels = {**group["template"]["metadata"]["labels"], "ray.io/group": name}
        kept = [one["minAvailable"] for one in budgets if one["selector"]["matchLabels"].items() <= labels.items()]
        if name == "head":
            assert kept == []
            continue
        assert kept == [group["minReplicas"] - 1] != [0]
        elsewhere = {resource for kind, of in kinds.items() if kind != name for resource in of["resources"]}
        (own,) = kinds[name]["resources"].keys() - elsewhere
        assert asked_at_least()[own] > kinds[name]["resources"][own] * (group["minReplicas"] - 1)


def asked_at_least() -> Counter[str]:
    """How much of each resource the application's replicas take together while they are fewest."""
    asked: Counter[str] = Counter()
    for one in deployed_on_kubernetes():
        replicas = one["num_replicas"] if "num_replicas" in one else one["autoscaling_config"]["min_replicas"]
        for resource, each in taken_by_one(one).items():
            asked[resource] += replicas * each
    return asked


def deployed_on_kubernetes() -> list[dict[str, Any]]:
    return yaml.safe_load(ray_service()["serveConfigV2"])["applications"][0]["deployments"]


def taken_by_one(deployment: Mapping[str, Any]) -> dict[str, float]:
    options = deployment["ray_actor_options"]
    return {"GPU": options.get("num_gpus", 0), **options.get("resources", {})}


def test_the_fewest_replicas_of_a_stage_do_not_fit_on_one_pod_together():
    cluster = ray_service()["rayClusterConfig"]
    kinds = read_by_the_autoscaler({"metadata": {"name": "genrec", "namespace": "default"}, "spec": cluster})["available_node_types"]
    for one in deployed_on_kubernetes():
        if one["name"] == "switchboard":  # there is one
            continue
        fewest = one["autoscaling_config"]["min_replicas"]
        together = {resource: fewest * each for resource, each in taken_by_one(one).items() if each}
        room = any(all(kind["resources"].get(name, 0) >= taken for name, taken in together.items()) for kind in kinds.values())
        assert one.get("max_replicas_per_node", fewest) < fewest or not room, one["name"]


def test_claims_and_services_that_pods_name_are_in_the_manifest():
    names = {(one["kind"], one["metadata"]["name"]) for one in manifests()}
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for pod in pods().values() for volume in pod["volumes"] if "emptyDir" not in volume
    }
    assert {("PersistentVolumeClaim", claim) for claim in claims} <= names
    host, _, port = ray_service()["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"].partition(":")
    service = next(one for one in manifests() if (one["kind"], one["metadata"]["name"]) == ("Service", host))
    assert service["spec"]["ports"][0]["port"] == int(port)


def test_no_file_has_an_order_for_the_decoder_which_depends_on_the_machine():
    configs = [read_document(RAY_CONFIG), read_document(LAUNCH / "one_machine.yaml"), yaml.safe_load(ray_service()["serveConfigV2"])]
    assert [settings_of(config).generator.order for config in configs] == [[], [], []]


def test_one_machine_serves_every_stage_in_the_gateway():
    config = yaml.safe_load((LAUNCH / "one_machine.yaml").read_text())
    settings = settings_of(config)
    assert (settings.placement, settings.cache.l2, settings.encoder.batching.max_wait_ms) == ("colocated", "off", 0.0)
    assert not deployments_of(config) & {"encoder", "generator", "ranker"}


@pytest.mark.parametrize("name", RAY_UP_FILES)
def test_ray_up_takes_the_file(name: str):
    prepared = prepare_config(yaml.safe_load((LAUNCH / name).read_text()))
    validate_config(prepared)
    assert prepared["available_node_types"][prepared["head_node_type"]]


@pytest.mark.parametrize("name", RAY_UP_FILES)
def test_ray_up_prepares_every_node_before_ray_starts_on_it(name: str):
    config = yaml.safe_load((LAUNCH / name).read_text())
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        (start,) = [command for command in commands if "ray start" in command]
        assert PREPARED in start
        options = re.findall(r"(--[\w-]+)", start[start.index("ray start") :])
        known = subprocess.run([beside("ray"), "start", "--help"], capture_output=True, text=True, check=True).stdout
        assert [option for option in options if option not in known] == []
        assert "--object-manager-port=8076" in start, "else Ray chooses one, and a firewall between the nodes cannot name it"
    for command in [*config["setup_commands"], *config["head_start_ray_commands"], *config["worker_start_ray_commands"]]:
        subprocess.run(["bash", "-n", "-c", command], check=True)


@pytest.mark.parametrize("name", RAY_UP_FILES)
def test_ray_up_again_installs_a_newer_wheel_of_the_same_version_and_what_it_needs(name: str, tmp_path: Path):
    home = tmp_path / "genrec"
    venv.create(home / ".venv")
    pip, python = home / ".venv/bin/pip", home / ".venv/bin/python"
    pip.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pip --python {shlex.quote(str(python))} "$@"\n')
    pip.chmod(0o755)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    install = setup_command(name, "genrec-*.whl")

    def installed() -> dict[str, str]:
        subprocess.run(["bash", "-c", install], env={**os.environ, **offline, "HOME": str(tmp_path)}, check=True)
        script = "import importlib.metadata as m, json; print(json.dumps({d.name: d.metadata['Summary'] for d in m.distributions()}))"
        return json.loads(subprocess.run([python, "-c", script], capture_output=True, check=True).stdout)

    write_wheel(home, "genrec", "0.1.0", "before")
    assert installed() == {"genrec": "before"}
    left = write_wheel(home, "genrec", "0.0.9", "left from long ago")
    os.utime(left, (0, 0))
    write_wheel(tmp_path, "needed", "1.0", "new here")
    write_wheel(home, "genrec", "0.1.0", "after", "Requires-Dist: needed")
    assert installed() == {"genrec": "after", "needed": "new here"}


@pytest.mark.parametrize("name", RAY_UP_FILES)
@pytest.mark.parametrize(("status", "extra"), [(0, "gpu"), (9, "cpu")], ids=["a driver", "the program without a driver"])
def test_ray_up_installs_for_a_gpu_where_a_driver_finds_one(name: str, status: int, extra: str, tmp_path: Path):
    home = tmp_path / "genrec"
    write_commands(home / ".venv/bin", pip='echo "$@"')
    write_commands(tmp_path, **{"nvidia-smi": f"echo a word; exit {status}"})
    (home / "genrec-0.1.0-py3-none-any.whl").touch()
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = setup_command(name, "genrec-*.whl")
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"install --quiet genrec-0.1.0-py3-none-any.whl[{extra},postgresql,redis]"


def test_every_machine_that_ray_rents_has_an_image_that_the_operator_names():
    """Ray's own for AWS has a glibc that no wheel of torch takes."""
    kinds = yaml.safe_load((LAUNCH / "ray_up.yaml").read_text())["available_node_types"]
    named = [kind["node_config"].get("ImageId") for kind in kinds.values()]
    assert re.findall(r"ImageId: (\S+) +# <-", (LAUNCH / "ray_up.yaml").read_text()) == named


@pytest.mark.parametrize("there", [True, False], ids=["an image with pipx", "an image without"])
def test_ray_up_brings_uv_to_an_image_that_has_neither_it_nor_pip(there: bool, tmp_path: Path):
    write_commands(tmp_path / "later", pipx='echo pipx "$@"')
    brings = f'case "$*" in *install*pipx) /bin/cp {tmp_path}/later/pipx {tmp_path}/pipx;; esac'
    write_commands(tmp_path, sudo='exec "$@"', **{"apt-get": brings}, **({"pipx": 'echo pipx "$@"'} if there else {}))
    script, environment = setup_command("ray_up.yaml", "install uv"), {"PATH": str(tmp_path)}
    done = subprocess.run(["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "pipx install uv\n"


def setup_command(name: str, part: str) -> str:
    """The one command with this part by which `ray up` prepares a node."""
    (command,) = [command for command in yaml.safe_load((LAUNCH / name).read_text())["setup_commands"] if part in command]
    return command


def write_commands(directory: Path, **scripts: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, script in scripts.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)


def write_wheel(directory: Path, name: str, version: str, summary: str, *lines: str) -> Path:
    """A wheel without any code, told from others of its version by its summary."""
    path, info = directory / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Summary: {summary}", *lines, ""])
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def test_cluster_env_prints_what_a_shell_evaluates_to_the_profile():
    script = f"{evaluated('--profile fast')} && env -0"
    found = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode().split("\0")
    assert {f"{name}={value}" for name, value in profile.fast().items()} <= set(found)


@pytest.mark.parametrize(
    ("limits", "soft"),
    [("ulimit -S -n 256", min(HARD_LIMIT, 65536)), ("ulimit -n 512", 512)],
    ids=["a login's soft limit", "a hard one that is lower than what is wanted"],
)
def test_cluster_env_raises_the_limit_of_open_files_as_far_as_the_system_lets_it(limits: str, soft: int):
    script = f"{limits}; {evaluated('--profile default')} && ulimit -S -n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, "ulimit" in done.stderr) == (f"{soft}\n", False)


@pytest.mark.parametrize(
    ("arguments", "program", "status", "said"),
    [
        ("", "genrec", 1, "GENREC_HAPROXY_BODY_S is 'x'"),
        ("--profile quick", "genrec", 2, "quick"),
        ("", "genrec-that-is-not-installed", 127, "genrec-that-is-not-installed"),
    ],
    ids=["a refusal", "a mistake in the command", "no such command"],
)
def test_no_node_starts_where_cluster_env_fails(arguments: str, program: str, status: int, said: str):
    script, environment = f"{evaluated(arguments, program)} && echo started", {**os.environ, "GENREC_HAPROXY_BODY_S": "x"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


def evaluated(arguments: str, program: str = "genrec") -> str:
    """How documents and launch files have a shell take what `genrec cluster env` prints."""
    return f'env=$({shlex.quote(beside(program))} cluster env {arguments}) && eval "$env"'


def test_every_command_that_starts_a_node_stops_where_cluster_env_fails():
    texts = {file: file.read_text() for file in [*DOCUMENTS, *LAUNCH.iterdir()] if file.is_file()}
    starts = {file: re.findall(r"ray start --(?:head|address)", text) for file, text in texts.items()}
    assert sum(map(len, starts.values())) > 5
    assert [file.name for file, text in texts.items() if text.count(PREPARED) != len(starts[file])] == []


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_copies_what_exists_and_installs_extras_that_exist(name: str, tmp_path: Path):
    steps = DockerfileParser(path=str(tmp_path))
    steps.content = (LAUNCH / name).read_text()
    instructions = [(step["instruction"], step["value"]) for step in steps.structure if step["instruction"] != "COMMENT"]
    assert instructions[0][0] == "FROM"
    sources = [source for kind, value in instructions if kind == "COPY" for source in value.split()[:-1]]
    assert sources[0] == "genrec-*.whl"
    assert [source for source in sources[1:] if not (LAUNCH / source).is_file()] == []
    extras = re.findall(r'genrec-\*\.whl[^"]*\)\[([\w,-]+)\]"', " ".join(value for kind, value in instructions if kind == "RUN"))
    assert extras
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(",".join(extras).split(",")) <= set(project["optional-dependencies"])
    command = json.loads(dict(instructions)["CMD"])
    assert command[:2] == ["genrec", "serve"]
    assert str(Path(command[-1]).relative_to("/app")) in sources
    for kind, value in instructions:
        if kind == "RUN":
            subprocess.run(["sh", "-n", "-c", value], check=True)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_the_newest_of_the_wheels_beside_it(name: str, tmp_path: Path):
    (install,) = re.findall(r"^RUN (pip install .*genrec-.*)$", (LAUNCH / name).read_text(), re.MULTILINE)
    write_wheel(tmp_path, "genrec", "0.1.0", "newest")
    os.utime(write_wheel(tmp_path, "genrec", "0.2.0", "left from long ago"), (0, 0))
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$@"\n')
    pip.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-ec", install], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("install genrec-0.1.0-py3-none-any.whl[")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_the_paths_by_which_kuberay_starts_haproxy(name: str, tmp_path: Path):
    (links,) = re.findall(r"^RUN (ln -s .*\n.*)$", (LAUNCH / name).read_text(), re.MULTILINE)
    python = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", links.replace(BIN, str(tmp_path))], env=python, check=True)
    assert (tmp_path / "genrec-haproxy").resolve() == profile.STARTER.resolve()
    command, environment = [tmp_path / "genrec-haproxy", "-v"], {profile.PROGRAM: str(tmp_path / "haproxy")}
    assert b"HAProxy" in subprocess.run(command, env=environment, capture_output=True, check=True).stdout


def test_compose_builds_and_mounts_what_exists():
    services = yaml.safe_load((LAUNCH / "compose.yaml").read_text())["services"]
    build = services["genrec"]["build"]
    assert build["context"] == "."
    assert (LAUNCH / build["dockerfile"]).is_file()
    mounts = dict(mount.split(":")[:2] for mount in services["genrec"]["volumes"])
    assert all((LAUNCH / source).is_file() for source in mounts if source.endswith(".yaml"))
    assert services["genrec"]["command"][-1] == mounts["./one_machine.yaml"]
    assert set(services["genrec"]["depends_on"]) <= set(services)
    assert all("healthcheck" in services[name] for name in services["genrec"]["depends_on"])


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path):
    text = filled_in((LAUNCH / "genrec.service").read_text(), tmp_path)
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read_string(text)
    start = shlex.split(unit["Service"]["ExecStart"])
    assert start[0] == beside("genrec")
    assert (LAUNCH / start[-1]).is_file()
    assert unit["Service"]["WorkingDirectory"] == unit["Service"]["ReadWritePaths"] == str(tmp_path)
    if (systemd := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not on PATH; the unit's sections and paths were checked, its keys were not")
    there = tmp_path / "genrec.service"
    there.write_text(text.replace(start[0], sys.executable))
    done = subprocess.run([systemd, "verify", str(there)], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    complaints = [line for line in done.stderr.splitlines() if "genrec.service" in line]
    assert (done.returncode, complaints) == (0, [])


def test_the_unit_makes_the_devices_of_cuda_which_its_user_may_not_and_starts_without_a_gpu_too():
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read_string(text := (LAUNCH / "genrec.service").read_text())
    assert unit["Service"]["NoNewPrivileges"] == "yes"  # with which CUDA's own call of the setuid program is in vain
    begins = [line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStartPre=")]
    # "+": as root; "-": it may fail, or not be there
    assert begins == ["-+/usr/bin/nvidia-modprobe -c 0", "-+/usr/bin/nvidia-modprobe -c 0 -u"]


def beside(command: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).with_name(command))
