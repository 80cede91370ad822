"""Serve an application of a test's own, in place of genrec's, on a Ray cluster of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.cli import local_serve
from tests.documents import ROOT
from tests.ports import free_port


@contextmanager
def serving(application: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, log: Path) -> Iterator[local_serve.LocalServe]:
    """`application` as in a Serve config file. It answers GET /readyz with 200."""
    port = free_port()
    document = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [dict(application)]}
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(local_serve, "local_document", lambda *_: document)
    local = local_serve.LocalServe(log.with_suffix(".yaml"), {}, port=port, log=log, profile="default")
    with local:
        yield local
