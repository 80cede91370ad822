"""The paths with ids of users and items, which may be any text, slashes and line breaks included."""

import re
from collections.abc import Iterable

from starlette.convertors import Convertor, register_url_convertor
from starlette.routing import BaseRoute, Route


class _IdConvertor(Convertor[str]):
    """Matches any text. Starlette's `path` stops at a line break: a user with one in the id could not be erased."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("id", _IdConvertor())
HISTORY_PATH = "/v1/users/{user_id:id}/history"
ITEM_PATH = "/v1/items/{item_id:id}"


def end_where_the_path_ends(routes: Iterable[BaseRoute]) -> None:
    """Have no route match a path with a line break behind it, as Starlette's do: with ids that may hold any text, that is another path."""
    for route in routes:
        if isinstance(route, Route):
            route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z")
