"""The configuration as a page of tables, rendered from the tree itself: `genrec config --markdown > docs/configuration.md`.

    settings -> their JSON schema (types, bounds, meanings) + their defaults, as they stand -> a section for each part, a row for each key

Defaults are taken from the tree and not from the schema: a part that several sections have may have others in each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.config import CACHE_CHANGES, GATEWAY_RESTARTS, Settings, StageSettings

HEAD = """# Configuration

Every key that genrec can be told, by `genrec config --markdown` out of [cluster/config.py](../cluster/config.py); a test fails where
this page is not what it prints. The tree stands under `args` of the application in [ray_config.yaml](../ray_config.yaml), which shows it
in use. An unknown key, or a value out of bounds, is refused by name before anything starts. `genrec config` prints the tree resolved,
`genrec config --schema` its JSON schema. What Serve is told beside it (replicas, autoscaling, routing, ports) is explained in
`ray_config.yaml`; unknown keys there are refused by `genrec config` and `genrec serve`, while Serve's own `serve deploy` ignores them.
"""
BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "length ≥ {}",
    "maxLength": "length ≤ {}",
    "minItems": "entries ≥ {}",
    "pattern": "`{}`",
}
"""JSON schema's keyword -> how the page writes the bound."""
NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
REQUIRED = "(required)"

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """A row of the page. `path`: of the key, from its section on."""

    path: str
    schema: Schema
    default: Any


def configuration_reference() -> str:
    """The whole page, which ends with a line break."""
    tree, defaults = Settings.model_json_schema(), Settings().model_dump(mode="json")
    top: Schema = _inlined(tree["properties"], tree["$defs"])
    plain = {name: schema for name, schema in top.items() if "properties" not in schema}
    parts = [HEAD, _section("Top level", "", _keys(plain, defaults))]
    for name, schema in top.items():
        if name not in plain:
            parts.append(_section(f"`{name}`", _about(name, schema), _keys(schema["properties"], defaults[name])))
    return "\n".join(parts)


def _inlined(node: Any, parts: Schema) -> Any:
    """A schema with each reference replaced by the part that it refers to."""
    match node:
        case {"$ref": str() as reference, **beside}:
            return _inlined({**parts[reference.rsplit("/", 1)[1]], **beside}, parts)
        case dict():
            return {key: _inlined(value, parts) for key, value in node.items()}
        case list():
            return [_inlined(value, parts) for value in node]
    return node


def _about(name: str, schema: Schema) -> str:
    """What the part is, and which of its keys need no restart."""
    if name == "gateway":
        return f"{_prose(schema)}\n\nWhile it serves, in the gateway's `user_config`: all of these but {_quoted(GATEWAY_RESTARTS)}."
    if name == "cache":
        return f"{_prose(schema)}\n\nWhile it serves, under `cache` in the gateway's `user_config`: {_quoted(CACHE_CHANGES)}."
    if set(StageSettings.model_fields) <= set(schema["properties"]):
        return f"{_prose(schema)}\n\nWhile it serves, in the {name}'s `user_config`: {_quoted(tuple(StageSettings.model_fields))}."
    return _prose(schema)


def _prose(schema: Schema) -> str:
    return " ".join(schema.get("description", "").split())


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _section(title: str, about: str, keys: Iterator[Key]) -> str:
    table = [_row("key", "type", "default", "bounds", "what it is"), "|---|---|---|---|---|", *map(_row_of, keys)]
    return "\n".join([f"## {title}\n", *([f"{about}\n"] if about else []), *table, ""])


def _row_of(key: Key) -> str:
    return _row(f"`{key.path}`", _type(key.schema), _default(key.default), _bounds(key.schema), key.schema.get("description", ""))


def _row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def _keys(properties: Schema, defaults: Mapping[str, Any], prefix: str = "") -> Iterator[Key]:
    """The keys of a part, those of parts within it after its own; `[]` stands for each entry of a list, `{}` for each name of a map."""
    inner: list[tuple[str, Schema, Any]] = []
    for name, schema in properties.items():
        default, path = defaults.get(name, REQUIRED), prefix + name
        if "properties" in schema and isinstance(default, Mapping):
            inner.append((f"{path}.", schema, default))
            continue
        yield Key(path, schema, default)
        if entry := _entry(schema):
            inner.append((path + entry[0], entry[1], {}))
    for path, schema, default in inner:
        of_entry = {name: raw.get("default", REQUIRED) for name, raw in schema["properties"].items()}
        yield from _keys(schema["properties"], default or of_entry, path)


def _entry(schema: Schema) -> tuple[str, Schema] | None:
    """The schema of a list's or map's entries, or of an optional part, with its place in a path; None where that is no part."""
    held = {mark: schema[key] for mark, key in (("[].", "items"), (".{}.", "additionalProperties")) if isinstance(schema.get(key), Mapping)}
    mark, entry = next(iter(held.items()), (".", schema))
    return next(((mark, one) for one in entry.get("anyOf", [entry]) if "properties" in one), None)


def _type(schema: Schema) -> str:
    match schema:
        case {"anyOf": alternatives}:
            told = " or ".join(_type(one) for one in alternatives)
        case {"enum": values}:
            told = ", ".join(f"`{value}`" for value in values)
        case {"type": "array", "items": entry}:
            told = f"list of {_type(entry)}"
        case {"type": "object", "additionalProperties": dict() as entry}:
            told = f"name: {_type(entry)}"
        case {"type": "object"}:
            told = "keys"
        case {"format": "path"}:
            told = "path"
        case _:
            told = NAMES.get(schema.get("type", ""), "any")
    return told


def _default(value: Any) -> str:
    if value == REQUIRED:
        return REQUIRED
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix('...' + chr(10)).strip()}`"


def _bounds(schema: Schema) -> str:
    alternatives = schema.get("anyOf", [schema])
    told = [words.format(_number(one[key])) for one in [schema, *alternatives] for key, words in BOUNDS.items() if key in one]
    return ", ".join(dict.fromkeys(told))


def _number(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
