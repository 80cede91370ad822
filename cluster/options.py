"""Whole numbers among the options of backends, which a configuration gives as they stand in its file."""

from cluster.errors import ConfigError


def whole(name: str, value: object) -> int:
    """The value of this option. Raises ConfigError where it is no whole number, as 64MB and 1e9, which YAML takes for text."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} ({value!r}) must be a whole number, written out as 67108864, without a unit or an exponent")
    return value
