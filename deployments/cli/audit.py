"""The audit log of commands: the option that names its file, and lines with the system's login that gave the command."""

import os
from contextlib import AbstractContextManager
from getpass import getuser
from pathlib import Path
from typing import Annotated

import typer

from cluster.audit import AuditLine, audited

AuditLog = Annotated[
    Path | None,
    typer.Option(envvar="GENREC_AUDIT_LOG", dir_okay=False, help="a file that this adds two lines of JSON to, as gateway.audit_log"),
]


def audited_here(file: Path | None, action: str, thing: str) -> AbstractContextManager[AuditLine]:
    return audited(file, action, thing, login=_login())


def _login() -> str:
    try:
        return getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())
