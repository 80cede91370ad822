"""What the parts of a path may be: ids of users and items any text, slashes and line breaks included."""

import re
from collections.abc import Iterable

from starlette.convertors import Convertor, StringConvertor, register_url_convertor
from starlette.routing import BaseRoute, Route


class _IdConvertor(Convertor[str]):
    """Matches any text. Starlette's `path` stops at a line break: a user with one in the id could not be erased."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _VerbConvertor(StringConvertor):
    """Matches text without slashes and colons: what stands behind the last colon. With colons in it, a path that does not match would be
    tried at each of its colons to its end, which takes the square of its length.
    """

    regex = "[^/:]+"


register_url_convertor("id", _IdConvertor())
register_url_convertor("verb", _VerbConvertor())
HISTORY_PATH = "/v1/users/{user_id:id}/history"
ITEM_PATH = "/v1/items/{item_id:id}"


def end_where_the_path_ends(routes: Iterable[BaseRoute]) -> None:
    """Have no route match a path with a line break behind it, as Starlette's do: with ids that may hold any text, that is another path."""
    for route in routes:
        if isinstance(route, Route):
            route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z")
