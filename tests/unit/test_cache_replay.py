import gzip
import json

import pytest
from typer.testing import CliRunner

from cluster.cache.replay import Result, parse_size, read_trace, replay
from cluster.errors import DataError, UnknownChoice
from deployments.cli.bench import app

TRACE = ["a", "b", "a", "c", "d", "a", "b", "a"]


def written(tmp_path, text, name="trace.txt"):
    path = tmp_path / name
    content = text.encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["cache", *map(str, arguments)], catch_exceptions=False)


def test_a_replay_gives_every_policys_hit_rate_at_every_size():
    assert replay(TRACE, ["50%", "3"], ["lru", "fifo"]) == [
        Result("lru", "50%", 2, 2 / 8),
        Result("lru", "3", 3, 3 / 8),
        Result("fifo", "50%", 2, 2 / 8),
        Result("fifo", "3", 3, 2 / 8),
    ]


def test_a_cache_that_holds_every_key_misses_each_but_once():
    assert {one.hit_rate for one in replay(TRACE, ["100%"])} == {4 / 8}


@pytest.mark.parametrize(("size", "keys"), [("1%", 20), ("0.5%", 10), ("0.001%", 1), ("100%", 2000), ("5000", 5000), (" 7 ", 7)])
def test_a_size_is_a_share_of_the_distinct_keys_or_a_number_of_keys(size, keys):
    assert parse_size(size, 2000) == keys


@pytest.mark.parametrize("size", ["", "%", "0", "0%", "-5", "101%", "1.5", "many", "nan%", "inf%", "1%%"])
def test_a_size_that_is_neither_is_refused(size):
    with pytest.raises(DataError, match="is neither a share of the distinct keys"):
        parse_size(size, 2000)


def test_a_trace_is_read_one_key_a_line_plain_or_gzipped_whatever_its_name(tmp_path):
    text = "a\nb\n\n  a \n"
    zipped = written(tmp_path, text, "trace.gz")
    assert read_trace(written(tmp_path, text)) == read_trace(zipped) == ["a", "b", "a"]
    assert read_trace(zipped.rename(tmp_path / "no-suffix")) == ["a", "b", "a"]


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    assert read_trace(written(tmp_path, "\ufeffa\nb\na\n")) == ["a", "b", "a"]
    assert read_trace(written(tmp_path, '\ufeff{"hash_ids": [1, 2]}\n')) == [1, 2]


def test_a_mooncake_trace_is_read_one_access_a_hash_id(tmp_path):
    lines = [{"timestamp": 0, "hash_ids": [1, 2]}, {"timestamp": 5, "hash_ids": [1, 3]}]
    assert read_trace(written(tmp_path, "\n".join(map(json.dumps, lines)), "t.jsonl.gz")) == [1, 2, 1, 3]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a\n{broken\n", r"trace\.txt:2: '\{broken' is no JSON object with hash_ids"),
        ('{"ids": [1]}\n', r"trace\.txt:1: .* is no JSON object with hash_ids"),
        ('{"hash_ids": 5}\n', r"trace\.txt:1: hash_ids must be a list of numbers or strings, not 5"),
        ('{"hash_ids": [[1]]}\n', r"must be a list of numbers or strings, not \[\[1\]\]"),
        ("\n\n", "has no accesses"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, complaint):
    with pytest.raises(DataError, match=complaint):
        read_trace(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(DataError, match=r"absent\.txt cannot be read: .*No such file"):
        read_trace(tmp_path / "absent.txt")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"a\n" * 1000)[:20])
    with pytest.raises(DataError, match=r"cut\.gz cannot be read"):
        read_trace(tmp_path / "cut.gz")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"binary cannot be read: .*utf-8"):
        read_trace(tmp_path / "binary")


def test_nothing_to_replay_is_an_error():
    with pytest.raises(DataError, match="the trace has no accesses"):
        replay([], ["1%"])
    with pytest.raises(DataError, match="0 sizes, 1 policies; give at least one of each"):
        replay(TRACE, [], ["lru"])


def test_the_command_prints_one_json_object(tmp_path):
    answer = run("--trace", written(tmp_path, "\n".join(TRACE)), "--sizes", "50%, 3", "--policies", "lru,arc", "--json")
    assert answer.exit_code == 0
    results = json.loads(answer.stdout)["results"]
    assert [(one["policy"], one["size"]) for one in results] == [("lru", "50%"), ("lru", "3"), ("arc", "50%"), ("arc", "3")]
    assert results[1] == {"policy": "lru", "size": "3", "hit_rate": 3 / 8}


def test_the_command_prints_a_table_for_people_of_all_policies(tmp_path):
    answer = run("--trace", written(tmp_path, "\n".join(TRACE)), "--sizes", "50%,3")
    assert "50% (2 keys)" in answer.stdout
    assert "3 keys" in answer.stdout
    assert "37.50%" in answer.stdout
    for policy in ("s3fifo", "lru", "lfu", "fifo", "arc"):
        assert policy in answer.stdout


def test_the_command_refuses_an_unknown_policy_before_it_reads_the_trace(tmp_path):
    with pytest.raises(UnknownChoice, match="unknown cache policy 'mru'; choose from arc, fifo, lfu, lru, s3fifo"):
        run("--trace", tmp_path / "absent", "--policies", "lru,mru")
