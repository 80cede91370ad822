"""Cases for benchmarks/guarded.py that end in every way there is."""

import os
import signal
import time

from benchmarks.guarded import Case, Finding, Label, NotHere


def cases(*, hang_s=0.0):
    ends = {
        "holds": lambda: Finding(1.0, 2.0, ms=0.5, eager_ms=2.0),
        "is not here": lambda: refuse(NotHere("no such device")),
        "is off": lambda: Finding(3.0, 2.0, note="largest in out"),
        "is NaN": lambda: Finding(float("nan"), 2.0),
        "raises": lambda: refuse(RuntimeError("CUDA error: an illegal memory access")),
        "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "leaves": lambda: os._exit(7),
        "hangs": lambda: time.sleep(hang_s),
        "still holds": lambda: Finding(note="after all"),
    }
    return [Case(Label(name), end) for name, end in ends.items() if name != "hangs" or hang_s]


def refuse(error):
    raise error


def broken():
    raise ImportError("no module named torch")
