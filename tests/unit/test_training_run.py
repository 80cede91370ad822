"""A whole run: train, refit, measure; interrupted and resumed."""

import errno
import fcntl
import os
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from cluster.bundle import ModelRecord
from cluster.dataset import Catalogue, Dataset
from cluster.errors import ConfigError, DataError, UnknownChoice
from cluster.values import Item
from pipelines import evaluate as evaluation
from pipelines import generative_run, training_run
from pipelines.assign_ids import build_semantic_ids
from pipelines.epochs import read_checkpoint
from pipelines.evaluate import evaluate, ranks
from pipelines.generative_run import IdOptions, train_decoder
from pipelines.ranker_run import train_ranker
from pipelines.train import TrainOptions
from pipelines.train_decoder import DecoderOptions
from pipelines.train_ranker import RankerOptions
from pipelines.training_run import RunOptions, TrainingRun, alone, forget_checkpoints, new_model, saved_epochs, train_model
from tests.disks import largest_file
from tests.mutations import flip_a_bit
from tests.unit.test_training import ITEMS, walks

SIZES = {"items": ITEMS, "dim": 16, "attention_dim": 8, "linear_dim": 8, "max_length": 31, "max_history": 20}
RECORD = ModelRecord(family="hstu", config=SIZES)
IDS, DECODER = IdOptions(), {"prompt_length": 8, "hidden": 32, "heads": 1, "layers": 1, "feedforward": 16}
OPTIONS = TrainOptions(epochs=4, batch_users=16, learning_rate=1e-2)


class Interrupted(Exception):
    pass


class Watcher:
    """Writes down what it is told, and stops the run after a number of epochs."""

    def __init__(self, stop_after=None):
        self.notes, self.phases, self.epochs, self.shares, self.stop_after = [], [], [], [], stop_after

    def note(self, line):
        self.notes.append(line)

    def phase(self, name, epochs, done):
        self.phases.append((name, epochs, done))

    def batch(self, share):
        if len(self.epochs) == self.stop_after:
            raise Interrupted  # in the middle of an epoch, after the checkpoint of the one before
        self.shares.append(share)

    def epoch(self, report):
        self.epochs.append(report.epoch)


@pytest.fixture(scope="module")
def dataset():
    catalogue = Catalogue([Item(str(i), f"Item {i}") for i in range(1, ITEMS + 1)])
    return Dataset("walks", walks(), catalogue, "made up")


def same_weights(left, right):
    return all(torch.equal(tensor, right.state_dict()[name]) for name, tensor in left.state_dict().items())


def test_more_windows_than_one_a_user_are_told_once_before_the_training(dataset):
    run, few = RunOptions(refit=True, device="cpu"), replace(dataset, interactions=walks(users=3, shortest=300, longest=301))
    options, long, plain = OPTIONS.model_copy(update={"epochs": 1}), Watcher(), Watcher()
    train_model(TrainingRun(RECORD, few, run, long), options)
    train_model(TrainingRun(RECORD, dataset, run, plain), options)
    assert [line.partition(":")[0] for line in long.notes] == ["3 users give an epoch 45 windows, up to 15 each (33.3% of their events)"]
    assert plain.notes == []


@pytest.mark.parametrize("window", ["random", "latest"])
def test_a_run_tells_its_windows_once_also_where_it_begins_with_the_ranker(dataset, window):
    few = replace(dataset, interactions=walks(users=3, shortest=300, longest=301))
    ranker_only, whole = (TrainingRun(RECORD, few, RunOptions(device="cpu"), Watcher()) for _ in range(2))
    encoder = train_model(whole, OPTIONS.model_copy(update={"epochs": 1, "window": window})).model
    for run in (ranker_only, whole):
        train_ranker(run, encoder, RankerOptions(epochs=1, window=window))
    told = ["3 users give an epoch 45 windows, up to 15 each (33.3% of their events)"] if window == "random" else []
    assert [line.partition(":")[0] for line in ranker_only.observer.notes] == told
    assert [line.partition(": one of 20 events")[0] for line in whole.observer.notes] == told, "as the encoder's training begins"


def test_a_refit_learns_the_validation_events_for_as_many_epochs_as_validation_chose(dataset, monkeypatch):
    watcher, measured = Watcher(), Mock(wraps=evaluate)
    monkeypatch.setattr(training_run, "evaluate", measured)
    trained = train_model(TrainingRun(RECORD, dataset, RunOptions(refit=True, device="cpu"), watcher), OPTIONS)
    assert watcher.phases == [("train", 4, 0), ("refit", trained.best.epoch, 0)]
    assert watcher.epochs == [*range(1, trained.epochs + 1), *range(1, trained.best.epoch + 1)]
    assert max(watcher.shares) == 1
    assert trained.quality == evaluate(trained.model, dataset.interactions)
    assert trained.quality != evaluate(trained.validated, dataset.interactions)
    assert measured.call_count == 1, "the users' test events are ranked by the model that is published alone"


def test_the_trained_model_is_measured_on_a_bounded_number_of_users(dataset, monkeypatch):
    ranked = Mock(wraps=ranks)
    monkeypatch.setattr(evaluation, "ranks", ranked)
    monkeypatch.setattr(training_run, "MOST_USERS", 7)
    options = OPTIONS.model_copy(update={"epochs": 1, "validate_every": 0})
    trained = train_model(TrainingRun(RECORD, dataset, RunOptions(device="cpu"), Watcher()), options)
    assert [len(call.args[1]) for call in ranked.call_args_list] == [7]
    assert trained.course()["measured_users"] == 7
    assert trained.quality == evaluate(trained.model, dataset.interactions, most_users=7) != evaluate(trained.model, dataset.interactions)


@pytest.mark.parametrize("refit", [False, True])
def test_a_run_resumed_after_its_encoder_was_measured_does_not_measure_it_again(dataset, tmp_path, monkeypatch, refit):
    saved, again = (RunOptions(refit, "cpu", tmp_path / "run", resume=resume) for resume in (False, True))
    measured = Mock(wraps=evaluate)
    monkeypatch.setattr(training_run, "evaluate", measured)
    trained = train_model(TrainingRun(RECORD, dataset, saved, Watcher()), OPTIONS)
    resumed = train_model(TrainingRun(RECORD, dataset, again, Watcher()), OPTIONS)
    assert measured.call_count == 1
    assert resumed.quality == trained.quality
    assert same_weights(trained.model, resumed.model)


def test_what_is_trained_on_after_it_was_measured_is_measured_again(dataset, tmp_path, monkeypatch):
    short = OPTIONS.model_copy(update={"schedule": "constant", "epochs": 1})
    train_model(TrainingRun(RECORD, dataset, RunOptions(False, "cpu", tmp_path / "run"), Watcher()), short)
    monkeypatch.setattr(training_run, "evaluate", measured := Mock(wraps=evaluate))
    again, long = RunOptions(False, "cpu", tmp_path / "run", resume=True), short.model_copy(update={"epochs": 3})
    whole = train_model(TrainingRun(RECORD, dataset, RunOptions(device="cpu"), Watcher()), long)
    resumed = train_model(TrainingRun(RECORD, dataset, again, Watcher()), long)
    assert measured.call_count == 2
    assert resumed.quality == whole.quality
    assert same_weights(whole.model, resumed.model)


@pytest.mark.parametrize("stop_after", [2, 4, 5])
def test_a_run_interrupted_in_either_phase_and_resumed_ends_as_if_nothing_had_happened(dataset, tmp_path, stop_after):
    whole = train_model(TrainingRun(RECORD, dataset, RunOptions(refit=True, device="cpu"), Watcher()), OPTIONS)
    saved = RunOptions(refit=True, device="cpu", checkpoint=tmp_path / "run")
    with pytest.raises(Interrupted):
        train_model(TrainingRun(RECORD, dataset, saved, Watcher(stop_after)), OPTIONS)
    watcher = Watcher()
    resumed = train_model(TrainingRun(RECORD, dataset, RunOptions(True, "cpu", tmp_path / "run", resume=True), watcher), OPTIONS)
    assert watcher.phases[0] == ("train", 4, min(stop_after, 4))
    assert same_weights(whole.model, resumed.model)
    assert resumed.quality == whole.quality
    forget_checkpoints(saved)
    assert not list(tmp_path.iterdir())


def test_refuses_to_resume_from_nothing(dataset, tmp_path):
    with pytest.raises(DataError, match="no checkpoint"):
        train_model(TrainingRun(RECORD, dataset, RunOptions(checkpoint=tmp_path / "run", resume=True), Watcher()), OPTIONS)


def test_refuses_sizes_and_families_that_are_not_there():
    with pytest.raises(ConfigError, match=r"max_history \(300\) must be less than or equal to max_length \(31\)"):
        new_model(ModelRecord(family="hstu", config={**SIZES, "max_history": 300}), 0)
    with pytest.raises(UnknownChoice, match="choose from hstu, sasrec"):
        new_model(ModelRecord(family="gru", config=SIZES), 0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"window_step": 50}, "window_step (50) must be less than or equal to max_history (20)"),
        ({"dropout": 1.5, "dim": 0}, "dim = 0: Input should be greater than or equal to 1; dropout = 1.5: Input should be less than 1"),
    ],
)
def test_sizes_that_fit_no_model_are_refused_with_name_and_value_in_one_line(wrong, told):
    with pytest.raises(ConfigError) as refused:
        new_model(ModelRecord(family="hstu", config={**SIZES, **wrong}), seed=0)
    assert str(refused.value) == f"not a configuration of hstu: {told}"


def test_a_device_that_is_unknown_or_not_there_is_refused_with_the_choices(dataset, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnknownChoice, match="unknown device 'gpu'; choose from auto, cpu, cuda"):
        train_model(TrainingRun(RECORD, dataset, RunOptions(device="gpu"), Watcher()), OPTIONS)
    with pytest.raises(ConfigError, match="device cuda cannot be had: PyTorch finds no GPU here"):
        train_model(TrainingRun(RECORD, dataset, RunOptions(device="cuda"), Watcher()), OPTIONS)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_nothing_can_be_drawn_from_is_refused(seed):
    with pytest.raises(ValidationError, match="seed"):
        TrainOptions(seed=seed)


def test_an_interrupted_run_is_kept_until_another_one_has_saved_an_epoch_and_its_later_phases_are_not_resumed_by_that_one(
    dataset, tmp_path
):
    run = RunOptions(refit=True, device="cpu", checkpoint=tmp_path / "run")
    assert saved_epochs(run) == saved_epochs(RunOptions()) == {}
    with pytest.raises(Interrupted):
        train_model(TrainingRun(RECORD, dataset, run, Watcher(5)), OPTIONS)  # in the refit
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert saved_epochs(run) == {"train": 4, "refit": 1}
    with pytest.raises(Interrupted):
        train_model(TrainingRun(RECORD, dataset, run, Watcher(0)), OPTIONS)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept
    with pytest.raises(Interrupted):
        train_model(TrainingRun(RECORD, dataset, run, Watcher(1)), OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["run.train"]
    assert saved_epochs(run) == {"train": 1}


def test_a_disk_that_takes_no_checkpoint_keeps_those_of_an_interrupted_run(dataset, tmp_path):
    run = RunOptions(refit=True, device="cpu", checkpoint=tmp_path / "run")
    with pytest.raises(Interrupted):
        train_model(TrainingRun(RECORD, dataset, run, Watcher(5)), OPTIONS)
    with largest_file(1000), pytest.raises(DataError, match="disk full"):
        train_model(TrainingRun(RECORD, dataset, run, Watcher()), OPTIONS)
    assert saved_epochs(run) == {"train": 4, "refit": 1}


def test_a_damaged_checkpoint_is_no_epochs(tmp_path):
    (tmp_path / "run.train").write_bytes(b"x" * 100)
    assert saved_epochs(RunOptions(checkpoint=tmp_path / "run")) == {}


def test_two_runs_do_not_share_checkpoints_and_one_that_ended_keeps_no_other_out(tmp_path):
    run = RunOptions(checkpoint=tmp_path / "shop" / "run")
    for _ in range(2):
        with alone(run):
            with pytest.raises(ConfigError, match=r"another training is under way in .*shop; wait for its end"), alone(run):
                pass
            with alone(RunOptions(checkpoint=tmp_path / "other" / "run")), alone(RunOptions()), alone(RunOptions()):
                pass
        assert not (tmp_path / "shop").exists(), "it was made for the run, and nothing is left in it"


def test_a_lock_of_a_run_that_has_just_ended_is_none(tmp_path, monkeypatch):
    run, lock = RunOptions(checkpoint=tmp_path / "run"), fcntl.flock

    def as_the_other_run_ends(file, operation):
        (tmp_path / "run.lock").unlink()
        lock(file, operation)

    monkeypatch.setattr("fcntl.flock", as_the_other_run_ends)
    with pytest.raises(ConfigError, match="another training is under way"), alone(run):
        pass
    monkeypatch.undo()
    with alone(run):
        pass


def test_a_file_system_without_locks_is_named_with_the_cure(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", unsupported)
    with (
        pytest.raises(ConfigError, match=r"run\.lock cannot be locked .*No locks available.*; train on a file system that has locks"),
        alone(RunOptions(checkpoint=tmp_path / "run")),
    ):
        pass


def test_a_run_that_is_resumed_for_longer_does_its_later_phases_anew(dataset, tmp_path):
    short, long = (OPTIONS.model_copy(update={"schedule": "constant", "epochs": epochs}) for epochs in (2, 4))
    whole = train_model(TrainingRun(RECORD, dataset, RunOptions(refit=True, device="cpu"), Watcher()), long)
    with pytest.raises(Interrupted):
        train_model(TrainingRun(RECORD, dataset, RunOptions(True, "cpu", tmp_path / "run"), Watcher(3)), short)  # in the refit
    resumed = train_model(TrainingRun(RECORD, dataset, RunOptions(True, "cpu", tmp_path / "run", resume=True), Watcher()), long)
    assert whole.best.epoch > 2
    assert same_weights(whole.model, resumed.model)


def test_a_checkpoint_of_another_model_is_refused_though_its_weights_would_fit(dataset, tmp_path):
    run = RunOptions(device="cpu", checkpoint=tmp_path / "run")
    with pytest.raises(Interrupted):
        train_model(TrainingRun(RECORD, dataset, run, Watcher(1)), OPTIONS)
    other = RECORD.model_copy(update={"config": {**RECORD.config, "dropout": 0.4}})
    with pytest.raises(DataError, match=r"another model \(its config differ\)"):
        train_model(TrainingRun(other, dataset, RunOptions(False, "cpu", tmp_path / "run", resume=True), Watcher()), OPTIONS)


def test_a_checkpoint_of_other_events_is_refused_though_the_model_is_the_same(dataset, tmp_path):
    run = RunOptions(device="cpu", checkpoint=tmp_path / "run")
    with pytest.raises(Interrupted):
        train_model(TrainingRun(RECORD, dataset, run, Watcher(1)), OPTIONS)
    later = replace(dataset.interactions, timestamps=dataset.interactions.timestamps + 60)
    resumed = RunOptions(False, "cpu", tmp_path / "run", resume=True)
    with pytest.raises(DataError, match=r"another model \(its data differ\); give the same options and data"):
        train_model(TrainingRun(RECORD, replace(dataset, interactions=later), resumed, Watcher()), OPTIONS)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.999])
def test_a_checkpoint_that_is_cut_off_is_refused_by_its_name(dataset, tmp_path, kept):
    run = RunOptions(device="cpu", checkpoint=tmp_path / "run")
    with pytest.raises(Interrupted):
        train_model(TrainingRun(RECORD, dataset, run, Watcher(1)), OPTIONS)
    whole = (tmp_path / "run.train").read_bytes()
    (tmp_path / "run.train").write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(DataError, match=r"run\.train is damaged"):
        train_model(TrainingRun(RECORD, dataset, RunOptions(False, "cpu", tmp_path / "run", resume=True), Watcher()), OPTIONS)


def train_with_decoder(dataset, run, watcher, ids=IDS):
    """An epoch of the encoder, and two of a decoder on its states."""
    run = TrainingRun(RECORD, dataset, run, watcher)
    encoder = train_model(run, OPTIONS.model_copy(update={"epochs": 1})).model
    return train_decoder(run, encoder, DECODER, ids, DecoderOptions(epochs=2, batch_windows=16)).decoder


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_is_resumed_where_items_would_be_clustered_otherwise_with_the_ids_that_its_decoder_has_begun_to_learn(
    dataset, tmp_path, monkeypatch, done
):
    whole = train_with_decoder(dataset, RunOptions(device="cpu"), Watcher())
    with pytest.raises(Interrupted):
        train_with_decoder(dataset, RunOptions(device="cpu", checkpoint=tmp_path / "run"), Watcher(1 + done))

    def elsewhere(vectors, **given):
        """As by a processor that rounds otherwise: two items have changed cells."""
        ids = build_semantic_ids(vectors, **given)
        return replace(ids, codes=ids.codes[[0, 2, 1, *range(3, ITEMS + 1)]], codebooks=tuple(book + 1 for book in ids.codebooks))

    monkeypatch.setattr(generative_run, "build_semantic_ids", elsewhere)
    watcher = Watcher()
    resumed = train_with_decoder(dataset, RunOptions(False, "cpu", tmp_path / "run", resume=True), watcher)
    assert watcher.phases == [("train", 1, 1), ("decoder", 2, done)]
    assert (resumed.ids.version == whole.ids.version) == bool(done)
    if done:
        assert same_weights(whole, resumed)
        assert (resumed.ids.sizes, resumed.ids.levels) == (whole.ids.sizes, whole.ids.levels)
        assert all(np.array_equal(book, other) for book, other in zip(whole.ids.codebooks, resumed.ids.codebooks, strict=True))


@pytest.mark.parametrize("other", [IdOptions(levels=2), IdOptions(codes=4), IdOptions(title_weight=0.5)])
def test_a_decoder_is_not_resumed_with_other_options_of_its_ids(dataset, tmp_path, other):
    with pytest.raises(Interrupted):
        train_with_decoder(dataset, RunOptions(device="cpu", checkpoint=tmp_path / "run"), Watcher(2))
    with pytest.raises(DataError, match=r"another model \(its semantic IDs differ\); give the same options and data"):
        train_with_decoder(dataset, RunOptions(False, "cpu", tmp_path / "run", resume=True), Watcher(), other)


def test_other_titles_refuse_a_decoder_whose_ids_were_clustered_by_titles_and_no_other(dataset, tmp_path):
    retitled = replace(dataset, catalogue=Catalogue([replace(item, title=f"{item.title} again") for item in dataset.catalogue.items]))
    for weight in (0.0, 0.5):
        ids, place = IdOptions(title_weight=weight), tmp_path / str(weight)
        with pytest.raises(Interrupted):
            train_with_decoder(dataset, RunOptions(device="cpu", checkpoint=place / "run"), Watcher(2), ids)
        resume = RunOptions(False, "cpu", place / "run", resume=True)
        with pytest.raises(DataError, match="its semantic IDs differ") if weight else nullcontext():
            train_with_decoder(retitled, resume, Watcher(), ids)


def test_ids_of_a_checkpoint_of_which_one_bit_was_flipped_are_refused(dataset, tmp_path):
    with pytest.raises(Interrupted):
        train_with_decoder(dataset, RunOptions(device="cpu", checkpoint=tmp_path / "run"), Watcher(2))
    path = tmp_path / "run.decoder"
    flip_a_bit(path, read_checkpoint(path)["semantic_ids"]["codes"].numpy().tobytes())
    with pytest.raises(DataError, match=r"run\.decoder is damaged"):
        train_with_decoder(dataset, RunOptions(False, "cpu", tmp_path / "run", resume=True), Watcher())
