"""The files of `genrec bench`: a measurement as one JSON object, and the history of its comparisons as JSON lines.

    {"schema": 1, "machine": {}, "versions": {}, "scenario": {}, "samples": {"end_to_end_ms": [...]}, "figures": {}, "targets": {}}

Only `schema` and `samples` must be there, so that any program can write a measurement.
"""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from cluster.disk import naming
from cluster.distributions import version_of
from cluster.errors import DataError
from cluster.regression import Verdict

SCHEMA = 1
PACKAGES = ("genrec", "ray", "numpy", "torch", "onnxruntime", "tensorrt", "vllm")
Cost = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


RecordT = TypeVar("RecordT", bound=_Record)


class Scenario(_Record):
    """What was measured. Measurements compare where `name` and `workload` are the same; `source` is the URL or the command."""

    name: str = ""
    workload: dict[str, JsonValue] = {}
    source: str = ""
    warm_up: int = 0
    iterations: int = 0


class Measurement(_Record):
    """`samples`: metric -> values, each a cost, in the order of measuring; `figures` and `targets`: computed from them."""

    machine: dict[str, JsonValue] = {}
    versions: dict[str, str] = {}
    scenario: Scenario = Scenario()
    samples: dict[str, list[Cost]]
    figures: dict[str, JsonValue] = {}
    targets: dict[str, JsonValue] = {}

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path):
            path.write_text(json.dumps({"schema": SCHEMA, **self.model_dump()}) + "\n")


class Compared(_Record):
    """One comparison, a line of the history. `at`: UTC, as in ISO 8601; `baseline`, `candidate`: the files' names.

    Regressions are counted in a row for the same `scenario`, `workload` and `metric`.
    """

    at: str
    scenario: str
    workload: dict[str, JsonValue]
    metric: str
    baseline: str
    candidate: str
    baseline_median: float
    candidate_median: float
    ratio: float
    p_value: float
    verdict: Verdict

    def is_of(self, other: "Compared") -> bool:
        """Whether both are of the same metric, scenario and workload."""
        return (self.scenario, self.workload, self.metric) == (other.scenario, other.workload, other.metric)


def require_writable(*paths: Path) -> None:
    """Raises OSError with the path where a file cannot be written; to be called before a long measurement."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()


def read_measurement(path: Path) -> Measurement:
    """The measurement in a file. Raises DataError where there is no such file, or it is not of this schema."""
    tree = _parsed(_text(path), str(path))
    schema = tree.get("schema") if isinstance(tree, dict) else None
    if schema != SCHEMA:
        raise DataError(
            f"{path} is no measurement: its schema is {schema!r}, not {SCHEMA}; `genrec bench serve` and `interleave` write them"
        )
    return _validated(Measurement, tree, str(path))


def read_history(path: Path) -> list[Compared]:
    """The comparisons in a history, the oldest first; none where there is no such file yet. Raises DataError with the line."""
    if not path.exists():
        return []
    lines = [(f"{path}:{number}", line) for number, line in enumerate(_text(path).splitlines(), 1) if line.strip()]
    return [_validated(Compared, _parsed(line, where), where) for where, line in lines]


def append_history(path: Path, compared: Sequence[Compared]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("a") as file:
        file.write("".join(one.model_dump_json() + "\n" for one in compared))


def this_machine() -> dict[str, JsonValue]:
    return {"processor": _processor(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}


def these_versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that matter to a measurement."""
    return {"python": platform.python_version(), **{name: found for name in PACKAGES if (found := version_of(name))}}


def _processor() -> str:
    """The processor's model, where Linux names it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is damaged: {error}; measure again, or remove what is no JSON") from error


def _validated(kind: type[RecordT], tree: Any, where: str) -> RecordT:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise DataError(f"{where}: {field}: {first['msg']}, not {str(first['input'])[:60]}") from error
