"""A version is whole or not there; what is damaged is refused by name, and the last good version serves."""

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from cluster.bundle import MANIFEST, POPULARITY, WEIGHTS, Artifact, Bundle, Manifest, ModelRecord
from cluster.bundle_store import REMEMBERED, BundleStore
from cluster.checksums import sha256
from cluster.config import Settings
from cluster.disk import write_whole
from cluster.errors import BundleError
from cluster.served import served_bundle
from deployments.app import resolved
from deployments.sizing.model import sampled_entry
from tests.bundles import make_bundle, make_generative_bundle, make_ranking_bundle
from tests.disks import largest_file
from tests.waiting import eventually


def damage(path: Path) -> None:
    """Flip one bit, so that only the checksum can tell."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_is_published_is_what_is_opened(tmp_path: Path):
    bundle = make_bundle(tmp_path / "tiny", items=30)
    assert (bundle.version, bundle.manifest.model.config["items"]) == ("tiny/1", 30)
    assert bundle.catalogue[7].title == "Item 7"
    assert bundle.popularity[1] == 30
    assert {WEIGHTS, POPULARITY} < bundle.manifest.files.keys()


@pytest.mark.parametrize("number", ["1e999", "-Infinity", "NaN"])
def test_a_number_that_no_double_holds_is_written_as_it_was_read(tmp_path: Path, number: str):
    bundle = make_bundle(tmp_path / "tiny")
    text = (
        bundle.manifest.model_dump_json()
        .replace('"quality":{}', f'"quality":{{"loss":{number}}}')
        .replace('"training":{}', f'"training":{{"loss":{number}}}')
    )
    read = Manifest.model_validate_json(text)
    again = Manifest.model_validate_json(read.model_dump_json())
    assert (repr(again.quality), repr(again.training)) == (repr(read.quality), repr(read.training))
    assert repr(float(number)) in repr(read.quality)


def test_versions_count_up_and_the_newest_becomes_current(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    for _ in range(3):
        make_bundle(store.root)
    assert (store.versions(), store.current()) == ([1, 2, 3], 3)
    store.promote(1)
    assert store.open().version == "tiny/1"
    for asked in (store.promote, store.open):
        with pytest.raises(BundleError, match=r"no version 9; it has \[1, 2, 3\]"):
            asked(9)


def test_a_model_has_the_name_of_its_directory_also_where_that_is_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_bundle(tmp_path / "tiny")
    (tmp_path / "tiny" / "new").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    assert make_bundle(Path()).version == "tiny/2"
    monkeypatch.chdir("new")
    assert make_bundle(Path("..")).version == "tiny/3"


@pytest.mark.parametrize("file", [WEIGHTS, POPULARITY, "catalogue.parquet"])
def test_an_altered_file_is_refused_by_name(tmp_path: Path, file: str):
    bundle = make_bundle(tmp_path / "tiny")
    damage(bundle.path / file)
    with pytest.raises(BundleError, match=rf"{file} does not match the checksum"):
        BundleStore(tmp_path / "tiny").open()


def test_a_cut_off_file_is_refused_with_both_sizes(tmp_path: Path):
    weights = make_bundle(tmp_path / "tiny").path / WEIGHTS
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(BundleError, match=f"has {size - 1} bytes, the manifest says {size}"):
        BundleStore(tmp_path / "tiny").open()


def test_a_missing_file_and_a_missing_or_foreign_manifest_are_refused(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    path = make_bundle(store.root).path
    (path / MANIFEST).write_text("{")
    with pytest.raises(BundleError, match="not a manifest this release understands"):
        store.open()
    (path / MANIFEST).unlink()
    with pytest.raises(BundleError, match="never completely written"):
        store.open()
    make_bundle(store.root)
    (store.root / "2" / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=f"{WEIGHTS} is missing"):
        store.open()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 2, "shards": 8}, r"/1/manifest\.json has format 2; this release knows 1: update genrec, or serve another version$"),
        ({"format": 0}, r"/1/manifest\.json has format 0; this release knows 1: update genrec, or serve another version$"),
        ({"shards": [8] * 99}, r"/1/manifest\.json is not .* understands: shards: Extra inputs are not permitted; serve another version$"),
        ({"files": None}, r"/1/manifest\.json is not .* understands: files: Field required; serve another version$"),
    ],
)
def test_a_manifest_of_another_release_is_refused_on_one_line_with_what_is_known_and_a_cure(tmp_path: Path, changes, told: str):
    store = BundleStore(tmp_path / "tiny")
    path = make_bundle(store.root).path / MANIFEST
    changed = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    with pytest.raises(BundleError, match=told) as refused:
        store.open()
    assert [word for word in ("\n", "pydantic") if word in str(refused.value)] == []


def test_what_callers_read_of_a_damaged_file_names_it_and_the_cure_and_not_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bundle = make_bundle(tmp_path / "tiny")

    def told(call: Callable[[], object]) -> str:
        with pytest.raises(BundleError) as refused:
            call()
        assert str(tmp_path) in str(refused.value)
        return refused.value.told

    assert told(bundle.decoder) == "tiny/1 has no decoder; run: genrec train DATASET"
    assert told(bundle.ranker) == "tiny/1 has no ranker; run: genrec train DATASET"
    assert told(lambda: bundle.verified("engine")) == "manifest.json lists no file 'engine'; use another version"
    weights = bundle.path / WEIGHTS
    weights.rename(tmp_path / WEIGHTS)
    assert told(lambda: bundle.verified(WEIGHTS)) == f"{WEIGHTS} is missing; use another version"
    weights.symlink_to(tmp_path / WEIGHTS)
    assert told(lambda: bundle.verified(WEIGHTS)).startswith(f"{WEIGHTS} is reached by a link; put the file itself there")
    weights.unlink()
    damage((tmp_path / WEIGHTS).rename(weights))
    assert told(lambda: bundle.verified(WEIGHTS)).startswith(f"{WEIGHTS} does not match the checksum in the manifest")

    def stale(path: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("cluster.bundle.sha256", stale)
    assert told(lambda: bundle.verified(WEIGHTS)) == f"{WEIGHTS} cannot be read: Stale file handle"
    weights.write_bytes(b"")
    assert told(lambda: bundle.verified(WEIGHTS)).startswith(f"{WEIGHTS} has 0 bytes, the manifest says ")


def test_the_last_good_version_serves_in_place_of_a_damaged_one_and_the_reason_is_told(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    for _ in range(3):
        make_bundle(store.root)
    damage(store.root / "3" / WEIGHTS)
    (store.root / "2" / MANIFEST).unlink()
    bundle, refused = store.open_last_good()
    assert bundle.version == "tiny/1"
    assert "3/weights.safetensors does not match" in refused[0]
    assert "2/manifest.json is missing" in refused[1]


def test_a_version_that_was_current_serves_in_place_of_a_damaged_one_before_a_newer_one_that_never_was(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    for _ in range(2):
        make_bundle(store.root)
    store.adopt(store.open(1))
    assert (store.versions(), store.current()) == ([1, 2, 3], 2)
    damage(store.root / "2" / WEIGHTS)
    assert store.open_last_good()[0].version == "tiny/1"
    damage(store.root / "1" / WEIGHTS)
    assert store.open_last_good()[0].version == "tiny/3"


def test_the_application_starts_with_the_last_good_version_and_pins_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make_bundle(tmp_path / "tiny")
    damage(make_bundle(tmp_path / "tiny").path / WEIGHTS)
    settings = resolved(Settings(model_dir=tmp_path / "tiny"))
    assert served_bundle(settings).version == "tiny/1"
    assert (settings.version, settings.model_dir.is_absolute()) == (None, True), "what is promoted later is followed"
    assert "was refused, serving tiny/1 instead" in caplog.text


@pytest.mark.parametrize("copied", [shutil.copytree, lambda version, place: place.symlink_to(version)])
def test_a_directory_with_another_number_than_its_versions_is_refused_with_the_cure_and_no_other_is(tmp_path: Path, copied):
    store = BundleStore(tmp_path / "tiny")
    make_bundle(store.root)
    copied(store.root / "1", store.root / "5")
    cure = rf"run: genrec models publish {store.root / '5'} --model-dir {store.root}"
    with pytest.raises(BundleError, match=rf"5 holds version 1, copied, renamed or reached by a link; .*{cure}"):
        store.open(5)
    store.promote(5)
    bundle, refused = store.open_last_good()
    assert (bundle.version, len(refused)) == ("tiny/1", 1)


def test_a_directory_that_is_no_models_is_refused_with_the_one_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(root: Path) -> str:
        with pytest.raises(BundleError) as told:
            BundleStore(root).open()
        return str(told.value)

    bundle = make_bundle(tmp_path / "shop")
    make_bundle(tmp_path / "books")
    copied = shutil.copytree(bundle.path, tmp_path / "a copy")
    monkeypatch.chdir(bundle.path)
    no_directory = "is a version of a model, not a model's directory"
    assert refused(bundle.path) == f"{bundle.path} {no_directory}; give the model's directory, {tmp_path / 'shop'}"
    assert refused(Path()) == f". {no_directory}; give the model's directory, {tmp_path / 'shop'}"
    assert refused(copied) == f"{copied} {no_directory}; run: genrec models publish {copied} --model-dir DIRECTORY, and give that"
    holds = f"{tmp_path} is no model's directory, but holds those of books, shop; give one of them, or {tmp_path / 'NAME'} for a new one"
    assert refused(tmp_path) == holds
    for root, told in ((bundle.path, no_directory), (copied, no_directory), (tmp_path, holds)):
        with pytest.raises(BundleError, match=re.escape(told)):
            make_bundle(root)
        assert BundleStore(root).versions() == []


def test_a_directory_beside_whose_versions_something_is_current_is_published_into(tmp_path: Path):
    """A release that a link named `current` points to is no model; and a model with versions may hold others."""
    (tmp_path / "web" / "releases").mkdir(parents=True)
    (tmp_path / "web" / "current").symlink_to("releases")
    with pytest.raises(BundleError, match="no model has been published"):
        BundleStore(tmp_path).open()
    assert make_bundle(tmp_path).manifest.version == 1
    make_bundle(tmp_path / "shop")
    assert make_bundle(tmp_path).manifest.version == 2


def test_a_version_that_is_asked_for_by_number_is_not_replaced_by_another(tmp_path: Path):
    make_bundle(tmp_path / "tiny")
    damage(make_bundle(tmp_path / "tiny").path / WEIGHTS)
    with pytest.raises(BundleError, match="does not match the checksum"):
        resolved(Settings(model_dir=tmp_path / "tiny", version=2))


def test_nothing_good_is_an_error_that_lists_every_reason(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    damage(make_bundle(store.root).path / WEIGHTS)
    with pytest.raises(BundleError, match=r"no version in .*tiny can be served: .*does not match"):
        store.open_last_good()
    with pytest.raises(BundleError, match=r"no model has been published in .*; run: genrec train"):
        BundleStore(tmp_path / "none").open()


def test_a_nonsensical_pointer_is_refused_and_the_newest_good_version_serves(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    make_bundle(store.root)
    (store.root / "current").write_text("latest\n")
    with pytest.raises(BundleError, match="holds 'latest', not a version number"):
        store.open()
    assert store.open_last_good()[0].version == "tiny/1"


@pytest.mark.parametrize(("unreadable", "served"), [({"current"}, 3), ({"previous"}, 1), ({"current", "previous"}, 4)])
def test_where_what_says_which_version_serves_may_not_be_read_another_good_one_does(tmp_path: Path, monkeypatch, unreadable, served: int):
    store, read = BundleStore(tmp_path / "tiny"), Path.read_text
    for _ in range(4):
        make_bundle(store.root)
    store.promote(3)
    store.promote(1)
    (store.root / "previous").write_text("3\n")

    def read_by_another_user(path: Path, *arguments, **options):
        if path.name in unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_by_another_user)
    bundle, refused = store.open_last_good()
    assert (bundle.manifest.version, len(refused)) == (served, len(unreadable & {"current"}))
    with pytest.raises(PermissionError):
        store.promote(2)  # it would forget what was current before


def test_a_publication_that_breaks_off_leaves_nothing_behind(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    make_bundle(store.root)
    record = ModelRecord(family="hstu", config={})
    with pytest.raises(IsADirectoryError), store.publish(record) as draft:
        draft.path.write_bytes(b"no file")
    with pytest.raises(BundleError, match=r"cannot publish .* without"), store.publish(record) as draft:
        (draft.path / WEIGHTS).write_bytes(b"weights only")
    assert sorted(entry.name for entry in store.root.iterdir()) == [".rollout.lock", "1", "current", "newest", "previous"]


PUBLISH_FOUR = """
import sys
from pathlib import Path
from cluster.bundle_store import BundleStore
store = BundleStore(Path(sys.argv[1]))
for _ in range(4):
    with store.recompile(store.open(1)):
        pass
"""


def test_publishers_at_the_same_time_never_share_a_version(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    make_bundle(store.root, items=20)
    publishers = [subprocess.Popen([sys.executable, "-c", PUBLISH_FOUR, str(store.root)]) for _ in range(2)]
    assert [publisher.wait() for publisher in publishers] == [0, 0]
    assert store.versions() == list(range(1, 10))
    assert [store.open(version).manifest.version for version in store.versions()] == store.versions()


def test_a_directory_may_have_a_colon_in_its_name_wherever_it_is_given_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    bundle = make_bundle(Path("shop:v2"), items=30)
    assert (bundle.version, len(bundle.catalogue), bundle.items) == ("shop:v2/1", 30, 30)
    assert sampled_entry(bundle)


@pytest.mark.parametrize("place", ["caf\udce9", "caf\udce9/tiny"])
def test_a_directory_that_no_manifest_could_name_is_refused_and_not_made(tmp_path: Path, place: str):
    bundle = make_bundle(tmp_path / "tiny")
    with pytest.raises(BundleError, match=r"the model's directory '.*caf\\udce9.*' is no Unicode text, .*; give another directory"):
        BundleStore(tmp_path / place).adopt(bundle)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize("name", ["20240101123000", "1234567890", "0", "007", "\N{ARABIC-INDIC DIGIT SEVEN}"])
def test_a_directory_of_digits_that_are_no_versions_number_stands_in_no_versions_way(tmp_path: Path, name: str):
    store = BundleStore(tmp_path / "tiny")
    (store.root / name).mkdir(parents=True)
    assert make_bundle(store.root).version == "tiny/1"
    assert (store.versions(), store.current()) == ([1], 1)


def test_what_was_gone_back_to_while_work_went_on_stays_current(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    make_bundle(store.root)
    second = make_bundle(store.root)
    store.roll_back()
    with store.recompile(second, since=second.manifest.version) as draft:
        pass
    assert (draft.version, store.current()) == (3, 1)


def published_since_1(store: BundleStore) -> None:
    bundle = store.open(1)
    with store.publish(bundle.manifest.model, since=1) as draft:
        for file in bundle.manifest.files:
            draft.take(bundle, file)


def recompiled_since_1(store: BundleStore) -> None:
    with store.recompile(store.open(1), since=1):
        pass


@pytest.mark.parametrize("first", [published_since_1, recompiled_since_1])
@pytest.mark.parametrize("second", [published_since_1, recompiled_since_1])
def test_of_two_that_publish_what_they_made_from_one_version_only_the_first_makes_its_own_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first, second
):
    store = BundleStore(tmp_path / "tiny")
    make_bundle(store.root)
    flock, waits, served = fcntl.flock, threading.Event(), []
    other = threading.Thread(target=lambda: (second(store), served.append(store.current())))

    def write_as_the_other_publishes(path: Path, content: str) -> None:
        if path.name == "previous" and other.ident is None:
            other.start()
            eventually(lambda: waits.is_set() or served, "the other one waits for its turn, or has not had to")
        write_whole(path, content)

    def flock_and_tell(*arguments: object) -> None:
        if threading.current_thread() is other:
            waits.set()
        flock(*arguments)

    monkeypatch.setattr("cluster.bundle_store.write_whole", write_as_the_other_publishes)
    monkeypatch.setattr(fcntl, "flock", flock_and_tell)
    first(store)
    other.join()
    assert (served, store.versions(), store.current(), store.previous()) == ([2], [1, 2, 3], 2, [1])


def test_drafts_of_killed_processes_are_removed_and_those_of_others_are_not(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    bundle = make_bundle(store.root)
    drafts = [store.root / f".draft-{name}" for name in ("left", "written")]
    for draft in drafts:
        (draft / "onnx").mkdir(parents=True)
        (draft / "onnx" / "encode.onnx").write_bytes(b"half of it")
    for entry in (*drafts[0].rglob("*"), drafts[0], drafts[1]):
        os.utime(entry, (0, 0))
    with store.recompile(bundle):
        pass
    assert [entry.name for entry in store.root.glob(".draft-*")] == [".draft-written"]


def test_versions_of_one_model_are_not_damaged_together(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    with store.recompile(make_bundle(store.root)):
        pass
    with (store.root / "2" / WEIGHTS).open("r+b") as file:
        file.write(b"overwritten in place")
    bundle, refused = store.open_last_good()
    assert (bundle.version, len(refused)) == ("tiny/1", 1)


def test_what_cannot_be_read_is_refused_like_what_is_damaged(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    make_bundle(store.root)
    weights = make_bundle(store.root).path / WEIGHTS
    weights.unlink()
    weights.symlink_to(weights)
    bundle, refused = store.open_last_good()
    assert bundle.version == "tiny/1"
    assert WEIGHTS in refused[0]


def test_a_file_in_the_place_of_the_next_version_is_told_and_not_waited_for(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    make_bundle(store.root)
    (store.root / "2").write_text("what 2>2 leaves")
    with pytest.raises(BundleError, match=r"tiny/2 is no version and stands in the place of one; move it away"):
        make_bundle(store.root)
    assert store.versions() == [1]


def test_a_version_that_the_disk_does_not_take_is_told_whichever_file_it_is_and_leaves_nothing_behind(tmp_path: Path):
    root = tmp_path / "demo"
    whole = make_generative_bundle(root)
    sizes = {file.size for file in whole.manifest.files.values()} | {(whole.path / MANIFEST).stat().st_size}
    for size in sorted(sizes):
        with largest_file(size - 1), pytest.raises((BundleError, OSError)) as refused:
            make_generative_bundle(root)
        said = refused.value.filename if isinstance(refused.value, OSError) else str(refused.value)
        assert f"{root}/" in f"{said}/", said
        assert not list(root.glob(".draft-*"))
        assert all(BundleStore(root).open(version) for version in BundleStore(root).versions())


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_any_user_that_reaches_the_models_directory_may_read_a_version_and_its_owner_alone_may_write_it(tmp_path: Path, umask: int):
    store = BundleStore(tmp_path / "demo")
    before = os.umask(umask)
    try:
        bundle = make_generative_bundle(store.root)
        with store.recompile(bundle) as draft:
            (draft.path / "engine").mkdir()
            (draft.path / "engine" / "part").touch()
        store.adopt(store.open(draft.version))
    finally:
        os.umask(before)
    for version in (store.root / str(number) for number in store.versions()):
        modes = {path: path.stat().st_mode & 0o777 for path in (version, *version.rglob("*"))}
        assert modes == {path: 0o755 if path.is_dir() else 0o644 for path in modes}
    assert (store.root / "3" / "engine" / "part").is_file()


def test_a_recompiled_version_has_the_same_model_and_new_artifacts_only(tmp_path: Path):
    store = BundleStore(tmp_path / "tiny")
    first = make_bundle(store.root)
    with store.recompile(first) as draft:
        np.save(draft.path / "extra.npy", np.zeros(3))
    second = store.open()
    assert (second.manifest.version, second.manifest.compiled_from) == (2, 1)
    assert second.manifest.files[WEIGHTS] == first.manifest.files[WEIGHTS]
    assert second.verified("extra.npy").is_file()
    with pytest.raises(BundleError, match=r"lists no file 'engine'; use another version"):
        second.verified("engine")


@pytest.fixture
def store(three_versions: Path) -> BundleStore:
    return BundleStore(three_versions)


def test_it_goes_back_step_by_step_to_what_was_current_before(store: BundleStore):
    assert store.previous() == [1, 2]
    assert (store.roll_back(), store.current(), store.previous()) == (2, 2, [1])
    assert (store.roll_back(), store.current(), store.previous()) == (1, 1, [])
    with pytest.raises(BundleError, match=r"no earlier version to go back to; promote one of \[1, 2, 3\]"):
        store.roll_back()
    store.promote(3)
    assert (store.previous(), store.roll_back()) == ([1], 1)


@pytest.mark.parametrize(("current", "deleted"), [(3, 3), (1, 3)], ids=["current", "previous"])
def test_the_number_of_a_version_that_was_deleted_while_it_served_or_was_remembered_is_not_given_again(store, current, deleted):
    store.promote(current)
    shutil.rmtree(store.root / str(deleted))
    assert store.adopt(store.open(1)) == deleted + 1


def test_the_number_of_a_version_that_was_deleted_after_a_rollback_is_not_given_again(store):
    for deleted in (3, 2):
        store.roll_back()
        shutil.rmtree(store.root / str(deleted))
    assert store.adopt(store.open(1)) == 4
    shutil.rmtree(store.root / "4")
    assert store.adopt(store.open(1)) == 5, "of a version that never served, either"


def test_promoting_what_is_current_already_is_no_step_to_go_back(store: BundleStore):
    store.promote(3)
    store.promote(3)
    assert store.roll_back() == 2


def test_where_it_broke_off_between_its_two_files_nothing_is_lost(store: BundleStore):
    (store.root / "previous").write_text("1\n2\n3\n")  # as if `promote(4)` had got no further than this
    assert store.previous() == [1, 2]
    (store.root / "previous").write_text("1\n2\n")
    (store.root / "current").write_text("2\n")  # as if `roll_back` had got no further than this
    assert (store.previous(), store.roll_back()) == ([1], 1)


def test_it_does_not_go_back_to_what_is_damaged(store: BundleStore):
    damage(store.root / "2" / WEIGHTS)
    with pytest.raises(BundleError, match=r"2/weights\.safetensors does not match"):
        store.roll_back()
    assert (store.current(), store.previous()) == (3, [1, 2])


def test_what_can_be_gone_back_to_does_not_grow_without_end(store: BundleStore):
    for step in range(2 * REMEMBERED):
        store.promote(step % 2 + 1)
    assert len(store.previous()) == REMEMBERED


def test_a_nonsensical_pointer_can_be_put_right_by_promoting(store: BundleStore):
    (store.root / "current").write_text("latest\n")
    store.promote(2)
    assert (store.current(), store.previous()) == (2, [1, 2][:1])


def test_a_version_made_elsewhere_is_adopted_whole_and_serves_only_once_it_is_promoted(store: BundleStore, tmp_path: Path):
    made, served = store.open(2), BundleStore(tmp_path / "served")
    assert (served.adopt(made), served.versions(), served.current()) == (1, [1], None)
    adopted = served.open(1)
    assert (adopted.manifest.files, adopted.manifest.model) == (made.manifest.files, made.manifest.model)
    assert adopted.version == "served/1"
    assert served.adopt(made) == 2


def test_a_version_that_is_adopted_has_its_name_on_the_disk(store: BundleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else a failure of the power gives it the name of a draft again, and drafts are removed."""
    seen: list[tuple[str, Path]] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda draft, to: (seen.append(("renamed", to)), rename(draft, to))[1])
    monkeypatch.setattr("cluster.bundle_store.flush", lambda path: seen.append(("flushed", path)))
    root = tmp_path / "other"
    BundleStore(root).adopt(store.open(1))
    assert seen[-2:] == [("renamed", root / "1"), ("flushed", root)]


def test_a_damaged_version_is_not_adopted_and_leaves_nothing_behind(store: BundleStore, tmp_path: Path):
    made, target = store.open(2), BundleStore(tmp_path / "served")
    damage(store.root / "2" / WEIGHTS)
    with pytest.raises(BundleError, match="does not match the checksum"):
        target.adopt(made)
    assert list(target.root.iterdir()) == []


def test_machines_that_share_a_directory_never_share_a_draft_and_what_breaks_off_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.getpid", lambda: 1)  # as in containers
    seen: list[str] = []
    replace = Path.replace

    def fails(draft: Path, target: Path) -> Path:
        seen.append(draft.name)
        if len(seen) < 3:
            raise OSError("the server is away")
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", fails)
    for _ in range(2):
        with pytest.raises(OSError, match="the server is away"):
            write_whole(tmp_path / "current", "1")
    write_whole(tmp_path / "current", "2")
    assert (len(set(seen)), [file.name for file in tmp_path.iterdir()]) == (3, ["current"])


def names(path: Path, file: str) -> None:
    """Has the manifest list a file by that name, with the size and checksum of what it leads to."""
    manifest = json.loads((path / MANIFEST).read_text())
    found = path / file.replace("\\", "/")
    manifest["files"][file] = {"size": found.stat().st_size, "sha256": sha256(found)} if found.is_file() else {"size": 0, "sha256": ""}
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "file", ["../current", "../../served/events.db", "/etc/hostname", "decoder/../../current", "..\\current", "./a", "a//b", ""]
)
def test_a_manifest_that_names_a_file_elsewhere_is_refused_and_overwrites_nothing(store: BundleStore, tmp_path: Path, file: str):
    served = make_bundle(tmp_path / "served")
    (tmp_path / "served" / "events.db").write_text("events")
    names(store.root / "2", file)
    with pytest.raises(BundleError, match=r"does not name a file inside the version's directory: no '\.\.'.*; do not use this version"):
        BundleStore(served.path.parent).adopt(store.open(2))
    assert BundleStore(served.path.parent).current() == 1
    assert (tmp_path / "served" / "events.db").read_text() == "events"


def test_an_artifact_that_names_a_file_elsewhere_is_refused(store: BundleStore):
    with pytest.raises(ValidationError, match="does not name a file inside the version's directory"):
        Artifact(kind="onnx", graph="encode", file="../current", builder="onnx 1")
    assert Artifact(kind="onnx", graph="encode", file="engines/encode.onnx", builder="onnx 1").file == "engines/encode.onnx"


@pytest.mark.parametrize("link", [WEIGHTS, MANIFEST, "decoder/config.json"])
def test_a_version_with_a_link_in_place_of_a_file_is_not_adopted(store: BundleStore, tmp_path: Path, link: str):
    version, elsewhere = store.root / "2", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if "/" in link:
        (elsewhere / "config.json").write_text("{}")
        (version / "decoder").symlink_to(elsewhere)
        names(version, link)
    else:
        (version / link).rename(elsewhere / link)
        (version / link).symlink_to(elsewhere / link)
    with pytest.raises(BundleError, match=r"is reached by a link; put the file itself there \(cp -rL\)"):
        BundleStore(tmp_path / "served").adopt(store.open(2))
    assert BundleStore(tmp_path / "served").versions() == []


def test_a_version_with_a_link_is_not_published_and_a_model_directory_may_be_one(store: BundleStore, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("of this machine")
    publishing = store.recompile(store.open(1))
    draft = publishing.__enter__()
    (draft.path / "notes.txt").symlink_to(tmp_path / "notes.txt")
    with pytest.raises(BundleError, match="is reached by a link"):
        publishing.__exit__(None, None, None)
    (tmp_path / "shortcut").symlink_to(store.root)
    assert BundleStore(tmp_path / "shortcut").open(1).verified(WEIGHTS).is_file()


def test_a_ranker_that_does_not_predict_clicks_is_refused_as_it_is_opened(tmp_path: Path):
    path = make_ranking_bundle(tmp_path / "tiny").path / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["ranker"]["tasks"].remove("click")
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        BundleError, match=r"a ranker has to predict click, by which every score is multiplied; it predicts rating, purchase"
    ):
        BundleStore(tmp_path / "tiny").open()


def test_artifacts_and_a_decoder_are_adopted_too(compiled_hstu: Bundle, tmp_path: Path):
    store = BundleStore(tmp_path / "served")
    adopted = store.open(store.adopt(compiled_hstu))
    assert adopted.manifest.artifacts == compiled_hstu.manifest.artifacts != []
    for artifact in adopted.manifest.artifacts:
        adopted.verified(artifact.file)
    generative = make_generative_bundle(tmp_path / "made", items=20)
    store.open(store.adopt(generative)).verify_generative()
