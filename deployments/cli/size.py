"""`genrec size`: how much memory a model and a configuration take, before they are served."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, Literal, NamedTuple, get_args

import typer
from pydantic import ValidationError

from cluster.config import Settings, parse
from cluster.config_file import read, read_document
from cluster.errors import ConfigError
from cluster.machine import memory_limit
from cluster.ranking import Task
from cluster.served import served_bundle
from cluster.stages import STAGES
from deployments.cli.config import ConfigFile
from deployments.sizing.engines import Use
from deployments.sizing.fit import UNITS, said, unfit
from deployments.sizing.model import Sizes, sampled_entry, sizes_of
from deployments.sizing.parts import Place, Plan, Process, When
from deployments.sizing.processes import plan_of, replicas
from integrations.decoder.config import PRESETS, DecoderConfig
from integrations.hstu.config import HSTUConfig, RankerConfig
from pipelines.assign_ids import fitting_vocabulary
from pipelines.generative_run import IdOptions

COLUMNS: tuple[When, ...] = get_args(When)
_SIZES = "--layers, --dim, --heads or --window"


class _Row(NamedTuple):
    """A row of the table; one without any text is an empty line."""

    name: str = ""
    cells: tuple[str, ...] = ()
    notes: str = ""


def size(
    path: ConfigFile = Path("ray_config.yaml"),
    *,
    model_dir: Annotated[Path | None, typer.Option(help="the model (default: the configuration's)")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="of the catalogue (default: the model's)")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="of a model that is not trained yet, in place of one that is")] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="width of such a model")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="of such a model, which divide its width among them")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="events that such a model encodes")] = None,
    decoder: Annotated[Literal["none", "tiny", "base"] | None, typer.Option(help="of such a model (default: tiny)")] = None,
    ranker: Annotated[
        bool | None, typer.Option("--ranker/--no-ranker", help="whether such a model ranks (default: it does)", show_default=False)
    ] = None,
    precision: Annotated[Literal["fp32", "fp16", "int8"], typer.Option(help="fp16: of TensorRT engines; int8: of ONNX Runtime's")] = "fp32",
    users: Annotated[int | None, typer.Option(min=0, help="whose states are kept (default: as many as there is room for)")] = None,
    history: Annotated[int | None, typer.Option(min=1, help="events of each of them (default: the model's window)")] = None,
    replica: Annotated[
        list[str] | None, typer.Option("--replicas", help="of a deployment, as encoder=2 (default: the configuration's)")
    ] = None,
    most: Annotated[bool, typer.Option("--most", help="as many replicas as autoscaling may start, not as few")] = False,
    device: Annotated[Literal["cpu", "gpu"], typer.Option(help="what engines compute on")] = "cpu",
    memory: Annotated[str | None, typer.Option(help="of the machine, as 16GiB (default: what there is here)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in bytes")] = False,
) -> None:
    """Print the memory of each process, part by part, and whether one machine has it. Status 1 where --memory certainly is too little."""
    settings, room = _with_precision(read(path), precision), _bytes(memory) if memory else memory_limit()
    settings = settings if model_dir is None else settings.model_copy(update={"model_dir": model_dir})
    thought_of = {"layers": layers, "dim": dim, "heads": heads, "max_history": window}
    untrained = any(thought_of.values())
    if untrained and model_dir is not None:
        raise ConfigError(f"--model-dir names a trained model, and {_SIZES} are of one that is not trained yet; leave one of them out")
    if not untrained and (decoder is not None or ranker is not None):
        raise ConfigError(f"--decoder, --ranker and --no-ranker are of a model that is not trained yet; add {_SIZES}, or leave them out")
    sizes = _untrained(items, thought_of, decoder or "tiny", ranker=ranker is not False) if untrained else _trained(settings, items)
    known = ("gateway", *(STAGES if settings.placement == "split" else ()))
    count = {**replicas(read_document(path), most=most), **dict(_count(text, known) for text in replica or [])}
    place: Place = "gpu" if device == "gpu" else "host"
    plan = plan_of(settings, sizes, count, Use(users, history), place)
    problem = unfit(plan, room) if room else ""
    if as_json:
        typer.echo(json.dumps(_tree(plan, sizes, room, problem), indent=2))
    else:
        typer.echo("\n".join([*_table(plan, sizes, place, _terminal_columns()), "", *_verdict(plan, place, room, problem)]))
    if memory and problem:
        raise typer.Exit(1)


def _trained(settings: Settings, items: int | None) -> Sizes:
    bundle = served_bundle(settings)
    sizes = sizes_of(bundle, sampled_entry(bundle))
    return sizes if items is None else _with_items(sizes, items)


def _with_items(sizes: Sizes, items: int) -> Sizes:
    """The sizes of the model trained anew on a catalogue of so many items."""
    more = {"items": items}
    ranker = sizes.ranker and sizes.ranker.model_copy(update=more)
    decoder = sizes.decoder and sizes.decoder.model_copy(update={"vocabulary": fitting_vocabulary(items, sizes.decoder.levels)})
    return replace(sizes, encoder=sizes.encoder.model_copy(update=more), decoder=decoder, ranker=ranker)


def _untrained(items: int | None, given: dict[str, int | None], decoder: str, *, ranker: bool) -> Sizes:
    if items is None:
        raise ConfigError("a model that is not trained yet has a catalogue of unknown size; give --items")
    chosen = {name: value for name, value in given.items() if value is not None}
    dim, window = chosen.get("dim", 50), chosen.get("max_history", 200)
    width = max(1, dim // chosen.get("heads", 1))
    tree: dict[str, Any] = {"max_length": window + 11, "attention_dim": width, "linear_dim": width, **chosen, "items": items}
    levels = IdOptions().levels
    vocabulary = fitting_vocabulary(items, levels)
    try:
        return Sizes(
            "the model",
            HSTUConfig(**tree),
            DecoderConfig(levels=levels, vocabulary=vocabulary, state_dim=dim, **PRESETS[decoder]) if decoder != "none" else None,
            RankerConfig(**tree, tasks=(Task.CLICK, Task.RATING)) if ranker else None,
        )
    except ValidationError as error:
        raise ConfigError(f"there is no such model: {'; '.join(one['msg'] for one in error.errors())}") from None


def _with_precision(settings: Settings, precision: str) -> Settings:
    if precision == "fp32":
        return settings
    name, changes = ("onnxruntime", {"precision": "int8"}) if precision == "int8" else ("tensorrt", {"precisions": ["fp16"]})
    tree = settings.model_dump(mode="json")
    tree["encoder"]["options"][name] = {**tree["encoder"]["options"].get(name, {}), **changes}
    return parse(tree)


def _count(text: str, known: Sequence[str]) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if name not in known:
        raise ConfigError(f"there is no deployment {name!r} to have replicas of; choose from {', '.join(known)}")
    if not number.isdecimal() or not int(number):
        raise ConfigError(f"--replicas {text!r} is not of the form DEPLOYMENT=NUMBER with one replica at least, as encoder=2")
    return name, int(number)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B?|B)?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ConfigError(f"--memory {text!r} is not a size; give bytes, or such as 16GiB or 16GB")
    unit = (found[2] or "B").upper()
    return int(float(found[1]) * (1000 if unit.endswith("B") and "I" not in unit else 1024) ** "BKMGT".index(unit[0]))


def _tree(plan: Plan, sizes: Sizes, room: int | None, problem: str) -> dict[str, Any]:
    return {
        "model": sizes.name,
        "items": sizes.items,
        "memory_bytes": room,
        "refused": problem,
        "bytes": {**{when: plan.bytes(when) for when in COLUMNS}, "all": plan.bytes(), "gpu": plan.bytes(place="gpu")},
        "processes": [
            {**asdict(one), "bytes": {**{when: one.bytes(when) for when in COLUMNS}, "gpu": one.bytes(place="gpu")}}
            for one in plan.processes
        ],
    }


def _terminal_columns() -> int | None:
    return get_terminal_size().columns if sys.stdout.isatty() else None


def _table(plan: Plan, sizes: Sizes, place: Place, columns: int | None) -> Iterator[str]:
    """The lines of the table. Where a terminal is too narrow, a row's notes stand below it."""
    config = sizes.encoder
    yield f"{sizes.name}: {sizes.items:,} items, {config.layers} layers of {config.dim}, {config.max_history} events; MiB"
    yield ""
    rows = [_Row("", ("at start", "kept", "passing", "mapped", *(["GPU"] if place == "gpu" else [])))]
    for process in plan.processes:
        rows += [*_process_rows(process, place), _Row()]
    rows.append(_Row("all, what is mapped once", _figures(plan, place)))
    width = max(len(row.name) for row in rows)
    widths = [2 + max(map(len, column)) for column in zip(*(row.cells for row in rows if row.cells), strict=True)]
    for row in rows:
        line = f"{row.name:<{width}}{''.join(f'{cell:>{cells}}' for cell, cells in zip(row.cells, widths, strict=False))}"
        beside = f"{line}  {row.notes}"
        if columns is None or not row.notes or len(beside) <= columns:
            yield beside.rstrip()
        else:
            yield line.rstrip()
            yield f"      {row.notes}"


def _verdict(plan: Plan, place: Place, room: int | None, problem: str) -> Iterator[str]:
    if place == "gpu":
        yield "What lies on the GPU is computed from sizes and settings; no GPU was measured."
    if room is None:
        return
    yield f"There are {said(room)} of memory."
    if problem:
        yield f"Serving would be refused: {problem}."
    elif plan.bytes() > room:
        yield "It starts, and does not fit once all that is kept is full and gateways hold all they may: lower a setting named above."
    else:
        yield "It fits."


def _process_rows(process: Process, place: Place) -> Iterator[_Row]:
    yield _Row(process.name + (f", {process.count} times" if process.count > 1 else ""), _figures(process, place))
    for part in process.parts:
        cells = ["" if part.when != when or part.place != "host" else _mib(part.bytes) for when in COLUMNS]
        users = "" if part.users is None else f"{part.users:,} users"
        gpu = [_mib(part.bytes) if part.place == "gpu" else ""] if place == "gpu" else []
        yield _Row(f"  {part.name}", (*cells, *gpu), ", ".join(filter(None, (part.key, users))))


def _figures(one: Plan | Process, place: Place) -> tuple[str, ...]:
    return (*(_mib(one.bytes(when)) for when in COLUMNS), *([_mib(one.bytes(place="gpu"))] if place == "gpu" else []))


def _mib(count: int) -> str:
    return f"{count / 1024 ** UNITS.index('MiB'):,.1f}" if count else ""
