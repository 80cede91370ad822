"""The tree of errors in cluster/errors.py has them all, and each is the same behind a remote call."""

import pickle
import re

import pytest

from cluster import errors
from cluster.engines.skipped import NoBackendAnswered
from cluster.errors import GenrecError, InvalidRequest, ModelGone, UnknownChoice
from cluster.values import SkippedBackend
from deployments.gateway import Gateway


def drawn():
    """The names below the base in the docstring's tree, and how deep each stands."""
    branches = re.findall(r"^ {4}([│ ]*)[├└]── (\w+)", errors.__doc__, re.MULTILINE)
    return {name: 1 + len(before) // 4 for before, name in branches}


def raised(kind=GenrecError, depth=1):
    """The same of the classes that there are."""
    for one in kind.__subclasses__():
        if one.__module__.startswith(("cluster.", "deployments.", "integrations.", "pipelines.")):
            yield one.__name__, depth
            yield from raised(one, depth + 1)


def test_every_error_of_a_serving_process_is_in_the_tree_below_its_base():
    assert Gateway, "what a gateway imports is imported"
    assert drawn() == dict(raised())


@pytest.mark.parametrize(
    "error",
    [
        UnknownChoice("encoder", "trt", ["torch"]),
        InvalidRequest("k", "is 0"),
        ModelGone("not here"),
        NoBackendAnswered("encoder", (SkippedBackend("torch", "broke"),)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_behind_a_remote_call(error):
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received), vars(received)) == (type(error), str(error), vars(error))
