"""Which answers are computed before they are asked for, when, and how many at a time; what computes them is played."""

import asyncio
from types import SimpleNamespace

import pytest

from cluster.values import RecommendRequest
from deployments.anticipation import Anticipation
from pipelines.remembered import UsualRequests
from tests.waiting import passed, until

pytestmark = pytest.mark.virtual_time


class Answers:
    """Notes the users of whom an answer is computed; while it is held, those computations last."""

    def __init__(self):
        self.begun, self.under_way, self.go = [], 0, asyncio.Event()
        self.go.set()

    async def prepare(self, tenant, user_id):
        self.begun.append(user_id)
        self.under_way += 1
        await self.go.wait()
        self.under_way -= 1

    anticipate = prepare


class Setting:
    def __init__(self, **options):
        self.answers, self.usual = Answers(), UsualRequests()
        versions = SimpleNamespace(model_for=lambda tenant, user_id: SimpleNamespace(answers=self.answers))
        self.anticipation = Anticipation(versions, self.usual, **{"anticipates": lambda *_: True, "after_s": 0.05} | options)

    def asked(self, users):
        for user in users:
            self.usual.note(RecommendRequest(user))


@pytest.fixture
async def setting():
    made = Setting()
    yield made
    await made.anticipation.close()


@pytest.mark.parametrize(
    ("scope", "left"), [(("default", "bob"), ["cyd"]), (("default", None), []), ((None, None), []), (("other", "bob"), ["bob", "cyd"])]
)
async def test_users_that_are_erased_while_they_wait_to_be_prepared_for_another_version_are_not(setting, scope, left):
    setting.asked(["ada", "ada", "ada", "bob", "bob", "cyd"])
    setting.answers.go.clear()
    setting.anticipation.make_ready()
    await until(lambda: setting.answers.begun)
    setting.anticipation.forget(*scope)
    setting.answers.go.set()
    await until(lambda: len(setting.answers.begun) == 1 + len(left))
    await passed(60)
    assert setting.answers.begun == ["ada", *left]
