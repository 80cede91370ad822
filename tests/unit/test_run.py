"""What `genrec serve` turns into ends in order, by whatever it is stopped."""

import io
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from deployments.cli import run


@pytest.fixture
def _begun(_as_in_the_background: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun as by a script in the background, with an input that does not end."""
    monkeypatch.setattr(run.api, "HTTP_PROXY_TIMEOUT", 60)
    monkeypatch.setattr(run, "end_with_input", lambda: None)


@pytest.mark.usefixtures("_begun")
@pytest.mark.parametrize("stopped_by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_is_a_keyboard_interrupt_to_serve(stopped_by: signal.Signals, monkeypatch: pytest.MonkeyPatch):
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


@pytest.mark.usefixtures("_begun")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_that_ends_tells_so_twice_and_serve_is_interrupted_once(first: signal.Signals, monkeypatch: pytest.MonkeyPatch):
    def serve_run(_: list[str]) -> None:
        handler = signal.getsignal(first)
        assert callable(handler), "the signal reaches no code of Python's"
        with pytest.raises(KeyboardInterrupt):
            handler(first, None)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    monkeypatch.setattr(run.ray, "init", lambda **_: None)
    monkeypatch.setattr(run, "cli", serve_run)
    run.main("shop.yaml")


@pytest.mark.usefixtures("_begun")
def test_of_what_a_closed_terminal_tells_serve_hears_and_the_processes_of_ray_do_not(monkeypatch: pytest.MonkeyPatch):
    blocked: list[bool] = []

    def note(*_: object, **__: object) -> None:
        blocked.append(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr(run.ray, "init", note)
    monkeypatch.setattr(run, "cli", note)
    run.main("shop.yaml")
    assert blocked == [True, False]


@pytest.mark.usefixtures("_begun")
def test_what_was_started_with_nohup_outlives_its_terminal(monkeypatch: pytest.MonkeyPatch):
    begun: list[object] = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(run.ray, "init", lambda **_: None)
    monkeypatch.setattr(run, "cli", lambda _: begun.append(signal.getsignal(signal.SIGHUP)))
    run.main("shop.yaml")
    assert begun == [signal.SIG_IGN]


@pytest.mark.usefixtures("_begun")
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


@pytest.mark.usefixtures("_begun")
@pytest.mark.parametrize("told", ["\n", ""])
def test_later_serve_is_started_at_once_and_the_file_served_once_a_line_comes(told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[object] = []
    file = tmp_path / "shop.yaml"
    file.write_text("{http_options: {port: 8123}, applications: []}")
    monkeypatch.setattr(run.ray, "init", lambda address, namespace: begun.append(address))
    monkeypatch.setattr(run.api, "serve_start", lambda **options: begun.append(options["http_options"]["port"]))
    monkeypatch.setattr(run.serve, "shutdown", lambda: begun.append("Serve is shut down"))
    monkeypatch.setattr(run, "cli", begun.append)
    monkeypatch.setattr(run.sys, "stdin", io.StringIO(told))
    with nullcontext() if told else pytest.raises(SystemExit, match="never came"):
        run.main(str(file), "local", "later")
    assert begun == ["local", 8123, ["run", str(file)] if told else "Serve is shut down"]
