"""What a backend must do before it is loaded, and the load."""

import inspect
import time
from dataclasses import replace
from pathlib import Path

from cluster.checks.report import Failed
from cluster.checks.subject import Subject
from cluster.protocols import Backend
from cluster.registry import resolve
from cluster.values import Availability

CHEAP_S = 0.25
METHODS = ("get_availability", "load", "infer", "batch_infer", "close")


def is_made_without_arguments(subject: Subject) -> None:
    try:
        resolve(subject.import_string)()
    except ImportError as error:
        raise Failed(f"{subject.import_string} cannot be imported: {error}") from error
    except TypeError as error:
        raise Failed(f"{subject.import_string} cannot be called without arguments ({error}); give every option a default") from error
    subject.backend = subject.make()


def has_the_methods(subject: Subject) -> None:
    if missing := [name for name in METHODS if not callable(getattr(subject.backend, name, None))]:
        raise Failed(f"it lacks {', '.join(missing)}; see cluster/protocols.py")
    if waits := [name for name in METHODS if inspect.iscoroutinefunction(getattr(subject.backend, name))]:
        raise Failed(f"{', '.join(waits)} must not be async; what answers many requests at a time is called ainfer")
    assert isinstance(subject.backend, Backend)


def says_whether_it_can_serve(subject: Subject) -> None:
    availability = subject.backend.get_availability(subject.bundle)
    if mistake := Availability.mistake_in(availability):
        raise Failed(mistake)
    if not isinstance(availability.reason, str):
        given = type(availability.reason).__name__
        raise Failed(f"get_availability gave a {given} as its reason, not text; Availability.because(error) says no for an error's reason")
    if not availability.ok and not availability.reason.strip():
        raise Failed("get_availability says no without a reason; Availability.no(reason) says what is missing and what to do")
    subject.unavailable = availability.reason


def says_so_cheaply(subject: Subject) -> None:
    if (fastest := min(_seconds(subject) for _ in range(3))) > CHEAP_S:
        raise Failed(f"get_availability took {fastest:.2g} s; it is asked every few seconds and may take {CHEAP_S} s: keep what it found")


def _seconds(subject: Subject) -> float:
    began = time.perf_counter()
    subject.backend.get_availability(subject.bundle)
    return time.perf_counter() - began


def does_not_raise_where_files_are_gone(subject: Subject) -> None:
    gone = replace(subject.bundle, path=Path("/nonexistent") / subject.bundle.path.name)
    try:
        subject.make().get_availability(gone)
    except Exception as error:
        raise Failed(f"get_availability raised {type(error).__name__}: {error}, where a model's files are gone; it says no") from error


def loads(subject: Subject) -> None:
    subject.backend.load(subject.bundle)
    subject.loaded = True
