"""Find the requests that break a batch, by halves."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from cluster.engines.skipped import any_answer

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


async def in_parts(
    requests: Sequence[RequestT],
    results: Sequence[ResultT],
    attempt: Callable[[Sequence[RequestT]], Awaitable[Sequence[ResultT]]],
    retries: int,
    is_late: Callable[[RequestT], bool],
) -> list[ResultT]:
    """Try both halves of a batch that broke with `results`, the halves of those that break, and so on.

    Finding one bad request among n takes log2(n) broken calls, rounded up. The search ends with the first broken call beyond `retries`
    times that many; until then, parts without a bad request are answered. A request that is alone is tried once more. One that
    `is_late` by then is not, as no caller waits for its answer any longer.
    """
    found, broken_calls = list(results), 0
    allowed = retries * max(1, (len(requests) - 1).bit_length())
    parts = _halves(range(len(requests))) if allowed else []
    while parts and broken_calls <= allowed:
        part = [index for index in parts.pop() if not is_late(requests[index])]
        if not part:
            continue
        answers = await attempt([requests[index] for index in part])
        for index, answer in zip(part, answers, strict=True):
            found[index] = answer
        if not any_answer(answers):
            broken_calls += 1
            parts += _halves(part) if len(part) > 1 else []
    return found


def _halves(part: Sequence[int]) -> list[Sequence[int]]:
    middle = len(part) // 2
    return [half for half in (part[:middle], part[middle:]) if half]
