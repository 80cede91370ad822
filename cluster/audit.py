"""The audit log: a line of JSON for each erasure and each call that operates the system, at the end of a file.

    {"time": "2026-11-25T09:30:00.123+00:00", "action": "backend.disable", "object": "encoder/torch", "key": "operator",
     "request_id": "r-7", "outcome": "done"}

The file is opened for every line, so that logrotate may move it at any time, and several processes of a machine may write the same one.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.private_file import append

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AuditLine:
    """A line being made. `more`: fields that the call adds; `lost`: whether the line could not be written."""

    more: dict[str, Any] = field(default_factory=dict)
    lost: bool = False


@contextmanager
def audited(file: Path | None, action: str, thing: str, **by: str | None) -> Iterator[AuditLine]:
    """Write a line as the block ends; its outcome is "done", or the kind of the error that ended the block. `file` None: the log is off.

    A call is not undone for want of its line: a line that cannot be written is logged, whole, as an error, and marked as lost.
    """
    line, outcome = AuditLine(), "done"
    try:
        yield line
    except BaseException as error:
        outcome = type(error).__name__  # not its text, which may name a user
        raise
    finally:
        if file is not None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            text = json.dumps({"time": now, "action": action, "object": thing, **by, "outcome": outcome, **line.more})
            try:
                append(file, f"{text}\n".encode())
            except OSError as error:
                line.lost = True
                logger.error("the audit log %s cannot be written (%s); the line is: %s", file, error, text)  # noqa: TRY400 - a line is enough
