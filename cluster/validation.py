"""Plain trees checked by pydantic's models: each refusal names the key, its value, the rule and, of an unknown key, the one meant."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.errors import ConfigError
from cluster.traffic import api_keys

ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(kind: type[ModelT], tree: dict[str, Any], source: str, places: Mapping[str, str] = MappingProxyType({})) -> ModelT:
    """The model of a plain tree. Raises ConfigError that names each wrong key, its value and the rule. `places`: where a key belongs that
    is unknown here.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        wrong = (
            f"{'.'.join(map(str, e['loc'])) or 'top level'} = {shown(e['loc'], e['input'])}: {e['msg']}{_meant(kind, e, places)}"
            for e in error.errors()
        )
        raise ConfigError(api_keys.masked(f"{source}: " + "; ".join(wrong))) from None  # its cause would show the values


def problems(error: ValidationError) -> str:
    """Each wrong key and the rule on one line, without the values, which may be long."""
    told = ((".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_url=False))
    return "; ".join(f"{place}: {rule}" if place else rule for place, rule in told)


def _meant(kind: type[BaseModel], error: ErrorDetails, places: Mapping[str, str]) -> str:
    """Of an unknown key: where it belongs, or the key beside it that it most resembles, if any does."""
    *above, unknown = error["loc"] or ("",)
    if error["type"] != "extra_forbidden":
        return ""
    if not above and unknown in places:
        return f"; it belongs under {places[str(unknown)]}"
    for name in above:
        if name in kind.model_fields:
            kind = next(_sections_of(kind.model_fields[str(name)].annotation), kind)
    found = get_close_matches(str(unknown), kind.model_fields, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation such as ``list[ApiKeySettings]`` or ``RateLimit | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_of(inner)


def shown(loc: Sequence[int | str], value: object) -> str:
    """A wrong value, unless the name of its place says that it is a secret."""
    name = loc[-1] if loc else ""
    return repr(api_keys.masked_tree({name: value})[name])
