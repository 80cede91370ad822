"""The API keeps what its OpenAPI document promises, whatever is sent: schemathesis makes requests from it, and checks every answer."""

import hashlib
import warnings
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings

from cluster.config import GatewaySettings
from cluster.errors import BackendUnavailable, UnknownChoice
from cluster.values import Item
from deployments.http.api import create_api
from deployments.http.messages import BackendsOut, ReadyOut, StageReadyOut, SwitchOut
from deployments.http.models import ModelsOut
from deployments.http.playground import Offers
from pipelines.rank import CandidateRanker
from pipelines.recommend import Recommender
from pipelines.stored_history import StoredHistories
from tests.fakes.data import Data
from tests.fakes.played_stages import Ascending, Descending, Naming, bundle_with_ranker
from tests.repetitions import times

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # at what it imports
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (pip install '.[dev]')")
    from schemathesis import GenerationMode, checks

KEYS = [
    {"name": "admin", "sha256": hashlib.sha256(b"genrec_admin").hexdigest(), "rights": ["read", "events", "erase", "operate"]},
    {"name": "tenant", "sha256": hashlib.sha256(b"genrec_tenant").hexdigest(), "tenant": "shop"},
]
LIMITS = {"max_k": 100, "max_behaviours": 50, "max_batch": 4, "max_body_bytes": 20_000}
CHECKED = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)


class Service:
    """The pipeline over stages that are played. Stage "absent" is not there, to see that documented, too."""

    def __init__(self, bundle):
        self.bundle = bundle
        self.recommender = Recommender(bundle, Descending(bundle), (naming := Naming(bundle, 3, 1, 2)), naming.stream, Ascending(bundle))

        self.ranker = CandidateRanker(
            bundle, StoredHistories(None, 100), Descending(bundle), Ascending(bundle), deadline_s=5.0, ranking_deadline_s=2.0
        )

    async def recommend(self, request):
        return await self.recommender.recommend(request)

    async def rank(self, request):
        return await self.ranker.rank(request)

    def stream(self, request):
        return self.recommender.stream(request)

    def item(self, item_id):
        return Item(item_id, "An item", {"genre": "drama"}) if len(item_id) % 2 else None

    def catalogue(self):
        return self.bundle.catalogue

    def offers(self):
        return Offers("tiny/1", ("unified", "retrieval", "generative"), ranker=True)

    async def backends(self):
        return BackendsOut(model_version="tiny/1", stages=[])

    async def models(self):
        return ModelsOut(model_version="tiny/1", replicas={}, versions=[], ended=[])

    async def switch(self, stage, name, to):
        if len(name) % 3 == 0:
            raise BackendUnavailable("the switchboard does not answer")
        if len(name) % 3 == 1:
            raise UnknownChoice("encoder", name, ["torch"])
        return SwitchOut(stage=stage, name=name, enabled=to != "off", first=to == "first", applied=True)

    async def readiness(self):
        return ReadyOut(ready=False, model_version="tiny/1", stages=[StageReadyOut(stage="encoder", ready=False, detail="")])

    async def close(self):
        """Nothing to let go of."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    return Service(bundle_with_ranker(tmp_path_factory.mktemp("models") / "tiny", decoder=True))


OPERATIONS = [
    pytest.param(method, path, id=f"{method.upper()} {path}")
    for path, methods in create_api(None, None, GatewaySettings()).fastapi.openapi()["paths"].items()
    for method in methods
]
GUARDED = {"api_keys": KEYS, "rate_limits": {"default": {"per_s": 0.001, "burst": 3}}}


@pytest.fixture(scope="module")
def cases(service):
    """Gives the strategy of a route's valid and invalid requests, of one document: it is the same for all limits, and slow to read."""
    document = schemathesis.openapi.from_asgi("/openapi.json", create_api(service, Data(), GatewaySettings.model_validate(LIMITS)))

    @cache
    def of(method, path):
        operation = document[path][method.upper()]
        return operation.as_strategy(generation_mode=GenerationMode.POSITIVE) | operation.as_strategy(
            generation_mode=GenerationMode.NEGATIVE
        )

    return of


def answers(service, cases, examples, headers=None, **limits):
    """The statuses of the answers to these requests, each of them checked."""
    api = create_api(service, Data(), GatewaySettings.model_validate({**LIMITS, **limits}))
    seen = set()

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def ask(case):
        response = case.call(headers=headers, app=api)
        case.validate_response(response, checks=CHECKED, excluded_checks=[checks.not_a_server_error] if response.status_code == 503 else [])
        seen.add(response.status_code)

    ask()
    return seen


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_as_documented(service, cases, method, path, pytestconfig):
    examples = pytestconfig.getoption("--api-cases") or times(50, 5)
    assert min(answers(service, cases(method, path), examples)) in {200, 201} or path == "/readyz"


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("key", ["admin", "tenant", "unknown"])
def test_every_refusal_is_as_documented(service, cases, method, path, key):
    seen = answers(service, cases(method, path), examples=times(5, 2), headers={"Authorization": f"Bearer genrec_{key}"}, **GUARDED)
    assert seen <= {401, 413} or key != "unknown" or path in {"/healthz", "/readyz"}
