"""The Serve config file: YAML read strictly, its applications' settings, and what Serve itself would refuse late or never."""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from cluster import registry
from cluster.autoscaling import QueuePolicy
from cluster.config import Settings, options_of, parse, require_keys, require_options, split_changes, with_changes
from cluster.errors import ConfigError, UnknownChoice
from cluster.serve_keys import SERVES_GRACE_S, ServeApplication, ServeFile
from cluster.stages import STAGES
from cluster.traffic import api_keys, router_keys
from cluster.validation import validated

IMPORT_PATH = "deployments.app:build"
"""What makes an application of a Serve config file one of genrec's."""
logger = logging.getLogger(__name__)


def read(path: Path, host: str | None = None, *, tries_options: bool = False) -> Settings:
    """Settings from the first application's ``args`` in a Serve config file such as ``ray_config.yaml``; genrec's other applications in the
    file are checked, too. `host`: where it is to listen, in place of the file's own. `tries_options`: also import the backends that are not
    genrec's and are in an order or have options, and log a warning for each of an order that cannot be imported here, for each constructor
    that does not take its options, and for each API key that expires soon.
    """
    document = read_document(path)
    first, *others = document["applications"]
    where = f"{path}: application {first.get('name')!r}" if others else str(path)
    settings = _application(document, first, host, where, tries_options=tries_options)
    doors = {settings.zeromq.address: first.get("name")} if settings.zeromq else {}
    for other in others:
        if other.get("import_path") == IMPORT_PATH:
            where = f"{path}: application {other.get('name')!r}"
            door = _application(document, other, host, where, tries_options=tries_options).zeromq
            if door and door.address in doors:
                raise ConfigError(f"{where}: zeromq.address {door.address} is that of {doors[door.address]!r}, too; give each its own")
            if door:
                doors[door.address] = other.get("name")
    return settings


def _application(document: dict[str, Any], application: dict[str, Any], host: str | None, where: str, *, tries_options: bool) -> Settings:
    of_file = {key: value for key, value in document.items() if not str(key).startswith("x-")}
    validated(ServeFile, of_file, where, dict.fromkeys(Settings.model_fields, "applications[0].args"))
    validated(ServeApplication, application, where, dict.fromkeys(Settings.model_fields, "args"))
    settings = parse(application.get("args") or {}, where)
    require_keys(settings, host or (document.get("http_options") or {}).get("host"), where)
    require_options(settings, where)
    sources, deployments = [(where, settings)], application.get("deployments") or []
    keys = where, settings.gateway.api_keys
    for deployment in deployments:
        if deployment["name"] not in settings.deployments:
            unknown = UnknownChoice("deployment", deployment["name"], settings.deployments)
            raise ConfigError(f"{where}: with placement {settings.placement}, {unknown}")
        stage, changes = deployment.get("name"), deployment.get("user_config")
        if stage in STAGES and changes:
            source = f"{where}: user_config of the {stage}"
            sources.append((source, with_changes(settings, stage, changes, source)))
        if stage == "gateway" and changes:
            source = f"{where}: user_config of the gateway"
            for name, changed in split_changes(settings, changes, source).items():
                sources.append((source, with_changes(settings, name, changed, source)))
                if name == "gateway":
                    keys = source, sources[-1][1].gateway.api_keys
        _check_single(deployment, where)
        _check_policy(deployment, where)
        _check_router(deployment, where)
    _check_grace(settings, deployments, where)
    if tries_options:
        _warn_of_backends(sources)
        for warning in api_keys.expire_soon(keys[1]):
            logger.warning("%s: %s", keys[0], warning)
    return settings


def _warn_of_backends(sources: Iterable[tuple[str, Settings]]) -> None:
    """Log a warning for each backend that is not genrec's and cannot be imported or does not take its options, for its first source. What
    their modules print goes to stderr: stdout is the command's.
    """
    told = set[str]()
    for source, settings in sources:
        with redirect_stdout(sys.stderr):
            found = [*_absences(settings), *_refusals(settings)]
        for said in found:
            if said not in told:
                told.add(said)
                logger.warning("%s: %s", source, api_keys.masked(said))


def _absences(settings: Settings) -> Iterator[str]:
    for stage in STAGES:
        engines = settings.engines(stage)
        table = registry.backends(stage, engines.backends)
        for name in engines.in_order():
            if table[name] != registry.BACKENDS[stage].get(name) and (absence := registry.absence(table[name])):
                cure = "install it, or put its directory into PYTHONPATH, wherever it is to serve"
                yield f"{stage} {name} ({table[name]}) cannot be imported here: {absence}; {cure}: without it the next of the order serves"


def _refusals(settings: Settings) -> Iterator[str]:
    for what, import_string, options in options_of(settings, ours=False):
        if refusal := registry.refusal(import_string, options):
            yield f"{what}: {refusal}; it will not be available"


def _check_single(deployment: dict[str, Any], where: str) -> None:
    """Raises ConfigError at more than one switchboard, between which erasures and switches would be lost, and at a user_config that the
    switchboard or the door does not take.
    """
    name, replicas = deployment["name"], deployment.get("num_replicas")
    if name == "switchboard" and (deployment.get("autoscaling_config") is not None or replicas not in (None, 1)):
        given = f"num_replicas {replicas}" if replicas not in (None, 1) else "an autoscaling_config"
        raise ConfigError(f"{where}: the switchboard has {given}; all replicas follow a single one: give it num_replicas: 1, or neither")
    if name in ("switchboard", "zeromq") and deployment.get("user_config") is not None:
        raise ConfigError(f"{where}: {name} has a user_config, and nothing of it changes without a restart; put its settings under args")


def _check_policy(deployment: dict[str, Any], where: str) -> None:
    """Raises ConfigError at options that our autoscaling policy does not take: Serve's controller would find out much later."""
    policy = (deployment.get("autoscaling_config") or {}).get("policy") or {}
    if policy.get("policy_function") == "cluster.autoscaling:QueuePolicy":
        try:
            QueuePolicy(**policy.get("policy_kwargs") or {})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: autoscaling policy of {deployment.get('name')}: {error}") from error


def _check_router(deployment: dict[str, Any], where: str) -> None:
    """Raises ConfigError at keys that one of our request routers does not take: where Serve makes it, in a gateway, calls wait for it."""
    router = deployment.get("request_router_config") or {}
    if (name := str(router.get("request_router_class"))) in router_keys.ROUTERS:
        try:
            router_keys.taken(name, router.get("request_router_kwargs") or {})
        except ConfigError as error:
            raise ConfigError(f"{where}: request_router_kwargs of {deployment.get('name')}: {error}") from error


def _check_grace(settings: Settings, deployments: Sequence[dict[str, Any]], where: str) -> None:
    """Raises ConfigError where Serve would end an encoder that hands its states over, by its own time where none is listed."""
    encoder = next((one for one in deployments if one["name"] == "encoder"), {})
    handover, grace_s = settings.encoder.handover, encoder.get("graceful_shutdown_timeout_s", SERVES_GRACE_S)
    if handover.max_bytes and handover.within_s >= grace_s:
        raise ConfigError(
            f"{where}: args.encoder.handover.within_s ({handover.within_s:g}) must be less than the encoder's graceful_shutdown_timeout_s "
            f"({grace_s:g}), after which Serve kills it; requests under way take their part of that, too"
        )


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: YAML would silently drop the first. A value that cannot be, as a date that there is
    not, is told with its line.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            problem = f"{node.value!r:.60} is none of YAML's values ({error}); put it in quotes where it is text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                problem = f"the key {key.value!r} stands there twice, and only the last would count; make one of both"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add(key.value)
        return node


def read_document(path: Path) -> dict[str, Any]:
    """A whole Serve config file, which has one application at least. Raises ConfigError."""
    try:
        document = _UniqueKeys(path.read_text()).get_single_data()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a Serve config file, or write one: genrec init DIRECTORY") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    match document:
        case {"applications": [dict(), *others]} if all(isinstance(one, dict) for one in others):
            return dict(document)
        case _:
            raise ConfigError(f"{path} is not a Serve config file: it has no `applications: [{{name: ..., args: ...}}]`")
