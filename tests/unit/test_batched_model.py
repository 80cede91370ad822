"""What a version's batches tell of themselves."""

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from cluster import metrics as m
from cluster.bundle_store import BundleStore
from cluster.config import parse
from cluster.ranking import RankRequest
from cluster.values import EncodeRequest
from deployments.replicas import batched_model
from deployments.replicas.encoder import EncoderModel
from deployments.replicas.ranker import RankerModel
from integrations.hstu.encoder import TorchEncoder
from tests.bundles import make_bundle, make_ranking_bundle, random_sequence
from tests.noted import Noted

HISTORIES = [random_sequence(length, items=20) for length in (3, 6)]
TO_ENCODE = [EncodeRequest(history, 5) for history in HISTORIES]
TO_RANK = [RankRequest(history, np.arange(1, 2 * len(history), dtype=np.int32)) for history in HISTORIES]


@pytest.mark.parametrize(("kind", "requests", "pads"), [(EncoderModel, TO_ENCODE, True), (RankerModel, TO_RANK, False)])
async def test_batches_tell_of_padding_where_a_stage_pads_and_not_where_it_computes_users_one_by_one(
    kind, requests, pads, tmp_path, monkeypatch
):
    noted = Noted()
    monkeypatch.setattr(batched_model, "meter", lambda: noted)
    make_ranking_bundle(tmp_path / "tiny")
    settings = parse({"model_dir": str(tmp_path / "tiny"), "encoder": {"order": ["torch"]}, "ranker": {"order": ["torch"]}})
    model = kind(settings, BundleStore(tmp_path / "tiny").open())
    try:
        await asyncio.gather(*map(model.answer, requests))
    finally:
        model.close()
    told = {name for name, _ in noted.seen}
    assert (m.BATCH_SIZE.name in told, m.BATCH_PADDING.name in told) == (True, pads)


LONG, SHORT = random_sequence(190, seed=1), random_sequence(40, seed=2)


def asked_before(history):
    """The history as it was before its last event."""
    columns = {name: getattr(history, name)[:-1] for name in ("items", "timestamps", "actions", "values")}
    return replace(history, **columns)


@pytest.mark.parametrize(
    ("options", "batching", "batches"),
    [
        ({}, {}, [1, 1, 2]),
        ({"state_bytes": 0}, {}, [1, 1, 1, 1]),
        ({}, {"max_tokens": 16 * 190}, [1, 1, 2]),
        ({}, {"max_tokens": 16 * 190 - 1}, [1, 1, 1, 1]),
    ],
    ids=["kept", "not kept", "a full batch computed whole is within the limit", "it is beyond"],
)
async def test_returning_users_share_a_batch_however_long_their_histories_are(options, batching, batches, tmp_path, monkeypatch):
    computed, batch_infer = [], TorchEncoder.batch_infer
    monkeypatch.setattr(TorchEncoder, "batch_infer", lambda self, asked: (computed.append(len(asked)), batch_infer(self, asked))[1])
    make_bundle(tmp_path / "tiny", max_history=200, max_length=200)
    settings = parse(
        {"model_dir": str(tmp_path / "tiny"), "encoder": {"order": ["torch"], "options": {"torch": options}, "batching": batching}}
    )
    model = EncoderModel(settings, BundleStore(tmp_path / "tiny").open())
    try:
        for histories in (map(asked_before, (LONG, SHORT)), (LONG, SHORT)):
            requests = [EncodeRequest(history, 5, user_id=user) for history, user in zip(histories, ("ann", "bob"), strict=True)]
            await asyncio.gather(*map(model.answer, requests))
    finally:
        model.close()
    assert computed == batches
