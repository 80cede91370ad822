"""API keys: made, kept as hashes, found, and never shown."""

import hashlib
from datetime import UTC, date

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


def test_two_entries_of_one_key_are_refused():
    with pytest.raises(ConfigError, match="two entries"):
        parse({"gateway": {"api_keys": [{"name": name, "sha256": "0" * 64} for name in "ab"]}})


@pytest.mark.parametrize(
    ("said", "moment"),
    [
        ("2027-01-31", "2027-01-31T23:59:59.999999+00:00"),
        ("2027-01-31T18:00:00Z", "2027-01-31T18:00:00+00:00"),
        ("2027-01-31T18:00:00+01:00", "2027-01-31T17:00:00+00:00"),
        ("9999-12-31", "9999-12-31T23:59:59.999999+00:00"),
    ],
)
def test_a_key_expires_at_the_end_of_a_date_or_at_a_time_with_its_zone(said, moment):
    expires = entry("genrec_a", expires=said).expires
    assert expires.astimezone(UTC).isoformat() == moment
    again = parse({"gateway": {"api_keys": [entry("genrec_a", expires=said).model_dump(mode="json")]}})
    assert again.gateway.api_keys[0].expires == expires, "the tree is written out and read again for every change of user_config"


@pytest.mark.parametrize("said", ["2027-01-31T18:00:00", "soon", "2027-02-30", 1_800_000_000, date(2027, 1, 31)])
def test_what_names_no_moment_is_refused(said):
    """A date without quotes too: `serve deploy` cannot send it on."""
    with pytest.raises(ConfigError, match=r"api_keys\.0\.expires = .*give a date, or a time with its zone, in quotes"):
        parse({"gateway": {"api_keys": [{"name": "a", "sha256": "0" * 64, "expires": said}]}})


@pytest.mark.parametrize(
    ("more", "cure"),
    [
        ({"admin": True}, r"rights: \[read, events, erase, operate\]"),
        ({"rights": ["write"]}, "'read', 'events', 'erase' or 'operate'"),
        ({"rights": []}, "at least 1 item"),
        ({"rights": ["operate"], "tenant": "shop"}, "make a key without tenant"),
    ],
)
def test_rights_that_make_no_sense_are_refused_with_the_cure(more, cure):
    with pytest.raises(ConfigError, match=cure):
        parse({"gateway": {"api_keys": [{"name": "a", "sha256": "0" * 64, **more}]}})


@pytest.mark.parametrize("name", ["shop: 1", "1e5", "no", 'a "b" c', "Zoë 🎉 \x7f" + " of the shop" * 4])
def test_the_command_prints_a_key_once_and_the_entry_that_lets_it_in(name):
    made = CliRunner().invoke(app, ["new", "--name", name, "--tenant", "shop"])
    key, [line] = made.stdout.strip(), [line for line in made.stderr.splitlines() if line.startswith("  - ")]
    assert key not in made.stderr
    assert (
        "the events of the tenant shop alone, not those of `default`; import them by: genrec events import ... --tenant sh" in made.stderr
    )
    [added] = parse({"gateway": {"api_keys": yaml.safe_load(line)}}).gateway.api_keys
    assert api_keys.find(key.encode(), [added]) is added
    assert (added.name, added.tenant, added.rights, added.expires) == (name, "shop", ["read", "events", "erase"], None)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--right", "read", "--right", "op"), "--right op is no right; choose from read, events, erase, operate"),
        (("--right", "operate", "--tenant", "shop"), "--right operate acts for all tenants; leave --tenant out"),
    ],
)
def test_the_command_names_the_option_that_is_wrong_and_makes_no_key(options, problem):
    made = CliRunner().invoke(app, ["new", "--name", "a", *options])
    assert (made.stdout, str(made.exception)[: len(problem)]) == ("", problem)


def test_the_command_gives_a_key_the_rights_and_the_expiry_that_are_asked_for():
    made = CliRunner().invoke(app, ["new", "--name", "a", "--right", "read", "--right", "operate", "--expires", "2099-01-31"])
    [line] = [line for line in made.stderr.splitlines() if line.startswith("  - ")]
    [added] = parse({"gateway": {"api_keys": yaml.safe_load(line)}}).gateway.api_keys
    assert (added.rights, f"{added.expires:%Y-%m-%d}") == (["read", "operate"], "2099-01-31")


def test_the_command_refuses_a_key_that_would_have_expired_already():
    for past in ("2020-01-31", "2020-01-31T18:00:00+01:00"):
        made = CliRunner().invoke(app, ["new", "--name", "a", "--expires", past])
        assert isinstance(made.exception, ConfigError)
        assert f"--expires {past} is past: it is " in str(made.exception)
        assert "name a later one, or leave it out for a key that never expires" in str(made.exception)
        assert "genrec_" not in made.stdout


def test_the_command_refuses_a_tenant_that_no_request_could_name():
    made = CliRunner().invoke(app, ["new", "--name", "shop", "--tenant", "a b"])
    assert isinstance(made.exception, ConfigError)
    assert "genrec_" not in made.stdout


def test_what_is_named_as_a_secret_is_hidden_whatever_it_is():
    hidden = {"password": 123456, "token": ["a", "b"], "client_secret": {"id": "a", "value": "b"}, "api_key": b"a", "passwd": ("a",)}
    hidden |= dict.fromkeys(("Authorization", "Set-Cookie", "X-Api-Key", "apikey", "aws_credentials", "secret_access_key"), "Basic dTpw")
    assert api_keys.masked_tree(hidden) == dict.fromkeys(hidden, "***")
    shown = {"password": None, "needs_token": True, "max_tokens": 7, "inner": [{"depth": 2}], 5: "a number may be a name"}
    assert api_keys.masked_tree(shown) == shown


def test_a_key_is_hidden_wherever_it_stands_in_a_tree():
    key = api_keys.new_key()
    assert api_keys.masked_tree([{"a": (key, 1)}, key]) == [{"a": ("genrec_***", 1)}, "genrec_***"]


def test_masked_hides_every_key():
    assert api_keys.masked(f"a {api_keys.new_key()} b {api_keys.new_key()}") == "a genrec_*** b genrec_***"
