"""The audit log: two lines of JSON for each erasure and each call that operates the system, at the end of a file: one before it is carried
out, which is on the disk by then, and one with its outcome.

    {"time": "2026-11-25T09:30:00.123+00:00", "action": "backend.disable", "object": "encoder/torch", "key": "operator",
     "request_id": "r-7", "act": "9f86d081884c7d65", "outcome": "begun"}
    {"time": "2026-11-25T09:30:00.345+00:00", ..., "act": "9f86d081884c7d65", "outcome": "done"}

The file is opened for every line, so that logrotate may move it at any time, and several processes of a machine may write the same one.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from cluster.private_file import append

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AuditLine:
    """The lines of an act. `file` None: the log is off. `told`: the fields of both; `more`: those that the call adds to the second; `lost`:
    whether one of them could not be written.

    An act is not refused or undone for want of a line: one that cannot be written is logged, whole, as an error, and marked as lost.
    """

    file: Path | None = None
    told: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    lost: bool = False

    @classmethod
    def of(cls, file: Path | None, action: str, thing: str, **by: str | None) -> "AuditLine":
        return cls(file, {"action": action, "object": thing, **by, "act": token_hex(8)})

    def first(self) -> str:
        """The first line, with the time of now."""
        return self._text({"outcome": "begun"})

    def second(self, error: BaseException | None) -> str:
        """The second line, with the time of now: the act is done, or ended by an error. Of that it has the kind and not the text, which may
        name a user.
        """
        return self._text({"outcome": type(error).__name__ if error else "done", **self.more})

    def write(self, text: str, *, durable: bool = False) -> None:
        """Write a line; `durable`: it is on the disk when this returns, for which it may wait."""
        if self.file is None:
            return
        try:
            append(self.file, f"{text}\n".encode(), durable=durable)
        except OSError as error:
            self.lose(text, error)

    def lose(self, text: str, why: object) -> None:
        """Log a line that could not be written, and mark it as lost."""
        self.lost = True
        logger.error("the audit log %s cannot be written (%s); the line is: %s", self.file, why, text)

    def _text(self, more: dict[str, Any]) -> str:
        return json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **self.told, **more})


@contextmanager
def audited(file: Path | None, action: str, thing: str, **by: str | None) -> Iterator[AuditLine]:
    """A line before the block, and one as it ends."""
    line, failure = AuditLine.of(file, action, thing, **by), None
    line.write(line.first(), durable=True)
    try:
        yield line
    except BaseException as error:
        failure = error
        raise
    finally:
        line.write(line.second(failure))
