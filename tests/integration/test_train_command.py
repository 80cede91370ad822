"""`genrec train`, `evaluate` and `import meta` from a table or a checkpoint to a published, measured bundle."""

import json
import shutil
from errno import ENOSPC
from functools import cache

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from cluster.bundle import CATALOGUE, OPTIONAL, RANKER
from cluster.bundle_store import BundleStore
from cluster.catalogue_file import write_catalogue
from cluster.errors import BundleError, ConfigError, DataError, UnknownChoice
from cluster.registry import DATASETS, choose
from cluster.values import EncodeRequest
from deployments.cli import evaluate, import_, train, train_ranker
from deployments.training.pretrained import publish_pretrained, read_pretrained
from deployments.training.provenance import RANKED, recorded_strategies
from integrations.datasets.table import read_table
from integrations.hstu.encoder import TorchEncoder
from integrations.hstu.weights import load_model
from pipelines.train import Trainer
from pipelines.train_decoder import DecoderTrainer
from tests.bundles import make_bundle, random_sequence
from tests.hstu_oracle import hstu_states, meta_state

ENCODER = ["--dim", "8", "--max-history", "10", "--batch-users", "16", "--learning-rate", "0.01", "--ranker-epochs", "1"]
SMALL = [*ENCODER, "--prompt-length", "8", "--decoder-epochs", "2"]
WHOLE = ["--epochs", 2, "--device", "cpu", *SMALL]


app = typer.Typer()
app.command("train")(train.train)
app.command("train-ranker")(train_ranker.train_ranker)
app.command("evaluate")(evaluate.evaluate)
app.add_typer(import_.app, name="import")


def written_table(directory):
    rng = np.random.default_rng(0)
    rows = [f"u{user},{(user + step) % 12 + 1},{1000 * step + user}" for user in range(40) for step in range(int(rng.integers(4, 15)))]
    path = directory / "events.csv"
    path.write_text("\n".join(["user,item,timestamp", *rows]) + "\n")
    return path


@pytest.fixture
def table(tmp_path):
    return written_table(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with the table, a model `shop` that was trained on it with WHOLE and these options, once, and its `export`."""

    @cache
    def trained_with(*options):
        root = tmp_path_factory.mktemp("trained")
        where = ["--path", written_table(root), "--model-dir", root / "shop", "--export", root / "export"]
        genrec("train", "table", *where, *options, *WHOLE)
        return root

    return trained_with


def genrec(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_table_becomes_a_published_model_and_evaluate_measures_its_quality_again(trained):
    table, model_dir = (trained("--refit") / name for name in ("events.csv", "shop"))
    bundle = BundleStore(model_dir).open()
    assert bundle.manifest.training["users"] == 40
    assert bundle.manifest.training["refit"] is True
    assert set(bundle.manifest.training["versions"]) == {"python", "genrec", "torch", "numpy"}
    assert int(bundle.popularity.sum()) == bundle.manifest.training["events"]
    assert not list(model_dir.glob(".training*"))
    measured = json.loads(genrec("evaluate", "table", "--path", table, "--model-dir", model_dir, "--json"))
    assert measured["model"] == "shop/1"
    assert json.loads(genrec("evaluate", "--model-dir", model_dir, "--json")) == measured, "it remembers its table"
    assert {name: measured[name] for name in bundle.manifest.quality} == bundle.manifest.quality


def test_the_same_seed_gives_the_same_weights(table, tmp_path):
    models = []
    for name in ("first", "second"):
        options = ["--epochs", 1, "--family", "sasrec", "--device", "cpu", *SMALL]
        genrec("train", "table", "--path", table, "--model-dir", tmp_path / name, *options)
        models.append(load_model(BundleStore(tmp_path / name).open()).state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_an_export_joined_with_its_data_set_is_the_same_model_and_refuses_another(trained, table, tmp_path):
    export, original = trained() / "export", BundleStore(trained() / "shop").open()
    exported = {str(path.relative_to(export)) for path in export.rglob("*") if path.is_file()}
    assert exported == {"model.json", "weights.safetensors", *OPTIONAL}
    assert original.manifest.training.keys() - read_pretrained(export).training.keys() == {"read_as"}, "it names paths"
    joined = publish_pretrained(export, choose("dataset", DATASETS, "table")(table), tmp_path / "joined")
    assert joined.manifest.quality == original.manifest.quality
    for part in ("decoder", "blend", "ranker"):
        assert getattr(joined.manifest, part) == getattr(original.manifest, part) is not None, part
    for file in ("weights.safetensors", *OPTIONAL):
        assert joined.manifest.files[file] == original.manifest.files[file], file
    table.write_text(table.read_text() + "u1,99,99999\n")
    with pytest.raises(DataError, match="other items"):
        publish_pretrained(export, choose("dataset", DATASETS, "table")(table), tmp_path / "joined")


@pytest.mark.parametrize("file", ["weights.safetensors", "decoder/model.safetensors"])
def test_an_export_of_which_a_bit_was_flipped_is_refused_and_one_without_checksums_is_not(trained, table, tmp_path, file):
    export, dataset = shutil.copytree(trained() / "export", tmp_path / "export"), choose("dataset", DATASETS, "table")(table)
    content = bytearray((export / file).read_bytes())
    content[-8] ^= 4
    (export / file).write_bytes(content)
    with pytest.raises(BundleError, match=rf"{file} does not match its checksum in model\.json"):
        publish_pretrained(export, dataset, tmp_path / "joined")
    assert BundleStore(tmp_path / "joined").current() is None
    described = read_pretrained(export).model_dump(mode="json", exclude={"sha256"})  # as earlier releases wrote it
    (export / "model.json").write_text(json.dumps(described))
    assert publish_pretrained(export, dataset, tmp_path / "joined").manifest.version == 1


def test_training_fits_the_blend_on_validation_and_evaluate_measures_every_strategy_again(trained):
    table, model_dir = (trained() / name for name in ("events.csv", "shop"))
    manifest = BundleStore(model_dir).open().manifest
    assert manifest.blend is not None
    assert manifest.blend.fitted_on == "the second-last events of 40 users"
    assert manifest.training["decoder"]["semantic_ids"]["largest_cell"] >= 1
    measured = json.loads(genrec("evaluate", "table", "--path", table, "--model-dir", model_dir, "--json"))["strategies"]
    assert measured == recorded_strategies(manifest)
    assert set(measured) - {RANKED} == {"retrieval", "generative", "unified"}


def test_a_model_may_be_trained_without_a_decoder(table, tmp_path):
    genrec("train", "table", "--path", table, "--model-dir", tmp_path / "shop", "--epochs", 1, "--decoder", "none", *ENCODER)
    bundle = BundleStore(tmp_path / "shop").open()
    assert (bundle.manifest.decoder, bundle.manifest.blend) == (None, None)
    with pytest.raises(UnknownChoice, match="choose from base, none, tiny"):
        genrec("train", "table", "--path", table, "--model-dir", tmp_path / "shop", "--decoder", "huge", *ENCODER)


def test_a_ranker_can_be_left_out_and_added_later(table, tmp_path):
    where = ["table", "--path", table, "--model-dir", tmp_path / "shop"]
    genrec("train", *where, "--epochs", 1, "--decoder", "none", "--no-ranker", *ENCODER)
    plain = BundleStore(tmp_path / "shop").open()
    assert (plain.manifest.ranker, RANKER in plain.manifest.files) == (None, False)
    told = genrec("train-ranker", *where, "--epochs", 1, "--last-stage", "--export", tmp_path / "export")
    ranked = BundleStore(tmp_path / "shop").open()
    assert ranked.manifest.files["weights.safetensors"] == plain.manifest.files["weights.safetensors"]
    assert (ranked.version, ranked.ranker().tasks, ranked.ranker().last_stage) == ("shop/2", ("click",), True)
    assert {"found", "ranked"} == ranked.manifest.training["ranker"]["recommendations"].keys()
    strategies = json.loads(genrec("evaluate", *where, "--json"))["strategies"]
    assert strategies == recorded_strategies(ranked.manifest)
    assert set(strategies) == {"retrieval", RANKED}
    with pytest.raises(ConfigError, match="say which model"):
        genrec("train-ranker", "--epochs", 1)
    assert "it is their last stage" in told
    assert read_pretrained(tmp_path / "export").ranker == ranked.ranker()


@pytest.mark.parametrize("refit", [[], ["--refit"]])
def test_a_run_interrupted_while_its_decoder_is_trained_goes_on_from_there(trained, table, tmp_path, monkeypatch, refit):
    options = [*refit, *WHOLE]
    epochs, run_epoch = [], DecoderTrainer.run_epoch

    def interrupted(trainer, after_batch=None):
        if len(epochs) == (3 if refit else 1):
            raise Interrupted
        epochs.append(trainer.epoch)
        return run_epoch(trainer, after_batch)

    with monkeypatch.context() as patch:
        patch.setattr(DecoderTrainer, "run_epoch", interrupted)
        with pytest.raises(Interrupted):
            genrec("train", "table", "--path", table, "--model-dir", tmp_path / "parts", *options)
    genrec("train", "table", "--path", table, "--model-dir", tmp_path / "parts", "--resume", *options)
    whole, parts = (BundleStore(root).open().manifest for root in (trained(*refit) / "shop", tmp_path / "parts"))
    for file in ("weights.safetensors", *OPTIONAL):
        assert whole.files[file] == parts.files[file], file
    assert whole.blend == parts.blend
    assert not list((tmp_path / "parts").glob(".training*"))


class Interrupted(Exception):
    """Somebody pressed Ctrl-C."""


def test_a_broken_export_is_refused(tmp_path):
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(BundleError, match="does not describe a pre-trained model"):
        read_pretrained(tmp_path)


def test_evaluate_leaves_out_events_of_items_that_the_model_does_not_know_and_says_how_many(trained, table, tmp_path, caplog):
    later, without = tmp_path / "later.csv", tmp_path / "without.csv"
    rows = table.read_text().splitlines()
    later.write_text("\n".join([*rows, "u1,99,99998", "u1,1,99999", "u2,98,99999\n"]))
    without.write_text("\n".join([*(row for row in rows if not row.startswith("u2,")), "u1,1,99999\n"]))
    told = [
        json.loads(genrec("evaluate", "table", "--path", path, "--model-dir", trained() / "shop", "--json")) for path in (without, later)
    ]
    assert told[0] == told[1]
    (message,) = [record.getMessage() for record in caplog.records if record.name == "deployments.training.provenance"]
    said = f"2 of {len(rows) + 2:,} events are left out, and so are 1 users with one of them at the end"
    assert message == f"shop/1 does not know '99', '98' of {later}: {said}"


@pytest.mark.parametrize("split", [[], ["--validation"]])
def test_two_versions_are_evaluated_on_the_same_events_where_one_does_not_know_all_items_of_the_other(
    trained, table, tmp_path, monkeypatch, split
):
    table.write_text(table.read_text() + "u1,99,99999\nu2,98,99999\nu2,1,99999\nu3,97,0\n")
    genrec("train", "table", "--path", table, "--model-dir", tmp_path / "next", "--decoder", "none", "--no-ranker", *WHOLE)
    measured = []

    def note(model, interactions, **options):
        measured.append([[catalogue[item].item_id for item in one.items] for one in map(interactions.sequence, range(interactions.users))])
        return {}

    monkeypatch.setattr(evaluate, "evaluate_model", note)
    directories = trained() / "shop", tmp_path / "next"
    for directory, other in (directories, directories[::-1]):
        catalogue = BundleStore(directory).open().catalogue
        genrec("evaluate", "table", "--path", table, "--model-dir", directory, "--as-known-by", other, "--json", *split)
    assert measured[0] == measured[1]
    assert [len(events) > 0 for events in measured[0][1:4]] == [False, not split, True]


def test_evaluate_refuses_a_model_of_another_catalogue(trained, table, tmp_path):
    other = tmp_path / "other.csv"
    events = table.read_text()
    other.write_text(events + "".join(f"u1,99,{99999 + row}\n" for row in range(len(events.splitlines()))))
    with pytest.raises(DataError, match=r"shop/1 does not know '99' of .*other\.csv, and (\d+) of \d+ events are of these; give the data"):
        genrec("evaluate", "table", "--path", other, "--model-dir", trained() / "shop")


def test_evaluate_measures_the_same_of_events_whose_rows_are_in_another_order(trained, table, tmp_path):
    header, *rows = table.read_text().splitlines()
    other = tmp_path / "other.csv"
    other.write_text("\n".join([header, *reversed(rows)]))
    told = [json.loads(genrec("evaluate", "table", "--path", path, "--model-dir", trained() / "shop", "--json")) for path in (table, other)]
    assert told[0].pop("strategies") == {name: pytest.approx(figures) for name, figures in told[1].pop("strategies").items()}
    assert told[0] == pytest.approx(told[1])


def test_an_interrupted_run_is_told_with_what_it_has_done_and_is_still_there_where_the_next_one_is_interrupted_too(
    table, tmp_path, monkeypatch
):
    train = ("train", "table", "--path", table, "--model-dir", tmp_path / "shop", "--no-ranker", *WHOLE)

    def interrupted(trainer, after_batch=None):
        raise Interrupted

    for trainer in (DecoderTrainer, Trainer):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "run_epoch", interrupted)
            with pytest.raises(Interrupted):
                genrec(*train)
    told = CliRunner().invoke(app, [str(argument) for argument in train]).stderr
    assert "an interrupted run is here (train: epoch 2); --resume goes on from it, without that it is gone after an epoch" in told


def test_items_without_events_are_counted_before_the_training_with_what_adds_them_after_it(table, tmp_path, monkeypatch):
    def interrupted(trainer, after_batch=None):
        raise Interrupted

    monkeypatch.setattr(Trainer, "run_epoch", interrupted)
    (items := tmp_path / "items.csv").write_text("item_id,title\n" + "".join(f"{item},n{item}\n" for item in range(1, 15)))
    train = ["train", "table", "--path", str(table), "--model-dir", str(tmp_path / "shop"), *map(str, WHOLE)]
    told = CliRunner().invoke(app, [*train, "--items", str(items)]).stderr
    assert f"2 of the 14 items of {table} have no event to learn from, and will hardly ever be recommended" in told
    assert "train without those that are new, then add them by genrec add-items" in told
    assert "no event" not in CliRunner().invoke(app, train).stderr
    table.write_text(table.read_text() + "".join(f"late,{item},{item}\n" for item in (1, 2, 13, 14)))
    for options, count in ([], 2), (["--refit"], 1), (["--validate-every", "0"], 1):
        assert f"{count} of the 14 items" in CliRunner().invoke(app, [*train, *options]).stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "without validation the blend keeps its default weights and the ranker is not the last stage of recommendations; a refit"),
        (["--decoder", "none"], "without validation the ranker is not the last stage of recommendations; a refit"),
        (["--decoder", "none", "--no-ranker"], ""),
    ],
)
def test_what_a_training_without_validation_leaves_undecided_is_told_before_it(table, tmp_path, monkeypatch, options, told):
    def interrupted(trainer, after_batch=None):
        raise Interrupted

    monkeypatch.setattr(Trainer, "run_epoch", interrupted)
    train = ["train", "table", "--path", str(table), "--model-dir", str(tmp_path / "shop"), *map(str, WHOLE), *options]
    lines = CliRunner().invoke(app, [*train, "--validate-every", "0"]).stderr.splitlines()
    assert [line.startswith(told) for line in lines if "without validation" in line] == [True] * bool(told)
    assert "without validation" not in CliRunner().invoke(app, train).stderr


def test_a_refit_without_validation_is_refused_before_the_training(table, tmp_path):
    refit = ["--refit", "--validate-every", "0", *SMALL]
    with pytest.raises(ConfigError, match=r"as many epochs as validation chose, and --validate-every 0 has none; leave one of them out"):
        genrec("train", "table", "--path", table, "--model-dir", tmp_path / "shop", *refit)
    assert not (tmp_path / "shop").exists()


def test_resume_without_a_checkpoint_says_so(table, tmp_path):
    with pytest.raises(DataError, match="start without --resume"):
        genrec("train", "table", "--path", table, "--model-dir", tmp_path / "shop", "--resume", *SMALL)
    assert list(tmp_path.iterdir()) == [table], "nothing is left of a training that was refused"


@pytest.mark.parametrize(
    "command",
    [("train", "table", *WHOLE, "--decoder", "none", "--no-ranker"), ("import", "meta", "c", "--config", "c.gin", "--dataset", "table")],
)
def test_a_directory_that_no_manifest_could_name_is_refused_before_anything_is_trained(table, tmp_path, command):
    with pytest.raises(BundleError, match=r"the model's directory '.*caf\\udce9' is no Unicode text, .*; give another directory"):
        genrec(*command, "--path", table, "--model-dir", tmp_path / "caf\udce9")
    assert list(tmp_path.iterdir()) == [table]


@pytest.mark.parametrize("command", ["train", "train-ranker"])
def test_an_export_that_cannot_be_written_ends_the_command_before_anything_is_trained(table, tmp_path, command):
    store = BundleStore(tmp_path / "shop")
    make_bundle(store.root, items=12)
    with store.recompile(store.open()) as draft:
        write_catalogue(read_table(table).catalogue, draft.path / CATALOGUE)
    options = ["--decoder", "none", "--no-ranker", *WHOLE] if command == "train" else []
    with pytest.raises(FileExistsError):
        genrec(command, "table", "--path", table, "--model-dir", store.root, "--export", table, *options)
    assert store.versions() == [1, 2]


@pytest.mark.parametrize("command", ["train", "train-ranker"])
def test_an_export_into_a_published_version_is_refused_before_the_data_is_read(tmp_path, command):
    bundle = make_bundle(tmp_path / "shop", items=12)
    with pytest.raises(ConfigError, match=r"shop/1 is a published version of a model, which an export would destroy; name another"):
        genrec(command, "table", "--path", tmp_path / "not there.csv", "--model-dir", bundle.path.parent, "--export", bundle.path)
    assert BundleStore(bundle.path.parent).open() == bundle


@pytest.mark.parametrize("command", ["train", "train-ranker"])
def test_an_export_into_the_place_of_the_next_version_is_refused_before_the_data_is_read(tmp_path, command):
    store = BundleStore(make_bundle(tmp_path / "shop", items=12).path.parent)
    with pytest.raises(ConfigError, match=r"shop/2 is the place of a version of the model, which an export would take; name another"):
        genrec(command, "table", "--path", tmp_path / "not there.csv", "--model-dir", store.root, "--export", store.root / "2")
    assert store.versions() == [1]


def test_an_export_into_the_place_of_the_first_version_is_refused_before_anything_is_trained(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"is the place of a version of the model"):
        genrec("train", "table", "--path", tmp_path / "not there.csv", "--model-dir", "shop", "--export", "shop/1")
    with pytest.raises(ConfigError, match=r"is the place of a version of the model"):
        genrec("train", "table", "--path", table, "--export", f"models/{table.stem}/1")
    assert not BundleStore(tmp_path / "models" / table.stem).versions()


def test_an_export_into_a_directory_that_takes_no_file_is_refused_before_the_data_is_read(tmp_path):
    with pytest.raises(OSError, match="'/proc/") as refused:
        genrec("train", "table", "--path", tmp_path / "not there.csv", "--export", "/proc")
    assert not isinstance(refused.value, DataError)


def test_where_an_export_fails_the_published_version_is_told_all_the_same(table, tmp_path, monkeypatch):
    def on_a_full_disk(*_):
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(train, "export_pretrained", on_a_full_disk)
    arguments = ["--path", table, "--model-dir", tmp_path / "shop", "--export", tmp_path / "export", "--decoder", "none", "--no-ranker"]
    ended = CliRunner().invoke(app, [str(one) for one in ("train", "table", *arguments, *WHOLE)])
    assert isinstance(ended.exception, OSError)
    assert f"published {tmp_path}/shop/1" in ended.stderr
    assert "MRR" in ended.stdout


def test_publishes_a_checkpoint_of_metas_trainer(table, tmp_path):
    state = meta_state(np.random.default_rng(0), rows=20, dim=8, layers=2, heads=2, dqk=4, dv=4, n=21)
    saved = {f"module.{name}": torch.from_numpy(value) for name, value in state.items()}
    torch.save({"model_state_dict": saved}, tmp_path / "checkpoint")
    sizes = {"dim": 8, "layers": 2, "heads": 2, "attention_dim": 4, "linear_dim": 4, "max_length": 21, "max_history": 10}
    (tmp_path / "sizes.yaml").write_text(json.dumps(sizes))
    where = ["--dataset", "table", "--path", table, "--model-dir", tmp_path / "meta"]
    genrec("import", "meta", tmp_path / "checkpoint", "--config", tmp_path / "sizes.yaml", *where)
    bundle = BundleStore(tmp_path / "meta").open()
    weights = load_model(bundle).state_dict()
    index = bundle.catalogue.index_of("7")
    expected = state["_embedding_module._item_emb.weight"][7]
    assert np.array_equal(weights["item_embedding.weight"][index].numpy(), expected)
    assert bundle.manifest.quality["hr@200"] == 1.0

    encoder, embeddings = TorchEncoder(), state["_embedding_module._item_emb.weight"]
    encoder.load(bundle)
    sequence = random_sequence(37, items=len(bundle.catalogue))
    rows = [int(bundle.catalogue[int(item)].item_id) for item in sequence.items[-10:]]
    shape = {"layers": 2, "heads": 2, "dqk": 4, "dv": 4, "n": 21}
    theirs = hstu_states(state, rows, sequence.timestamps[-10:].tolist(), sequence.request_time, **shape)[-1]
    cosines = (embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)) @ theirs
    best = sorted((int(item.item_id) for item in bundle.catalogue.items), key=lambda row: -cosines[row])
    assert [int(bundle.catalogue[int(item)].item_id) for item in encoder.infer(EncodeRequest(sequence, 10)).items] == best[:10]


def test_importing_tells_of_weights_in_bf16_and_of_rows_that_no_item_has(table, tmp_path):
    state = meta_state(np.random.default_rng(0), rows=20, dim=8, layers=1, heads=1, dqk=4, dv=4, n=21)
    torch.save({"model_state_dict": {name: torch.from_numpy(value).bfloat16() for name, value in state.items()}}, tmp_path / "checkpoint")
    sizes = {"dim": 8, "layers": 1, "heads": 1, "attention_dim": 4, "linear_dim": 4, "max_length": 21, "max_history": 10}
    (tmp_path / "sizes.yaml").write_text(json.dumps(sizes))
    where = ["--dataset", "table", "--path", table, "--model-dir", tmp_path / "meta", "--window-step", 2]
    command = ["import", "meta", tmp_path / "checkpoint", "--config", tmp_path / "sizes.yaml", *where]
    result = CliRunner().invoke(app, [str(one) for one in command])
    assert "the weights are bf16, the arithmetic is fp32" in result.stderr
    assert "has embeddings of items 1..19, the data set's largest item number is 12" in result.stderr
    assert BundleStore(tmp_path / "meta").open().manifest.model.config["window_step"] == 2
