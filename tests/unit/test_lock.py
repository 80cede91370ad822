"""The lock files: exact versions with hashes of all that the extras need, and nothing of where they come from."""

import re
import tomllib

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.documents import ROOT

LOCKS = {name: (ROOT / f"requirements-{name}.lock").read_text() for name in ("cpu", "gpu")}
VLLM = re.search(r"^VLLM := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
THERE = {
    **default_environment(),
    "python_version": "3.11",
    "python_full_version": "3.11.0",
    "platform_machine": "x86_64",
    "sys_platform": "linux",
}


def locked(lock):
    return {canonicalize_name(name): Version(version) for name, version in re.findall(r"^([\w.-]+)==([\w.+]+)", lock, re.MULTILINE)}


def required(*extras):
    texts = [*PROJECT["dependencies"], *(one for extra in extras for one in PROJECT["optional-dependencies"][extra])]
    requirements = [Requirement(text) for text in texts if not text.startswith("genrec[")]
    return [one for one in requirements if one.marker is None or one.marker.evaluate({**THERE, "extra": ""})]


@pytest.mark.parametrize(("name", "extras", "besides"), [("cpu", ("cpu", "vllm-cpu"), VLLM), ("gpu", ("gpu",), [])])
def test_what_the_project_requires_is_locked_in_a_version_that_it_allows(name, extras, besides):
    versions = locked(LOCKS[name])
    for one in [*required(*extras, "postgresql", "redis"), *map(Requirement, besides)]:
        assert canonicalize_name(one.name) in versions, f"{one.name} is not locked; run: make lock"
        assert versions[canonicalize_name(one.name)] in one.specifier, f"{one} is locked as another version; run: make lock"


def test_the_document_names_the_torch_that_is_locked_and_the_packages_for_cuda_that_are_locked_with_it():
    text, versions = (ROOT / "CONTRIBUTING.md").read_text(), locked(LOCKS["cpu"])
    assert re.findall(r"torch==([\w.]+)\+cpu", text) == [str(versions["torch"])], "and CONTRIBUTING.md says what the tests ran on"
    unwanted = re.compile(re.search(r"grep -oE '(.*?)'", text)[1])
    assert (
        {name for name in versions if unwanted.match(name)}
        == {name for name in versions if re.match("nvidia-|cuda-toolkit", name)}
        != set()
    )


@pytest.mark.parametrize("name", LOCKS)
def test_every_version_has_hashes_and_no_address_is_named(name):
    entries = re.split(r"\n(?=[a-z])", LOCKS[name].strip())
    assert [
        entry.splitlines()[0] for entry in entries if not re.fullmatch(r"[\w.-]+==[\w.+]+( \\\n +--hash=sha256:[0-9a-f]{64})+", entry)
    ] == []
    assert len(entries) == len(locked(LOCKS[name]))


@pytest.mark.parametrize("name", LOCKS)
def test_cudas_bindings_come_from_one_package(name):
    """Before 13 cuda-python held `cuda.bindings` itself: beside cuda-bindings each overwrote files of the other."""
    versions = locked(LOCKS[name])
    if "cuda-python" in versions:
        assert versions["cuda-python"].release[:2] == versions["cuda-bindings"].release[:2]
