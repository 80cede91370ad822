"""`genrec add-items`: a trained model gets items it never saw, and both stages recommend them beside the old ones as they were."""

import shutil
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from cluster.bundle import CATALOGUE, GENERATIVE, LEARNT, SEMANTIC_IDS, Artifact
from cluster.bundle_store import BundleStore
from cluster.catalogue_file import write_catalogue
from cluster.dataset import Catalogue
from cluster.errors import BundleError, DataError
from cluster.ranking import RankRequest
from cluster.values import EncodeRequest, GenerateRequest, Item, UserState
from deployments.cli import add_items, evaluate, train, train_ranker
from integrations.hstu.encoder import TorchEncoder
from integrations.hstu.torch_ranker import TorchRanker
from integrations.hstu.weights import load_model, load_ranker
from integrations.torch_beam.generator import TorchBeamGenerator
from pipelines import new_items
from tests.bundles import make_bundle, make_generative_bundle, random_sequence

OPTIONS = ["--dim", "8", "--max-history", "10", "--batch-users", "16", "--prompt-length", "8", "--epochs", "1", "--decoder-epochs", "1",
           "--ranker-epochs", "1"]  # fmt: skip
KNOWN = 12
NEW = np.array([13, 14], np.int32)
NOTHING = np.empty(0, np.int32)
KINDS = ("red berry", "blue sea")

app = typer.Typer()
app.command("train")(train.train)
app.command("add-items")(add_items.add_items)
app.command("evaluate")(evaluate.evaluate)
app.command("train-ranker")(train_ranker.train_ranker)


def genrec(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module", params=[("hstu", 0.0), ("hstu", 0.5), ("sasrec", 0.0)], ids=["hstu", "hstu-titles", "sasrec"])
def trained(request, tmp_path_factory):
    """A store with one version, trained on 12 items of two kinds."""
    root, (family, weight) = tmp_path_factory.mktemp("trained"), request.param
    rng = np.random.default_rng(0)
    rows = [f"u{user},{(user + step) % KNOWN + 1},{1000 * step + user}" for user in range(40) for step in range(int(rng.integers(4, 15)))]
    (root / "events.csv").write_text("\n".join(["user,item,timestamp", *rows]) + "\n")
    items = [f"{item},{KINDS[item % 2]} n{item}" for item in range(1, KNOWN + 1)]
    (root / "items.csv").write_text("\n".join(["item_id,title", *items]) + "\n")
    where = ["--path", root / "events.csv", "--items", root / "items.csv", "--model-dir", root / "shop"]
    genrec("train", "table", *where, "--family", family, "--title-weight", weight, *OPTIONS)
    return root / "shop"


@pytest.fixture
def store(trained, tmp_path):
    return BundleStore(shutil.copytree(trained, tmp_path / "shop"))


@pytest.fixture
def table(tmp_path):
    """Two items that the model does not know, and one that it does."""
    path = tmp_path / "new.csv"
    path.write_text("item_id,title,colour\n14x,a blue sea,blue\n3,another title,\n15x,quantum,\n")
    return path


def user(bundle, encoder):
    history = random_sequence(6, items=KNOWN)
    encoded = encoder.infer(EncodeRequest(history, len(bundle.catalogue)))
    return encoded, UserState(encoded.states, history)


def served(bundle):
    encoder, generator = TorchEncoder(), TorchBeamGenerator()
    encoder.load(bundle)
    generator.load(bundle)
    return encoder, generator


def by_item(items, scores):
    return dict(zip(items.tolist(), scores.tolist(), strict=True))


def test_the_new_version_holds_the_items_in_every_table_and_the_rest_as_it_was(store, table):
    old = store.open()
    said = genrec("add-items", table, "--model-dir", store.root, "--first-seen", "2026-01-02")
    new = store.open()
    assert "published shop/2: 2 items added to the 12 of shop/1" in said
    assert "1 of them share no word" in said
    assert "genrec compile" not in said
    assert list(new.catalogue.items[:KNOWN]) == list(old.catalogue.items)
    assert list(new.catalogue.items[KNOWN:]) == [Item("14x", "a blue sea", {"colour": "blue"}), Item("15x", "quantum")]
    assert new.popularity.tolist() == [*old.popularity.tolist(), 0, 0]
    assert new.first_seen.tolist() == [*old.first_seen.tolist(), 1_767_312_000, 1_767_312_000]
    assert (new.item_vectors[: KNOWN + 1] == old.item_vectors).all()
    assert (new.semantic_ids.codes[: KNOWN + 1] == old.semantic_ids.codes).all()
    assert new.semantic_ids.version == new.manifest.decoder.semantic_ids != old.manifest.decoder.semantic_ids
    for file in set(GENERATIVE) - {SEMANTIC_IDS}:
        assert new.manifest.files[file] == old.manifest.files[file], file
    assert (new.manifest.quality, new.manifest.blend) == (old.manifest.quality, old.manifest.blend)
    changed = {key for key, value in new.manifest.training.items() if old.manifest.training.get(key) != value}
    assert changed == {"added_items", "item_order_sha256"}
    assert new.manifest.training["added_items"] == 2


def test_the_embedding_of_a_new_item_is_its_unit_vector_at_the_length_of_those_it_came_from(store, table):
    old = load_model(store.open()).item_embedding.weight.detach().numpy()
    genrec("add-items", table, "--model-dir", store.root)
    bundle = store.open()
    model = load_model(bundle)
    weights = model.item_embedding.weight.detach().numpy()
    assert (weights[: KNOWN + 1] == old).all()
    assert model.item_vectors().detach().numpy() == pytest.approx(bundle.item_vectors, abs=1e-6)
    blue = [index for index in range(1, KNOWN + 1) if "blue" in bundle.catalogue[index].title]
    lengths = np.linalg.norm(old, axis=1)
    assert np.linalg.norm(weights[13]) == pytest.approx(lengths[blue].mean(), rel=1e-5)
    assert np.linalg.norm(weights[14]) == pytest.approx(lengths[1:].mean(), rel=1e-5)
    assert (bundle.item_vectors[blue] @ bundle.item_vectors[13]).mean() > (
        bundle.item_vectors[1 : KNOWN + 1] @ bundle.item_vectors[13]
    ).mean()


def test_a_new_item_stands_in_encoder_and_ranker_where_one_that_had_events_or_was_added_before_stands(store, table, tmp_path):
    blue = [index for index in range(1, KNOWN + 1) if "blue" in store.open().catalogue[index].title]
    with store.recompile(store.open()) as draft:
        learnt = np.load(draft.path / LEARNT)
        learnt[blue[1:]] = False
        np.save(draft.path / LEARNT, learnt)
    genrec("add-items", table, "--model-dir", store.root)
    (later := tmp_path / "later.csv").write_text("item_id,title\n16x,sea leap\n")
    genrec("add-items", later, "--model-dir", store.root)
    bundle = store.open()
    for model in load_model(bundle), load_ranker(bundle):
        vectors = model.item_vectors().detach().numpy()
        assert vectors[13] == pytest.approx(vectors[blue[0]], abs=1e-6)
        assert vectors[15] == pytest.approx(vectors[13], abs=1e-6)


def test_items_added_to_a_version_that_does_not_record_what_it_has_learnt_count_as_learnt(store, table, tmp_path):
    genrec("add-items", table, "--model-dir", store.root)
    with store.recompile(store.open()) as draft:
        (draft.path / LEARNT).unlink()
    assert store.open().learnt.tolist() == [False, *[True] * (KNOWN + 2)]


def test_old_items_score_as_before_and_new_ones_are_recommended_only_where_allowed(store, table):
    old = store.open()
    genrec("add-items", table, "--model-dir", store.root)
    new = store.open()
    (old_encoder, old_generator), (encoder, generator) = served(old), served(new)
    before, (retrieved, state) = user(old, old_encoder), user(new, encoder)
    scores, scores_before = by_item(retrieved.items, retrieved.scores), by_item(before[0].items, before[0].scores)
    assert {item: scores[item] for item in scores_before} == pytest.approx(scores_before, abs=1e-5)
    assert set(scores) - set(scores_before) == set(NEW.tolist())

    def generate(engine, of, blocked=NOTHING, among=None):
        found = engine.infer(GenerateRequest(of, 14, 14, blocked=blocked, among=among))
        return by_item(found.items, found.log_probs)

    as_before = generate(old_generator, before[1])
    assert generate(generator, state, blocked=NEW) == pytest.approx(as_before, abs=1e-4)
    everything = generate(generator, state)
    assert set(everything) == set(range(1, KNOWN + 3))
    assert np.exp(list(everything.values())).sum() == pytest.approx(1, abs=1e-4)
    assert set(generate(generator, state, among=NEW)) == set(NEW.tolist())
    assert set(encoder.infer(EncodeRequest(state.sequence, 5, among=NEW)).items.tolist()) == set(NEW.tolist())


def test_old_candidates_are_ranked_as_before_and_new_ones_beside_them(store, table):
    old = store.open()
    genrec("add-items", table, "--model-dir", store.root)
    rankers = TorchRanker(), TorchRanker()
    for ranker, bundle in zip(rankers, (old, store.open()), strict=True):
        ranker.load(bundle)
    history, known = random_sequence(6, items=KNOWN), np.arange(1, KNOWN + 1, dtype=np.int32)
    before, after = (ranker.infer(RankRequest(history, known)).predictions for ranker in rankers)
    assert after == pytest.approx(before, abs=1e-6)
    assert np.isfinite(rankers[1].infer(RankRequest(history, NEW)).predictions).all()


def test_the_words_of_all_items_are_cut_once_for_encoder_and_ranker(store, table, monkeypatch):
    monkeypatch.setattr(new_items, "words_of", cut := Mock(wraps=new_items.words_of))
    genrec("add-items", table, "--model-dir", store.root)
    assert cut.call_count == KNOWN + len(NEW)


def test_a_history_may_hold_a_new_item(store, table):
    genrec("add-items", table, "--model-dir", store.root)
    encoder, generator = served(store.open())
    history = random_sequence(4, items=KNOWN)
    history.items[-1] = NEW[0]
    encoded = encoder.infer(EncodeRequest(history, 5))
    found = generator.infer(GenerateRequest(UserState(encoded.states, history), 5, 5, blocked=NOTHING))
    assert np.isfinite(found.log_probs).all()
    assert len(found.items) == 5


def test_items_may_be_added_again_and_nothing_new_publishes_nothing(store, table, tmp_path):
    genrec("add-items", table, "--model-dir", store.root)
    assert "nothing to add: shop/2 holds all 3 items" in genrec("add-items", table, "--model-dir", store.root)
    assert store.versions() == [1, 2]
    more = tmp_path / "more.parquet"
    pq.write_table(pa.table({"sku": ["20x", "14x"], "label": ["red berry", "a blue sea"]}), more)
    genrec("add-items", more, "--model-dir", store.root, "--item-id-column", "sku", "--item-title-column", "label")
    bundle = store.open()
    assert (bundle.version, len(bundle.catalogue), bundle.manifest.training["added_items"]) == ("shop/3", 15, 3)
    assert bundle.catalogue.items[-1] == Item("20x", "red berry")
    served(bundle)


def test_items_that_are_known_by_their_ids_alone_are_counted_whether_or_not_others_are_added(tmp_path, table):
    store = BundleStore(tmp_path / "plain")
    with store.recompile(make_bundle(store.root, items=3)) as draft:
        write_catalogue(Catalogue([Item("14x", "14x"), Item("15x", "15x"), Item("4", "Item 4")]), draft.path / CATALOGUE)
    (same := tmp_path / "same.csv").write_text("item_id,title\n14x,14x\n15x,\n4,another title\n")
    assert "by their ids alone" not in genrec("add-items", same, "--model-dir", store.root)
    for version in (2, 3):
        told = genrec("add-items", table, "--model-dir", store.root)
        assert f"2 items of {table} are known to plain/{version} by their ids alone" in told
        assert "move their rows to the table of items, and train anew" in told


def test_a_model_without_a_decoder_grows_and_says_which_command_compiles_it_again(tmp_path, table):
    store = BundleStore(tmp_path / "plain")
    with store.recompile(make_bundle(store.root, items=KNOWN)) as draft:
        (draft.path / "encode.onnx").write_bytes(b"the old table")
        draft.artifacts = [Artifact(kind="onnx", graph="encode", file="encode.onnx", builder="none")]
    assert f"so PyTorch serves it until this is done: genrec compile --model-dir {store.root}" in genrec(
        "add-items", table, "--model-dir", store.root
    )
    bundle = store.open()
    assert (len(bundle.catalogue), bundle.manifest.artifacts, bundle.manifest.compiled_from) == (14, [], None)
    assert "encode.onnx" not in bundle.manifest.files
    encoder = TorchEncoder()
    encoder.load(bundle)
    assert set(encoder.infer(EncodeRequest(random_sequence(5, items=14), 14)).items.tolist()) == set(range(1, 15))


def test_where_every_path_is_taken_or_there_are_no_codebooks_nothing_is_published(store, tmp_path):
    sizes = store.open().semantic_ids.sizes
    crowd = tmp_path / "crowd.csv"
    crowd.write_text("item_id,title\n" + "".join(f"c{row},red berry\n" for row in range(int(np.prod(sizes)) - KNOWN + 1)))
    with pytest.raises(DataError, match="paths are taken; train anew"):
        genrec("add-items", crowd, "--model-dir", store.root)
    assert store.versions() == [1]
    random = make_generative_bundle(tmp_path / "random", items=20)
    with pytest.raises(DataError, match="0 codebooks for 3 levels"):
        genrec("add-items", crowd, "--model-dir", random.path.parent)


def test_columns_are_named_as_for_the_training_unless_said_otherwise(store, tmp_path):
    with store.recompile(store.open()) as draft:
        draft.training["read_as"] |= {"item_id_column": "sku", "item_title_column": "label"}
    table = tmp_path / "new.csv"
    table.write_text("sku,label,words\n14x,a blue sea,a red berry\n")
    genrec("add-items", table, "--model-dir", store.root, "--item-title-column", "words")
    assert store.open().catalogue[KNOWN + 1].title == "a red berry"


def test_a_version_with_added_items_is_evaluated_on_tables_with_and_without_them(store, table, trained, tmp_path):
    genrec("add-items", table, "--model-dir", store.root)
    assert "shop/2, 40 users' last events" in genrec("evaluate", "--model-dir", store.root)
    (events := tmp_path / "events.csv").write_text((trained.parent / "events.csv").read_text() + "u0,14x,99000\n")
    (items := tmp_path / "items.csv").write_text((trained.parent / "items.csv").read_text() + "14x,a blue sea\n")
    assert "shop/2, 40 users' last events" in genrec("evaluate", "--model-dir", store.root, "--path", events, "--items", items)
    events.write_text(events.read_text() + "u0,stranger,99001\n")
    assert "shop/2, 39 users' last events" in genrec("evaluate", "--model-dir", store.root, "--path", events)
    with pytest.raises(DataError, match=r"shop/2 knows 12 items, .*shop/2 lacks 'stranger'; give the data set the model was trained on"):
        genrec("train-ranker", "--model-dir", store.root, "--path", events)


@pytest.mark.parametrize("appended", [False, True])
def test_a_ranker_is_trained_without_the_added_items_and_has_them_where_those_like_them_stand(store, table, trained, tmp_path, appended):
    genrec("add-items", table, "--model-dir", store.root)
    asked = []
    if appended:
        (items := tmp_path / "items.csv").write_text("item_id,title\n15x,quantum\n" + (trained.parent / "items.csv").read_text()[14:])
        (events := tmp_path / "events.csv").write_text((trained.parent / "events.csv").read_text() + "u0,15x,99000\nnew,15x,1\n")
        asked = ["--items", items, "--path", events]
    genrec("train-ranker", "--model-dir", store.root, "--epochs", 3, "--learning-rate", 0.05, *asked)
    bundle = store.open()
    assert (bundle.version, len(bundle.catalogue), bundle.manifest.ranker.config["items"]) == ("shop/3", KNOWN + 2, KNOWN + 2)
    vectors = load_ranker(bundle).item_vectors().detach().numpy()
    blue = [index for index in range(1, KNOWN + 1) if "blue" in bundle.catalogue[index].title]
    for item, like in ((13, blue), (14, range(1, KNOWN + 1))):
        mean = vectors[list(like)].mean(axis=0)
        assert vectors[item] == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
    (later := tmp_path / "later.csv").write_text("item_id,title\n16x,sea leap\n")
    genrec("add-items", later, "--model-dir", store.root)
    later_vectors = load_ranker(store.open()).item_vectors().detach().numpy()
    assert later_vectors[15] == pytest.approx(vectors[13], abs=1e-6)


def test_train_ranker_refuses_a_table_that_lacks_an_item_of_the_training(store, table, trained, tmp_path):
    genrec("add-items", table, "--model-dir", store.root)
    (items := tmp_path / "items.csv").write_text("item_id,title\n16x,other\n" + (trained.parent / "items.csv").read_text()[14:])
    with pytest.raises(DataError, match=r"knows 12 items, .* shop/2 lacks '16x'; give the data set the model was trained on$"):
        genrec("train-ranker", "--model-dir", store.root, "--items", items)


def test_bad_rows_are_refused_or_counted_and_a_missing_model_is_named(store, tmp_path):
    table = tmp_path / "bad.csv"
    table.write_text("item_id,title\n,nameless\nn1,red berry\n")
    with pytest.raises(DataError, match=r"bad.csv:2: the item id is empty"):
        genrec("add-items", table, "--model-dir", store.root)
    assert "skipped 1 bad rows" in genrec("add-items", table, "--model-dir", store.root, "--skip-bad-rows")
    assert len(store.open().catalogue) == KNOWN + 1
    with pytest.raises(BundleError, match="nowhere"):
        genrec("add-items", table, "--model-dir", tmp_path / "nowhere")


def test_of_two_at_once_the_later_one_leaves_the_model_with_the_earlier_ones_items_and_says_so(tmp_path, table, monkeypatch):
    store = BundleStore(tmp_path / "plain")
    make_bundle(store.root, items=KNOWN)
    other = tmp_path / "other.csv"
    other.write_text("item_id,title\n20x,red berry\n")
    read = add_items.read_items

    def meanwhile(path, options):
        if path == table:
            genrec("add-items", other, "--model-dir", store.root)
        return read(path, options)

    monkeypatch.setattr(add_items, "read_items", meanwhile)
    later = CliRunner().invoke(app, ["add-items", str(table), "--model-dir", str(store.root)])
    assert later.exit_code == 1
    assert "published plain/3: 2 items added to the 12 of plain/1" in later.output
    assert "version 2 became current meanwhile and stays so; run the same command again to add the items to that one" in later.output
    assert store.current() == 2
    monkeypatch.undo()
    genrec("add-items", table, "--model-dir", store.root)
    assert [item.item_id for item in store.open().catalogue.items[KNOWN:]] == ["20x", "14x", "15x"]
