"""Two tenants whose users have the same ids: nobody is answered from what is another's."""

import pytest

from benchmarks.kill_caches import drive
from cluster.bundle_store import BundleStore
from tests.chaos.rows import Row
from tests.chaos.served import Served, served
from tests.clusters import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]  # in short: tests/unit/test_http_user_data.py
ARGS = {"encoder": {"order": ["onnxruntime", "torch"]}, "generator": {"order": ["torch_beam"]}}
NEVER = float("inf")


@pytest.fixture
def two_gateways(model, cluster: SharedCluster, tmp_path) -> Served:
    args = {**ARGS, "events": {"url": f"sqlite:///{tmp_path}/events.db"}}
    with served(cluster, tmp_path, model.path.parent, args, replicas={"gateway": 2}) as serving:
        yield serving


@pytest.mark.timeout(3600)
async def test_nobody_is_answered_from_what_is_anothers(two_gateways: Served, record, long: bool):
    requests = 100_000 if long else 4000
    items = [item.item_id for item in BundleStore(two_gateways.model_dir).open().catalogue.items]
    with record(Row("two tenants, same user id, 100k requests", "0 cross hits")) as row:
        traffic, lost = await drive(
            two_gateways.url, two_gateways.serving, items, requests=requests, users=200, concurrency=16, every=NEVER
        )
        tally = traffic.tally
        row.figures |= {"sent": dict(tally.sent), "tiers": dict(tally.tiers), "retried": tally.retried}
        row.notes += [*tally.strangers[:5], *tally.failed[:5], *lost[:5]]
        row.claim("requests", sum(tally.sent.values()), least=requests)
        row.claim("answers from what is another's", len(tally.strangers), most=0)
        row.claim("failed requests", len(tally.failed), most=0)
        row.claim("answers out of caches", tally.tiers["l1"] + tally.tiers["l2"], least=1)
        row.claim("acknowledged events that are lost or there twice", len(lost), most=0)
