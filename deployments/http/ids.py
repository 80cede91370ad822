"""The paths that hold ids of users and items: any text, slashes and line breaks too."""

from starlette.convertors import Convertor, register_url_convertor


class _IdConvertor(Convertor[str]):
    """Matches any path, also with line breaks: Starlette's `path` stops there, and a user id with one could not be erased."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("id", _IdConvertor())
HISTORY_PATH = "/v1/users/{user_id:id}/history"
ITEM_PATH = "/v1/items/{item_id:id}"
