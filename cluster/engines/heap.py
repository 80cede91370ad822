"""Keep long-lived objects out of the garbage collector's way, and give back the memory that was needed only to load them.

A full collection walks every container object of the process and holds up all of its threads: 0.2 s for the 385,000 objects of torch and
vLLM on an idle machine, seconds on a busy one. Ray Serve freezes the heap once a replica has been constructed; engines that load afterwards
are frozen here. Memory that a load has freed again, once to twice the weights, the C library would not give back to the system by itself.
"""

import ctypes
import gc
from contextlib import suppress

YOUNG_OBJECTS = 10_000
"""How many more objects have to be alive than at its last look for the collector to look for cycles. A request under way has a few hundred:
at Python's default of 700 the collector looks 200 times a second, for 4 % of a busy gateway's time.
"""


def collect_rarely() -> None:
    """Have the collector look for cycles as rarely as requests under way need. To be called before a process serves."""
    gc.set_threshold(YOUNG_OBJECTS)


def freeze_loaded() -> None:
    """Collect garbage among the objects made since the last freeze, and leave living objects out of later collections.

    To be called after an engine or a model version was loaded. The cost grows with what was loaded, not with what the process holds.
    """
    gc.collect()
    gc.freeze()
    return_freed()


def collect_discarded() -> None:
    """Collect garbage among all objects, frozen ones included, then freeze those that are alive; holds the interpreter for all of it.

    Call it after a model version was discarded: reference cycles of a frozen version are never collected otherwise.
    """
    gc.unfreeze()
    freeze_loaded()


def return_freed() -> None:
    """Give freed memory that the C library still holds back to the system; does nothing where the library is not glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
