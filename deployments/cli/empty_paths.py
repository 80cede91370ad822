"""An empty text in the place of a path, which Python takes for the current directory, and is mostly a shell's variable without a value."""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from cluster.errors import ConfigError


def refuse_empty_paths(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Raises ConfigError where an argument, or the value of one of the app's options that are paths, is empty."""
    options = {option for command in _commands(app) for option in _path_options(command)}
    for before, given in zip(("", *arguments), arguments, strict=False):
        if empty := _empty(before, given, options):
            raise ConfigError(f"{empty} is empty: is a variable of the shell not set? The current directory is named by a dot")


def _empty(before: str, given: str, options: Collection[str]) -> str:
    """What is empty with `given`, which follows `before` on the command line; "" where nothing is."""
    if not given and not before.startswith("-"):
        return f"the argument after {before!r}"
    option = given.removesuffix("=") if given else before
    return option if (not given or given.endswith("=")) and option in options else ""


def _commands(app: typer.Typer) -> Iterator[Callable[..., Any]]:
    own = [app.registered_callback, *app.registered_commands]
    yield from (one.callback for one in own if one and one.callback)
    for group in app.registered_groups:
        if group.typer_instance:
            yield from _commands(group.typer_instance)


def _path_options(command: Callable[..., Any]) -> Iterator[str]:
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if get_origin(parameter.annotation) is Annotated:
            kind, *details = get_args(parameter.annotation)
            options = [detail for detail in details if isinstance(detail, OptionInfo)]
            if options and Path in (kind, *get_args(kind)):
                declared = (options[0].default, *(options[0].param_decls or ()))  # typer keeps the first one in the default's place
                yield from [one for one in declared if isinstance(one, str)] or [f"--{name.replace('_', '-')}"]
