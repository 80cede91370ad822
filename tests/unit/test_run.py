"""What `genrec serve` turns into ends in order, by whatever it is stopped."""

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from deployments.cli import run


@pytest.fixture
def _handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begun as by a script in the background, for which SIGINT is ignored."""
    monkeypatch.setattr(run.api, "HTTP_PROXY_TIMEOUT", 60)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("_handlers_are_put_back")
@pytest.mark.parametrize("stopped_by", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_are_a_keyboard_interrupt_to_serve(stopped_by: signal.Signals, monkeypatch: pytest.MonkeyPatch):
    begun = []

    def start_ray(address: str | None, namespace: str) -> None:
        begun.append((address, namespace))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def serve_run(arguments: list[str]) -> None:
        begun.append(arguments)
        handler = signal.getsignal(stopped_by)
        assert callable(handler), "the signal reaches no code of Python's"
        handler(stopped_by, None)

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(run.ray, "init", start_ray)
    monkeypatch.setattr(run, "cli", serve_run)
    with pytest.raises(KeyboardInterrupt):
        run.main("shop.yaml")
    assert begun == [("head:6379", "serve"), ["run", "shop.yaml"]]


@pytest.mark.usefixtures("_handlers_are_put_back")
@pytest.mark.parametrize(("environments", "given"), [("head:6379", "local"), ("", None), (None, None)])
def test_no_cluster_is_joined_that_neither_the_argument_nor_the_environment_names(
    environments: str | None, given: str | None, monkeypatch: pytest.MonkeyPatch
):
    """A cluster that `ray start` left on this machine is another service's."""
    begun: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environments is not None:
        monkeypatch.setenv("RAY_ADDRESS", environments)
    monkeypatch.setattr(run.ray, "init", lambda address, namespace: begun.append(address))
    monkeypatch.setattr(run, "cli", lambda _: None)
    run.main("shop.yaml", given)
    assert begun == ["local"]


@pytest.mark.usefixtures("_handlers_are_put_back")
@pytest.mark.parametrize("told", ["\n", ""])
def test_later_serve_is_started_at_once_and_the_file_served_once_a_line_comes(told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[object] = []
    file = tmp_path / "shop.yaml"
    file.write_text("{http_options: {port: 8123}, applications: []}")
    monkeypatch.setattr(run.ray, "init", lambda address, namespace: begun.append(address))
    monkeypatch.setattr(run.api, "serve_start", lambda **options: begun.append(options["http_options"]["port"]))
    monkeypatch.setattr(run, "cli", begun.append)
    monkeypatch.setattr(run.sys, "stdin", io.StringIO(told))
    with nullcontext() if told else pytest.raises(SystemExit, match="never came"):
        run.main(str(file), "local", "later")
    assert begun == ["local", 8123, *([["run", str(file)]] if told else [])]
