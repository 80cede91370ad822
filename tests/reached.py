"""What an object keeps in memory."""

import gc
from collections.abc import Collection
from types import FunctionType, ModuleType


def reached(root: object) -> Collection[object]:
    """All objects that this one leads to, without classes, functions and modules, which lead to everything."""
    found, left = dict[int, object](), [root]
    while left:
        one = left.pop()
        if id(one) not in found and not isinstance(one, type | FunctionType | ModuleType):
            found[id(one)] = one
            left += gc.get_referents(one)
    return found.values()
