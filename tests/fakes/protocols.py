"""The protocol that each fake plays. Nothing imports this: mypy finds here what a protocol has and its fake lacks."""

from cluster.metrics import Meter
from deployments.http import api
from deployments.stages import Stages
from tests.fakes.data import Data
from tests.fakes.in_process import InProcess
from tests.fakes.service import Service
from tests.fakes.stages import FakeStages
from tests.noted import Noted

DATA: type[api.Data] = Data
METER: type[Meter] = Noted
SERVICES: tuple[type[api.Service], ...] = (Service, InProcess)
STAGES: type[Stages] = FakeStages
