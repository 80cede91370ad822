"""The paths with ids of users and items, which may be any text, slashes and line breaks included."""

from starlette.convertors import Convertor, register_url_convertor


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
