"""Systems that are measured beside each other do the same work."""

import pytest

from benchmarks.serving import SHIPPED, SYSTEMS, merged
from cluster.config import parse
from cluster.config_file import read_document
from cluster.registry import BACKENDS, resolve

GENREC = [start for name, (_, start) in SYSTEMS.items() if not name.startswith("naive")]


@pytest.mark.parametrize("start", GENREC, ids=[name for name in SYSTEMS if not name.startswith("naive")])
def test_genrec_keeps_no_states_beside_servers_that_encode_every_history_whole(start):
    config = SHIPPED[start.keywords["placement"]]
    encoder = parse(merged(read_document(config)["applications"][0]["args"], start.keywords["changes"]), str(config)).encoder
    assert {encoder.options[engine]["state_bytes"] for engine in encoder.order} == {0}
    for engine in encoder.order:
        resolve(BACKENDS["encoder"][engine])(**encoder.options[engine])
