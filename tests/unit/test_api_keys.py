"""API keys: made, kept as hashes, found, and never shown."""

import hashlib

import pytest
import yaml
from typer.testing import CliRunner

from cluster.config import ApiKeySettings, parse
from cluster.errors import ConfigError
from cluster.traffic import api_keys
from deployments.cli.keys import app


def entry(key, name="shop", **more):
    return ApiKeySettings(name=name, sha256=hashlib.sha256(key.encode()).hexdigest(), **more)


def test_a_key_is_32_random_bytes_and_says_what_it_is():
    first, second = api_keys.new_key(), api_keys.new_key()
    assert first != second
    assert first.startswith("genrec_")
    assert len(first) == len("genrec_") + 43


def test_the_entry_of_a_key_is_found_and_no_other():
    keys = [entry("genrec_a", "a"), entry("genrec_b", "b"), entry("genrec_c", "c")]
    assert [api_keys.find(key, keys) for key in (b"genrec_a", b"genrec_b", b"genrec_c")] == keys
    for stranger in (b"", b"genrec_", b"genrec_A", b"genrec_aa", keys[0].sha256.encode(), b"\xff", b"genrec_a" * 1000):
        assert api_keys.find(stranger, keys) is None


def test_every_entry_is_compared_wherever_the_key_stands(monkeypatch):
    compared = []
    monkeypatch.setattr(api_keys, "compare_digest", lambda a, b: compared.append(b) or a == b)
    keys = [entry(f"genrec_{name}", name) for name in "abc"]
    for presented in (b"genrec_a", b"genrec_c", b"genrec_x"):
        compared.clear()
        api_keys.find(presented, keys)
        assert compared == [key.sha256 for key in keys]


def test_neither_a_key_nor_its_hash_stands_in_a_repr():
    assert entry("genrec_secret").sha256 not in repr(parse({"gateway": {"api_keys": [entry("genrec_secret").model_dump()]}}))


@pytest.mark.parametrize("field", ["sha256", "key"])
def test_a_key_written_where_it_does_not_belong_is_not_repeated_by_the_error(field):
    key = api_keys.new_key()
    with pytest.raises(ConfigError, match="genrec_\\*\\*\\*") as caught:
        parse({"gateway": {"api_keys": [{"sha256": "0" * 63, field: key}]}})
    assert key not in str(caught.value)
    assert caught.value.__suppress_context__, "the cause would show it in a traceback"


def test_two_entries_of_one_key_or_name_are_refused():
    for twice in ([entry("genrec_a", "a"), entry("genrec_a", "b")], [entry("genrec_a", "a"), entry("genrec_b", "a")]):
        with pytest.raises(ConfigError, match="two entries"):
            parse({"gateway": {"api_keys": [key.model_dump() for key in twice]}})


def test_the_command_prints_a_key_once_and_the_entry_that_lets_it_in():
    made = CliRunner().invoke(app, ["new", "--name", "shop: 1", "--tenant", "shop"])
    key, [line] = made.stdout.strip(), [line for line in made.stderr.splitlines() if line.startswith("  - ")]
    assert key not in made.stderr
    [added] = parse({"gateway": {"api_keys": yaml.safe_load(line)}}).gateway.api_keys
    assert api_keys.find(key.encode(), [added]) is added
    assert (added.name, added.tenant, added.admin) == ("shop: 1", "shop", False)


def test_the_command_refuses_a_tenant_that_no_request_could_name():
    made = CliRunner().invoke(app, ["new", "--name", "shop", "--tenant", "a b"])
    assert isinstance(made.exception, ConfigError)
    assert "genrec_" not in made.stdout


def test_masked_hides_every_key():
    assert api_keys.masked(f"a {api_keys.new_key()} b {api_keys.new_key()}") == "a genrec_*** b genrec_***"
