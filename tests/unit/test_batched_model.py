"""What a version's batches tell of themselves."""

import asyncio

import numpy as np
import pytest

from cluster import metrics as m
from cluster.bundle_store import BundleStore
from cluster.config import parse
from cluster.ranking import RankRequest
from cluster.values import EncodeRequest
from deployments.replicas import batched_model
from deployments.replicas.encoder import EncoderModel
from deployments.replicas.ranker import RankerModel
from tests.bundles import make_ranking_bundle, random_sequence
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
