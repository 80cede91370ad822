"""The registry: name -> import string, for everything that is chosen by name.

A backend is named in the table below, by an entry point of an installed package (group ``genrec.backends``, name ``stage.name``), or in the
configuration (``encoder: {backends: {name: "module:Class"}}``). The configuration overrides an entry point, and an entry point the table.
The other tables stand here alone. Nothing is imported until it is asked for, so a table may name engines that are not installed.
"""

import importlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError, UnknownChoice

ENTRY_POINT_GROUP = "genrec.backends"

BACKENDS: Mapping[str, Mapping[str, str]] = {
    "encoder": {
        "tensorrt": "integrations.tensorrt.encoder:TensorRTEncoder",
        "onnxruntime": "integrations.onnx.encoder:OnnxRuntimeEncoder",
        "torch": "integrations.hstu.encoder:TorchEncoder",
        "torch_compiled": "integrations.hstu.encoder:CompiledTorchEncoder",
        "openvino": "integrations.openvino.encoder:OpenVinoEncoder",
        "triton": "integrations.hstu.kernels.encoder:TritonEncoder",
    },
    "ranker": {
        "tensorrt": "integrations.tensorrt.ranker:TensorRTRanker",
        "onnxruntime": "integrations.onnx.ranker:OnnxRuntimeRanker",
        "torch": "integrations.hstu.torch_ranker:TorchRanker",
        "openvino": "integrations.openvino.ranker:OpenVinoRanker",
    },
    "generator": {
        "vllm": "integrations.vllm.generator:VllmGenerator",
        "torch_beam": "integrations.torch_beam.generator:TorchBeamGenerator",
    },
}

INDEXES: Mapping[str, str] = {
    "exact": "cluster.nearest:NearestItems",
    "bf16": "integrations.index.bf16:Bf16Items",
    "cuda": "integrations.index.cuda:CudaItems",
    "faiss": "integrations.index.faiss:FaissItems",
}

MODELS: Mapping[str, str] = {
    "hstu": "integrations.hstu.model:HSTU",
    "sasrec": "integrations.hstu.sasrec:SASRec",
}

RANKERS: Mapping[str, str] = {
    "hstu": "integrations.hstu.ranker:HSTURanker",
}

DECODERS: Mapping[str, str] = {
    "llama": "integrations.decoder.model:SemanticIdDecoder",
}

DATASETS: Mapping[str, str] = {
    "ml-100k": "integrations.datasets.movielens:read_ml_100k",
    "ml-1m": "integrations.datasets.movielens:read_ml_1m",
    "ml-10m": "integrations.datasets.movielens:read_ml_10m",
    "ml-20m": "integrations.datasets.movielens:read_ml_20m",
    "ml-25m": "integrations.datasets.movielens:read_ml_25m",
    "ml-32m": "integrations.datasets.movielens:read_ml_32m",
    "ml-latest": "integrations.datasets.movielens:read_ml_latest",
    "ml-latest-small": "integrations.datasets.movielens:read_ml_latest_small",
    "table": "integrations.datasets.table:read_table",
}

EVENT_STORES: Mapping[str, str] = {
    "sqlite": "integrations.sqlite.driver:SQLiteDriver",
    "postgresql": "integrations.postgresql.driver:PostgreSQLDriver",
}

COMPILERS: Mapping[str, str] = {
    "onnx": "integrations.onnx.export:OnnxCompiler",
    "tensorrt": "integrations.tensorrt.build:TensorRTCompiler",
}

CONSTRUCTOR_ERRORS = (TypeError, ValueError, ConfigError, UnknownChoice)
"""What a backend's constructor raises at options that it does not take."""


def backends(stage: str, configured: Mapping[str, str] | None = None) -> dict[str, str]:
    """All backends of a stage, name -> import string: ours, then installed entry points, then the configuration's."""
    installed = (point for point in _installed() if point.name.startswith(f"{stage}."))
    table = {**BACKENDS.get(stage, {}), **{point.name.removeprefix(f"{stage}."): point.value for point in installed}, **(configured or {})}
    if not table:
        raise UnknownChoice("stage", stage, BACKENDS)
    return table


def contested() -> list[str]:
    """The entry points that have the name of another package's, which is used in their place, each in words."""
    used = {point.name: point for point in _installed()}
    return [
        f"entry point {point.name!r} of {_package(point)} ({point.value}) is not used: {_package(used[point.name])} has one of that name"
        for point in _installed()
        if point.value != used[point.name].value
    ]


def _installed() -> list[EntryPoint]:
    """The installed entry points, by name. Of several with one name the last is used: that of the package that is first in the alphabet."""
    last_first = sorted(_entry_points(), key=lambda point: (_package(point), point.value), reverse=True)
    return sorted(last_first, key=lambda point: point.name)


def _entry_points() -> EntryPoints:
    """Those of the installed packages. They are read again once a folder of packages has changed: that takes many milliseconds."""
    return _read(tuple((folder, folder.stat().st_mtime_ns) for folder in map(Path, sys.path) if folder.is_dir()))


@lru_cache(maxsize=1)
def _read(_folders: tuple[tuple[Path, int], ...]) -> EntryPoints:
    return entry_points(group=ENTRY_POINT_GROUP)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else ""


def misnamed() -> list[str]:
    """The installed entry points that belong to no stage, and add nothing."""
    return sorted(point.name for point in _entry_points() if point.name.partition(".")[0] not in BACKENDS)


def choose(what: str, table: Mapping[str, str], name: str) -> Any:
    """The object that `table` has under `name`, imported. Raises UnknownChoice with the names that the table has."""
    if name not in table:
        raise UnknownChoice(what, name, table)
    return resolve(table[name])


def refusal(import_string: str, options: Mapping[str, Any]) -> str:
    """Why the constructor of a backend does not take these options; "" where it does, or where that cannot be told here, as of a module
    that is not installed. Imports the backend's module.
    """
    made = None
    try:
        made = resolve(import_string)
        made(**options)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the module and the constructor are the backend's code
        if made is not None and isinstance(error, CONSTRUCTOR_ERRORS):
            return f"{type(error).__name__}: {error}"
    return ""


def absence(import_string: str) -> str:
    """Why a backend cannot be imported here; "" where it can. Imports its module."""
    try:
        resolve(import_string)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the module is the backend's code
        return f"{type(error).__name__}: {error}"
    return ""


def resolve(import_string: str) -> Any:
    """The object an import string ``module:name`` stands for. Raises ConfigError where the string or the module's content is wrong.

    An ImportError is left as it is: it says which package is missing.
    """
    module_name, _, attribute = import_string.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"import string {import_string!r} is not of the form 'module:name', as in 'my_package.encoder:MyEncoder'")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"module {module_name!r} has no {attribute!r} (import string {import_string!r})") from None
