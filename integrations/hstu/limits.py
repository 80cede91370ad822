"""How long a model's histories may be, for engines that serve it without building it in torch."""

from dataclasses import dataclass

from cluster.bundle import ModelRecord
from integrations.hstu.config import SequenceConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_history`: how many events are encoded; `max_length`: N, the most the model could take."""

    max_history: int
    max_length: int


def limits(model: ModelRecord) -> Limits:
    """The recorded limits or, where the record leaves one out, the default that the model was built with."""
    return Limits(max_history=_recorded(model, "max_history"), max_length=_recorded(model, "max_length"))


def _recorded(model: ModelRecord, name: str) -> int:
    return int(str(model.config.get(name, SequenceConfig.model_fields[name].default)))
