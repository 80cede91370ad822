"""Neighbours from what users chose, and the encoder that answers with them."""

import runpy
import sys

import numpy as np
import pytest

from cluster.errors import BackendFailed, BackendUnavailable
from cluster.values import EncodeRequest
from tests.bundles import make_bundle, random_sequence
from tests.examples import BACKENDS, make_importable
from tests.histories import taste_data

make_importable()

from genrec_item_to_item import ItemToItemEncoder  # noqa: E402
from genrec_item_to_item.neighbours import fit, read, write  # noqa: E402

ITEMS = 60


@pytest.fixture(scope="module")
def data():
    return taste_data(users=40, items=ITEMS)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("neighbours") / "tiny", items=ITEMS)


@pytest.fixture
def encoder(data, bundle, tmp_path):
    write(fit(data.interactions, ITEMS), data, tmp_path / "neighbours.npz")
    loaded = ItemToItemEncoder(str(tmp_path / "neighbours.npz"))
    loaded.load(bundle)
    return loaded


@pytest.mark.parametrize("window", [1, 4, 50])
def test_similarities_are_those_of_the_formula(data, window):
    events, expected = data.interactions, np.zeros((ITEMS + 1, ITEMS + 1))
    for user in range(events.users):
        rows = range(int(events.offsets[user]), int(events.offsets[user + 1]))
        for one in rows:
            for other in rows:
                if events.items[one] != events.items[other] and abs(one - other) <= window:
                    days = abs(int(events.timestamps[one] - events.timestamps[other])) / 86_400
                    expected[events.items[one], events.items[other]] += 2 ** -(days / 2)
    counts = np.maximum(1, np.bincount(events.items, minlength=ITEMS + 1))
    expected /= np.sqrt(np.outer(counts, counts))
    found = fit(events, ITEMS, half_life_days=2, window=window, count=ITEMS)
    for item in range(1, ITEMS + 1):
        dense = np.zeros(ITEMS + 1)
        dense[found.items[item]] = found.similarities[item]
        assert dense[1:] == pytest.approx(expected[item, 1:], abs=1e-5)
        assert (np.diff(found.similarities[item]) <= 0).all()


def test_recommends_what_users_of_the_same_taste_chose(encoder, data):
    for user in range(4):
        answer = encoder.infer(EncodeRequest(data.interactions.sequence(user, drop_last=1), 10))
        assert {item % 2 for item in answer.items.tolist()} == {int(data.interactions.sequence(user).items[0]) % 2}


def test_the_state_lies_near_what_is_recommended(encoder, data, bundle):
    answer = encoder.infer(EncodeRequest(data.interactions.sequence(0), 10))
    cosines = bundle.item_vectors @ answer.state
    assert cosines[answer.items].mean() > cosines[1:].mean()


def test_orders_by_the_model_what_no_neighbour_speaks_for(data, bundle, tmp_path):
    only = taste_data(users=2, items=ITEMS, length=2)
    write(fit(only.interactions, ITEMS), only, tmp_path / "few.npz")
    encoder = ItemToItemEncoder(str(tmp_path / "few.npz"))
    encoder.load(bundle)
    answer = encoder.infer(EncodeRequest(random_sequence(6, items=ITEMS, seed=3), ITEMS))
    assert sorted(answer.items.tolist()) == list(range(1, ITEMS + 1))


def test_items_are_found_by_their_ids_in_a_model_that_numbers_them_otherwise(data, tmp_path):
    write(fit(data.interactions, ITEMS), data, tmp_path / "neighbours.npz")
    larger = make_bundle(tmp_path / "larger", items=ITEMS + 5).catalogue
    moved = type(larger)(list(reversed(larger.items)))
    here, there = read(tmp_path / "neighbours.npz", larger), read(tmp_path / "neighbours.npz", moved)
    names = lambda found, catalogue, item: [catalogue[i].item_id for i in found.items[catalogue.index_of(item)].tolist() if i]  # noqa: E731
    assert names(here, larger, "7") == names(there, moved, "7") != []


def test_a_file_that_is_none_or_of_other_items_cannot_be_loaded(data, bundle, tmp_path):
    (tmp_path / "text.npz").write_text("no neighbours")
    with pytest.raises(BackendUnavailable, match="holds no neighbours"):
        ItemToItemEncoder(str(tmp_path / "text.npz")).load(bundle)
    strange = type(data)("other", data.interactions, type(data.catalogue)([]), "")
    write(fit(data.interactions, ITEMS), strange, tmp_path / "strange.npz")
    with pytest.raises(BackendUnavailable, match="names none of this model's 60 items"):
        ItemToItemEncoder(str(tmp_path / "strange.npz")).load(bundle)


def test_an_item_that_the_model_does_not_have_is_refused(encoder):
    with pytest.raises(BackendFailed, match=r"outside of 1\.\.60"):
        encoder.infer(EncodeRequest(random_sequence(3, items=ITEMS * 9), 3))


def test_the_command_reads_what_genrec_reads(tmp_path, monkeypatch):
    from genrec_item_to_item.__main__ import app  # noqa: PLC0415
    from typer.testing import CliRunner  # noqa: PLC0415

    rows = [f"u{user},i{user % 2}{item},{1_700_000_000 + item}" for user in range(6) for item in range(4)]
    (tmp_path / "events.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    given = ["fit", "table", "--path", str(tmp_path / "events.csv"), "--out", str(tmp_path / "models/x.npz")]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.stdout.startswith("8 of 8 items have neighbours; written to")
    assert (BACKENDS / "item_to_item/README.md").read_text().count("--out models/ml-100k.neighbours.npz") == 1


def test_an_error_that_is_meant_for_people_is_told_in_a_line(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "genrec_item_to_item.__main__", raising=False)
    monkeypatch.setattr(sys, "argv", ["", "fit", "table", "--path", str(tmp_path / "none.csv"), "--out", str(tmp_path / "x.npz")])
    with pytest.raises(SystemExit, match=r"^genrec_item_to_item: .*none\.csv does not exist$"):
        runpy.run_module("genrec_item_to_item", run_name="__main__")
