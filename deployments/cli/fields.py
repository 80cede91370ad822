"""The fields of a pydantic value as options: a command takes the value, its command line has an option for each field that is named.

    @with_fields
    def train(*, encoder: Annotated[TrainOptions, Fields(("epochs", "seed"))]) -> None:

has --epochs and --seed, with the fields' defaults and descriptions. What pydantic refuses is a ConfigError in the options' names.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.errors import ConfigError

T = TypeVar("T")
CALLED: Mapping[str, str] = {"batch_windows": "batch"}
"""Field -> the option's name, where they differ."""


@dataclass(frozen=True)
class Fields:
    """Which fields of a value are options, and what their names begin with.

    `declared`: field -> typer's own Option or Argument, where its description alone will not do; `required`: those without a default.
    """

    names: Sequence[str]
    prefix: str = ""
    declared: Mapping[str, Any] = field(default_factory=dict)
    required: Collection[str] = ()

    def parameters(self, value: type[BaseModel]) -> dict[str, inspect.Parameter]:
        """Field -> the command's parameter."""
        return {name: self._parameter(name, value) for name in self.names}

    def _parameter(self, name: str, value: type[BaseModel]) -> inspect.Parameter:
        known = value.model_fields[name]
        kind: Any = str if get_origin(known.annotation) is Literal else known.annotation
        annotation = Annotated[kind, self.declared.get(name) or typer.Option(help=known.description)]
        default = inspect.Parameter.empty if name in self.required else known.default
        called = self.prefix + CALLED.get(name, name)
        return inspect.Parameter(called, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextmanager
def as_options(prefix: str = "") -> Iterator[None]:
    """Within the block, a value that pydantic refuses is a ConfigError that names the options."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError("; ".join(_refusal(prefix, problem) for problem in error.errors())) from error


def _refusal(prefix: str, problem: ErrorDetails) -> str:
    """A refused option with its value, where that is a number or a word, and the rule."""
    name, value = str(problem["loc"][0]), problem["input"]
    given = f" {value}" if isinstance(value, int | float | str) else ""
    return f"--{(prefix + CALLED.get(name, name)).replace('_', '-')}{given}: {problem['msg'].removeprefix('Value error, ')}"


def with_fields(command: Callable[..., T]) -> Callable[..., T]:
    """The command with an option for each named field, in place of the parameters that are annotated with `Fields`."""
    own = inspect.signature(command, eval_str=True).parameters
    groups = {name: group for name, parameter in own.items() if (group := _group(parameter.annotation))}
    spread = {name: fields.parameters(value) for name, (value, fields) in groups.items()}

    @functools.wraps(command)
    def spread_command(**given: Any) -> T:
        for name, (value, fields) in groups.items():
            with as_options(fields.prefix):
                asked = {field: given.pop(parameter.name) for field, parameter in spread[name].items()}
                given[name] = value.model_validate(asked)
        return command(**given)

    every = [one for name, parameter in own.items() for one in (spread[name].values() if name in spread else [parameter])]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in every]
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # how inspect lets a wrapper tell its own
    spread_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread_command


def _group(annotation: Any) -> tuple[type[BaseModel], Fields] | None:
    value, *details = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    return next(((value, detail) for detail in details if isinstance(detail, Fields)), None)
