"""The signals at which a command ends in order what it has started, as at Ctrl-C."""

import errno
import os
import signal
import termios
from types import FrameType


def end_in_order() -> None:
    """From here on SIGINT, SIGTERM and SIGHUP, by which a closed terminal or a lost SSH ends its programs, are a KeyboardInterrupt.

    A script's `genrec demo &` starts with SIGINT ignored, and ends at it all the same; SIGHUP stays ignored where it is, as after `nohup`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    for once in (signal.SIGTERM, signal.SIGHUP):  # a second one, of a shell or as the input ends, too, would break into the end
        signal.signal(once, signal.SIG_IGN)
    for descriptor in filter(_has_hung_up, (1, 2)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    raise KeyboardInterrupt


def _has_hung_up(descriptor: int) -> bool:
    """Whether this is a terminal that was closed: what is printed there is an error, which would break into the end."""
    try:
        termios.tcgetattr(descriptor)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False
