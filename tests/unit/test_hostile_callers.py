"""A hostile caller of the benchmark costs a gateway what its kind is there to cost."""

import httpx

from benchmarks.hostile_callers import BEHAVIOURS, MALFORMED
from cluster.config import GatewaySettings
from deployments.http.api import create_api
from deployments.http.reading import MOST_VALUES, values_in
from tests.fakes.data import Data
from tests.fakes.service import Service


async def test_a_malformed_body_is_as_large_as_is_read_and_refused_at_its_end():
    settings = GatewaySettings()
    assert 0.9 * MOST_VALUES < values_in(MALFORMED, MOST_VALUES) <= MOST_VALUES
    assert 0.9 * settings.max_body_bytes < len(MALFORMED) <= settings.max_body_bytes
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_api(Service(), Data(), settings)), base_url="http://genrec") as http:
        refused = await http.post("/v1/recommend", content=MALFORMED, headers={"content-type": "application/json"})
    assert refused.status_code == 422
    assert {error["field"].split(".")[0] for error in refused.json()["errors"]} == {f"behaviours[{BEHAVIOURS}]"}
