"""The tests of a cluster run in one process, and first; of what is left, each file."""

from tests.documents import ROOT
from tests.scheduling import ORDER, group_of, place_of


def test_every_listed_file_is_there():
    assert [path for path in ORDER if not (ROOT / path).exists()] == []


def test_the_files_of_a_cluster_are_one_group_and_any_other_file_is_its_own():
    live, rows = "tests/integration/live/test_top.py::test_it[1]", "tests/chaos/test_malformed.py::test_it"
    assert {group_of(live), group_of(rows)} == {"fast"}
    assert group_of("tests/integration/test_rollout.py::test_it[split]") == "default"
    assert group_of("tests/contract/test_shared_caches.py::test_it[actors]") == group_of("tests/integration/test_cache_actors.py") == "bare"
    assert group_of("tests/unit/test_trie.py::TestIt::test_it[a::b]") == "tests/unit/test_trie.py"


def test_clusters_come_first_and_what_kills_a_cluster_is_the_last_on_it():
    unit, killed = place_of("tests/unit/test_trie.py::test_it"), "tests/chaos/test_killed_processes.py"
    assert all(place_of(f"{path}::test_it") < unit for path in ORDER if path.endswith(".py"))
    assert place_of(f"{killed}::test_it") == max(place for path, place in ORDER.items() if group_of(path) == group_of(killed))
