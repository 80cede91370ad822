"""The protocol that each fake plays. Nothing imports this: mypy finds here what a protocol has and its fake lacks."""

from cluster.metrics import Meter
from deployments.stages import Stages
from tests.fakes.stages import FakeStages
from tests.noted import Noted

METER: type[Meter] = Noted
STAGES: type[Stages] = FakeStages
