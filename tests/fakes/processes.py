"""Which processes live, as Serve would say."""

from collections.abc import Awaitable, Callable


def only(*names: str) -> Callable[[], Awaitable[dict[str, bool]]]:
    """These, each of which may keep something of users."""

    async def live() -> dict[str, bool]:
        return dict.fromkeys(names, True)

    return live
