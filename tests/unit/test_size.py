"""Predicted memory against the bytes of real tensors, pools and objects; what is refused, and what never is; the command."""

import gc
import json
import logging
import math
import os
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from cluster.bundle import CATALOGUE, DECODER, MANIFEST
from cluster.catalogue_file import write_catalogue
from cluster.compilation import CompileOptions
from cluster.config import parse
from cluster.dataset import Catalogue
from cluster.errors import ConfigError
from cluster.fleet.board import READY
from cluster.machine import memory_limit
from cluster.ranking import RankRequest
from cluster.registry import BACKENDS
from cluster.values import EncodeRequest, GenerateRequest, Item, UserState
from deployments.cli import app
from deployments.cli.local_serve import local_document
from deployments.cli.serve import serve
from deployments.cli.size import size
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.switchboard import SwitchboardDeployment
from deployments.replicas.encoder import Encoder
from deployments.sizing import fit
from deployments.sizing.engines import OWNER_BYTES, ROW_BYTES, Use, libraries
from deployments.sizing.fit import TOLERANCE, require_all_fit, require_replica_fits, unfit
from deployments.sizing.model import GRAPHS, Sizes, sampled_entry, sizes_of
from deployments.sizing.parts import Part, Plan, Process
from deployments.sizing.processes import plan_of, replica, replicas
from integrations.decoder.config import PRESETS, DecoderConfig
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import TorchEncoder
from integrations.hstu.state.device_users import DeviceUsers
from integrations.hstu.state_options import KEEP_FROM, KEEP_FROM_ON_GPU, StateOptions, make_store
from integrations.hstu.torch_ranker import TorchRanker
from integrations.hstu.weights import load_model, load_ranker
from integrations.torch_beam.generator import TorchBeamGenerator
from pipelines.assign_ids import build_semantic_ids, fitting_vocabulary
from tests.bundles import make_bundle, make_complete_bundle, random_sequence
from tests.compiled import compiled
from tests.fakes.handles import Handle

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
TORCH = {"encoder": {"order": ["torch"]}, "generator": {"order": ["torch_beam"]}, "ranker": {"order": ["torch"]}}
LARGE = Sizes("large/1", HSTUConfig(items=2_000_000, dim=256, layers=8, heads=8, attention_dim=32, linear_dim=32))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_complete_bundle(tmp_path_factory.mktemp("size") / "whole", items=3000, dim=32)


def parts_of(bundle, tree, users=None, history=None, role="gateway"):
    """Name -> part, of one replica on a CPU."""
    settings = parse({"placement": "colocated" if role == "gateway" else "split", **tree})
    made = replica(role, settings, sizes_of(bundle), Use(users, history), "host")
    return {part.name: part for part in made.parts if part.when != "mapped"}


def machine(root, *, total=64 * GIB, swap=0, group="/", limits=(), swap_limits=(), version=2):
    """The files of a machine with cgroups. `limits`: (group, bytes); `swap_limits`: the same of swap or, in version 1, of both together."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nSwapTotal: {swap // 1024} kB\nHugePages_Total: 0\n")
    (root / "proc/self/cgroup").write_text(f"0::{group}\n" if version == 2 else f"5:cpu:/elsewhere\n9:memory:{group}\n")
    mount = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    names = ("memory.max", "memory.swap.max") if version == 2 else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    for file, given in zip(names, (limits, swap_limits), strict=True):
        for name, limit in given:
            (root / mount / name.strip("/")).mkdir(parents=True, exist_ok=True)
            (root / mount / name.strip("/") / file).write_text(f"{limit}\n")
    return root


class TestBytes:
    def test_weights_are_those_of_the_real_models(self, bundle):
        parts = parts_of(bundle, TORCH)
        for name, model in {"encoder torch": load_model(bundle), "ranker torch": load_ranker(bundle)}.items():
            assert parts[f"{name}: weights"].bytes == sum(parameter.nbytes for parameter in model.parameters())
        decoder = load_file(bundle.path / DECODER / "model.safetensors")
        assert parts["generator torch_beam: weights"].bytes == sum(tensor.nbytes for tensor in decoder.values())

    def test_vectors_are_those_of_the_bundle(self, bundle):
        parts = parts_of(bundle, TORCH)
        for name in ("item vectors", "encoder torch: item vectors", "generator: item vectors", "generator torch_beam: soft prompt"):
            assert parts[name].bytes == bundle.item_vectors.nbytes

    def test_compiled_graphs_are_as_large_as_their_files(self, bundle):
        made = compiled(bundle.path.parent, CompileOptions(targets=(), precisions=("fp32",)), only=["onnx"])
        files = {one.graph: (made.path / one.file).stat().st_size for one in made.manifest.artifacts}
        encoder, ranker = parts_of(made, {}, role="encoder"), parts_of(made, {}, role="ranker")
        assert encoder["encoder onnxruntime: weights"].bytes == pytest.approx(files["retrieve"], rel=0.15)
        assert encoder["encoder onnxruntime: weights to append"].bytes == pytest.approx(files["append"], rel=0.25)
        assert ranker["ranker onnxruntime: weights"].bytes == pytest.approx(files["rank"], rel=0.25)

    def test_openvino_holds_the_graphs_that_it_is_made_of(self, bundle):
        made = compiled(bundle.path.parent, CompileOptions(targets=(), precisions=("fp32",)), only=["onnx"])
        files = {one.graph: (made.path / one.file).stat().st_size for one in made.manifest.artifacts}
        for stage, weights, appended in (("encoder", "encode", "append"), ("ranker", "rank", "rank_append")):
            parts = parts_of(made, {stage: {"order": ["openvino"]}}, role=stage)
            assert parts[f"{stage} openvino: weights"].bytes == pytest.approx(files[weights], rel=0.25)
            assert parts[f"{stage} openvino: weights to append"].bytes == pytest.approx(files[appended], rel=0.25)

    def test_openvino_makes_programs_for_every_shape_and_for_few_where_histories_are_alike(self):
        plans = (plan_of(parse({"encoder": {"order": ["openvino"]}}), LARGE, {}, use, "host") for use in (Use(), Use(9, 64), Use(users=0)))
        programs = [[part.bytes for part in plan.processes[1].parts if "programs" in part.name] for plan in plans]
        assert programs[0] > programs[1] > programs[2] == []

    @pytest.mark.parametrize(("name", "more"), [("onnxruntime", True), ("openvino", True), ("torch", False)])
    def test_a_batch_is_counts_first_visits(self, name, more):
        """A graph appends their events in one block, which takes more memory than to encode them whole, up to a bound."""
        trees = ({"encoder": {"order": [name], "options": {name: options}}} for options in ({}, {"state_bytes": 0}))
        plans = [replica("encoder", parse(tree), LARGE, Use(), "host") for tree in trees]
        keeping, whole = (next(part.bytes for part in plan.parts if part.name == "encoder: a batch") for plan in plans)
        assert (keeping > whole) == more
        assert keeping - whole < 256 << 20

    @pytest.mark.parametrize(("name", "numbers"), [("onnxruntime", 4), ("openvino", 4), ("torch", 2)])
    def test_a_rankers_batch_counts_the_candidates_that_are_computed_at_a_time(self, bundle, name, numbers):
        """The numbers of each candidate, event and head were read off the resident memory of engines with windows of 2,048 events."""
        sizes = sizes_of(bundle)
        ranker = sizes.ranker.model_copy(update={"max_history": 2048, "max_length": 2059})
        trees = ({"ranker": {"order": [name], "options": {name: {"micro_batch": count}}}} for count in (4096, 2048))
        plans = [replica("ranker", parse(tree), replace(sizes, ranker=ranker, graphs=GRAPHS), Use(), "host") for tree in trees]
        more, fewer = (next(part.bytes for part in plan.parts if part.name == "ranker: a batch") for plan in plans)
        assert more - fewer == numbers * 4 * 2048 * 2048 * ranker.heads

    @pytest.mark.parametrize("name", BACKENDS["encoder"])
    def test_every_encoder_of_ours_keeps_states(self, name):
        sizes = replace(LARGE, encoder=LARGE.encoder.model_copy(update={"max_history": KEEP_FROM_ON_GPU}))
        process = replica("encoder", parse({"encoder": {"order": [name]}}), sizes, Use(), "gpu")
        assert any(part.name == f"encoder {name}: kept states" for part in process.parts)

    def test_nothing_is_kept_where_there_is_no_graph_to_append_by(self):
        process = replica("encoder", parse({}), replace(LARGE, graphs=frozenset({"onnx/retrieve"})), Use(), "host")
        assert "encoder onnxruntime: weights" in (names := {part.name for part in process.parts})
        assert not names & {"encoder onnxruntime: kept states", "encoder onnxruntime: weights to append"}

    @pytest.mark.parametrize("options", [{}, {"state_dtype": "fp16"}, {"state_store": "radix"}])
    @pytest.mark.parametrize("length", [40, 64])
    def test_kept_states_are_as_many_pages_as_the_store_uses(self, bundle, options, length):
        users = 3
        encoder = TorchEncoder(**options)
        encoder.load(bundle)
        encoder.batch_infer([EncodeRequest(random_sequence(length, items=3000, seed=user), 5, user_id=f"u{user}") for user in range(users)])
        tree = {**TORCH, "encoder": {"order": ["torch"], "options": {"torch": options}}}
        part = parts_of(bundle, tree, users, length)["encoder torch: kept states"]
        assert part.users == users
        assert part.bytes - users * (OWNER_BYTES + (length - 1) * ROW_BYTES) == encoder.kept()["used_bytes"]

    def test_kept_events_of_a_ranker_are_as_many_pages_as_its_store_uses(self, bundle):
        ranker = TorchRanker()
        ranker.load(bundle)
        ranker.infer(RankRequest(random_sequence(64, items=3000), np.arange(1, 9, dtype=np.int32), user_id="ada"))
        part = parts_of(bundle, TORCH, 1, 64)["ranker torch: kept states"]
        assert part.bytes - OWNER_BYTES - 64 * ROW_BYTES == ranker.kept()["used_bytes"]

    def test_kept_states_fill_the_budget_and_no_more(self, bundle):
        tree = {**TORCH, "encoder": {"order": ["torch"], "options": {"torch": {"state_bytes": 2**20}}}}
        whole, more = (parts_of(bundle, tree, users)["encoder torch: kept states"] for users in (None, 10**9))
        assert whole == more
        assert whole.bytes - whole.users * (OWNER_BYTES + 63 * ROW_BYTES) == pytest.approx(2**20, rel=0.05)

    def test_nothing_is_kept_of_short_histories_or_without_a_budget(self, bundle):
        off = {**TORCH, "encoder": {"order": ["torch"], "options": {"torch": {"state_bytes": 0}}}}
        assert "encoder torch: kept states" not in parts_of(bundle, off)
        assert "encoder torch: kept states" not in parts_of(bundle, TORCH, users=5, history=31)

    @pytest.mark.parametrize("name", ["tensorrt", "torch", "torch_compiled", "triton"])
    @pytest.mark.parametrize(("history", "keeps"), [(KEEP_FROM_ON_GPU - 1, False), (KEEP_FROM_ON_GPU, True)])
    def test_an_engine_with_its_users_rows_on_a_gpu_keeps_long_histories_only(self, name, history, keeps):
        sizes = replace(LARGE, encoder=LARGE.encoder.model_copy(update={"max_history": 2 * KEEP_FROM_ON_GPU}))
        process = replica("encoder", parse({"encoder": {"order": [name]}}), sizes, Use(5, history), "gpu")
        on_gpu = {part.name for part in process.parts if part.place == "gpu" and part.bytes}
        assert (f"encoder {name}: kept states" in on_gpu) == keeps

    @pytest.mark.parametrize(("name", "place"), [("torch", "host"), ("onnxruntime", "gpu")])
    @pytest.mark.parametrize(("history", "keeps"), [(KEEP_FROM - 1, False), (KEEP_FROM, True)])
    def test_an_engine_with_them_in_host_memory_keeps_shorter_ones_too(self, name, place, history, keeps):
        process = replica("encoder", parse({"encoder": {"order": [name]}}), LARGE, Use(5, history), place)
        assert bool([part for part in process.parts if part.name == f"encoder {name}: kept states" and part.bytes]) == keeps

    def test_a_model_with_no_history_long_enough_takes_no_memory_for_states(self):
        sizes = replace(LARGE, encoder=LARGE.encoder.model_copy(update={"max_history": KEEP_FROM_ON_GPU - 1}))
        process = replica("encoder", parse({"encoder": {"order": ["triton"]}}), sizes, Use(5, 50), "gpu")
        assert not [part for part in process.parts if "kept states" in part.name or "to append" in part.name]

    def test_kept_prompts_are_as_many_pages_as_the_store_uses(self, bundle):
        generator = TorchBeamGenerator()
        generator.load(bundle)
        rng, length = np.random.default_rng(0), bundle.prompt_length
        states = rng.standard_normal((length, 32)).astype(np.float32)
        user = UserState(states, random_sequence(length, items=3000))
        generator.infer(GenerateRequest(user, 5, 4, blocked=np.empty(0, np.int32), user_id="ada"))
        part = parts_of(bundle, TORCH, users=1)["generator torch_beam: kept prompts"]
        assert part.bytes - OWNER_BYTES - (length - 1) * ROW_BYTES == generator.kept()["used_bytes"]

    def test_the_catalogue_is_as_large_as_python_makes_it(self, tmp_path):
        made = make_bundle(tmp_path / "m", items=5000)
        items = [Item(f"sku-{i}", f"A thing with the number {i}", {"brand": f"brand {i % 7}", "colour": "red"}) for i in range(5000)]
        write_catalogue(Catalogue(items), made.path / CATALOGUE)
        sizes = sizes_of(made, sampled_entry(made))
        tracemalloc.start()
        try:
            catalogue = made.catalogue
            assert len(catalogue) == 5000
            held = tracemalloc.get_traced_memory()[0]
            assert sizes.catalogue_bytes == pytest.approx(held, rel=0.3)
            for index in range(1, 5001):
                assert catalogue.beginnings[index]
            assert sizes.json_bytes == pytest.approx(tracemalloc.get_traced_memory()[0] - held, rel=0.3)
        finally:
            tracemalloc.stop()

    def test_items_that_no_table_describes_count_wherever_they_stand(self, tmp_path):
        made, bare = make_bundle(tmp_path / "m", items=50_000), [Item(f"sku-{number}", f"sku-{number}") for number in range(49_000)]
        told = [Item(f"thing-{number}", f"thing-{number}", {"description": 2000 * "x"}) for number in range(1000)]
        found = []
        for items in (told + bare, bare + told):
            write_catalogue(Catalogue(items), made.path / CATALOGUE)
            found += [sampled_entry(made).held, sampled_entry(SimpleNamespace(has_catalogue=True, catalogue=Catalogue(items))).held]
        assert found == pytest.approx([found[0]] * 4, rel=0.1)
        assert 200 < found[0] < 600, "a fiftieth of the items has 2,000 letters more than the others"

    def test_a_catalogue_of_long_attributes_is_read_without_all_their_json_at_once(self, tmp_path):
        made, count = make_bundle(tmp_path / "m", items=20_000), 20_000
        write_catalogue(
            Catalogue([Item(f"sku-{i}", f"A thing {i}", {"description": f"{i:02000}"}) for i in range(count)]), made.path / CATALOGUE
        )
        tracemalloc.start()
        try:
            assert made.catalogue[count].attributes["description"] == f"{count - 1:02000}"
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1.3 * sizes_of(made, sampled_entry(made)).catalogue_bytes
        assert sizes_of(made, sampled_entry(made)).catalogue_bytes == pytest.approx(held, rel=0.15)

    def test_what_arrow_kept_to_read_a_catalogue_is_given_back(self, tmp_path, monkeypatch):
        made, released = make_bundle(tmp_path / "m", items=5000), []
        held = pa.default_memory_pool()
        monkeypatch.setattr(
            pa, "default_memory_pool", lambda: SimpleNamespace(release_unused=lambda: released.append(held.bytes_allocated()))
        )
        gc.collect()  # tables of other tests
        before = held.bytes_allocated()
        assert len(made.catalogue) == 5000
        assert released == [before], "released after the file was read, with nothing of it still in use"

    def test_caches_take_what_the_configuration_gives_them(self, bundle):
        plan = plan_of(
            parse({**TORCH, "cache": {"l1_bytes": 2**20, "l2_shard_bytes": 2**21, "l2_max_shards": 3}}), sizes_of(bundle), {}, Use(), "host"
        )
        kept = {one.key: (process.count, one.bytes) for process in plan.processes for one in process.parts if one.key.startswith("cache.")}
        assert kept == {"cache.l1_bytes": (1, 2**20), "cache.l2_shard_bytes": (3, 2**21)}
        without = plan_of(parse({**TORCH, "cache": {"enabled": False}}), sizes_of(bundle), {}, Use(), "host")
        assert not any(one.key.startswith("cache.") for process in without.processes for one in process.parts)

    def test_states_that_are_handed_over_take_what_they_may_in_the_switchboard_and_on_their_way(self, bundle):
        settings = parse({"encoder": {**TORCH["encoder"], "handover": {"max_bytes": 2**20}}})
        plan = plan_of(settings, sizes_of(bundle), {}, Use(), "host")
        taken = {process.name: one.when for process in plan.processes for one in process.parts if one.key == "encoder.handover.max_bytes"}
        assert taken == {"encoder": "passing", "switchboard": "filled"}


class TestProcesses:
    def test_colocated_stages_are_in_the_gateway(self, bundle):
        names = {placement: [one.name for one in _plan(bundle, placement=placement).processes] for placement in ("split", "colocated")}
        assert set(names["split"]) - set(names["colocated"]) == {"encoder", "generator", "ranker"}
        assert "encoder torch: weights" in parts_of(bundle, TORCH)

    @pytest.mark.parametrize("order", [{}, TORCH, {"encoder": {"order": ["openvino", "torch"]}}])
    def test_a_colocated_gateway_holds_what_the_processes_of_a_split_service_hold_and_libraries_once(self, bundle, order):
        split = {role: parts_of(bundle, {"placement": "split", **order}, role=role) for role in ("encoder", "generator", "ranker")}
        apart = {name: part for parts in split.values() for name, part in parts.items()}
        together = parts_of(bundle, order)
        assert {name: part for name, part in together.items() if name in apart and not name.startswith("Python")} == {
            name: part for name, part in apart.items() if not name.startswith("Python")
        }

    @pytest.mark.parametrize(("placement", "position", "role", "of_three"), [("split", 1, "encoder", 30), ("colocated", 0, "gateway", 90)])
    def test_users_are_shared_out_among_a_stages_replicas_and_not_among_gateways(self, bundle, placement, position, role, of_three):
        settings, sizes = parse({**TORCH, "placement": placement}), sizes_of(bundle)
        one, three = (plan_of(settings, sizes, {role: count}, Use(90), "host").processes[position] for count in (1, 3))
        users = [next(part.users for part in process.parts if part.users is not None) for process in (one, three)]
        assert users == [90, of_three]
        assert (one.count, three.count) == (1, 3)

    def test_replicas_are_those_of_the_file(self):
        scaled = {"name": "encoder", "autoscaling_config": {"min_replicas": 0, "initial_replicas": 1, "max_replicas": 5}}
        document = {"applications": [{"deployments": [{"name": "gateway", "num_replicas": 2}, scaled]}]}
        assert replicas(document, most=False) == {"gateway": 2, "encoder": 1}
        assert replicas(document, most=True) == {"gateway": 2, "encoder": 5}
        auto = {"name": "gateway", "num_replicas": "auto"}
        for more, first, highest in (({}, 1, 100), ({"autoscaling_config": {"min_replicas": 2, "max_replicas": 7}}, 2, 7)):
            document = {"applications": [{"deployments": [{**auto, **more}]}]}
            assert [replicas(document, most=most)["gateway"] for most in (False, True)] == [first, highest]
        wrong = {"applications": [{"deployments": [{"name": "gateway", "num_replicas": "two"}]}]}
        with pytest.raises(ConfigError, match="deployment gateway has 'two' replicas"):
            replicas(wrong, most=False)

    def test_a_gpu_holds_weights_and_states(self, bundle):
        settings = parse({**TORCH, "encoder": {"order": ["torch"], "options": {"torch": {"state_bytes": 2**20, "keep_from": 32}}}})
        sizes = replace(sizes_of(bundle), decoder=None)
        process = replica("encoder", settings, sizes, Use(), "gpu")
        on_gpu = {part.name for part in process.parts if part.place == "gpu"}
        assert {"encoder torch: weights", "encoder torch: kept states", "encoder: a batch"} <= on_gpu

    @pytest.mark.parametrize("dtype", ["fp32", "fp16"])
    def test_states_on_a_gpu_are_fp32_over_pinned_arenas_that_are_rounded_up(self, dtype):
        budget, history, arenas = 300 << 20, 1030, []
        sizes = replace(LARGE, encoder=LARGE.encoder.model_copy(update={"max_history": 2048, "linear_dim": 48}))
        options = {"torch": {"state_bytes": budget, "state_dtype": dtype}}
        process = replica("encoder", parse({"encoder": {"order": ["torch"], "options": options}}), sizes, Use(2, history), "gpu")
        parts = {part.place: part for part in process.parts if part.name == "encoder torch: kept states"}

        def allocate(shape, dtype):
            arenas.append(np.empty(shape, dtype))
            return arenas[-1]

        store = make_store(sizes.encoder, StateOptions(budget, dtype), with_states=False, allocate=allocate)
        user = DeviceUsers(store.pool, torch.device("cpu"), budget).make(("m", "ada"), np.arange(history - 1), history - 1)
        assert parts["gpu"].bytes == 2 * (user.size + OWNER_BYTES + (history - 1) * ROW_BYTES)
        assert parts["host"].bytes == sum(1 << math.ceil(math.log2(arena.nbytes)) for arena in arenas)

    @pytest.mark.parametrize(("items", "index", "there"), [(19_999, "auto", False), (20_000, "auto", True), (500, "cuda", True)])
    def test_a_gpu_holds_the_vectors_that_are_searched_there(self, bundle, items, index, there):
        settings = parse({"encoder": {"order": ["torch"], "options": {"torch": {"index": index}}}})
        sizes = sizes_of(bundle)
        sizes = replace(sizes, encoder=sizes.encoder.model_copy(update={"items": items}))
        process = replica("encoder", settings, sizes, Use(), "gpu")
        on_gpu = {part.name for part in process.parts if part.place == "gpu"}
        assert {"encoder torch: vectors of nearest items", "encoder torch: scores of all items"} <= on_gpu or not there
        assert any("nearest items" in name for name in on_gpu) == there

    def test_openvino_takes_nothing_of_a_gpu(self, bundle):
        for stage, others in (("encoder", {"CUDA context"}), ("ranker", set())):  # the encoder asks PyTorch whether triton could serve
            process = replica(stage, parse({stage: {"order": ["openvino"]}}), replace(sizes_of(bundle), graphs=GRAPHS), Use(), "gpu")
            assert {part.name for part in process.parts if part.place == "gpu"} <= others

    def test_an_encoder_imports_pytorch_where_triton_might_serve(self, bundle, monkeypatch):
        sizes = replace(sizes_of(bundle), graphs=GRAPHS)
        monkeypatch.setattr("deployments.sizing.engines.find_spec", lambda _: True)
        assert "torch" in libraries("encoder", parse({"encoder": {"order": ["openvino"]}}), sizes, "host")
        assert "torch" not in libraries("ranker", parse({"ranker": {"order": ["openvino"]}}), sizes, "host")

    def test_what_is_mapped_counts_once(self):
        process = Process("one", 3, (Part("own", 10), Part("programs", 7, "mapped")))
        assert Plan("m", (process, process)).bytes() == 2 * 3 * 10 + 7


class TestMachine:
    @pytest.mark.parametrize("version", [1, 2])
    def test_the_least_limit_of_the_groups_around_a_process_holds(self, tmp_path, version):
        limits = [("/pod", 4 * GIB), ("/pod/container", 6 * GIB)]
        assert memory_limit(machine(tmp_path, group="/pod/container", limits=limits, version=version)) == 4 * GIB

    def test_a_group_without_a_limit_has_the_machines(self, tmp_path):
        assert memory_limit(machine(tmp_path, total=8 * GIB, swap=GIB, group="/a", limits=[("/a", "max")])) == 9 * GIB

    @pytest.mark.parametrize(
        ("version", "swap_limits", "most"),
        [
            (2, [("/pod", 0)], 4 * GIB),
            (2, [("/pod", "max"), ("/pod/a", 2 * GIB)], 6 * GIB),
            (2, [("/pod", "max")], 36 * GIB),
            (1, [("/pod/a", 4 * GIB)], 4 * GIB),
            (1, [("/pod", 5 * GIB), ("/pod/a", 2**63 - 4096)], 5 * GIB),
            (1, [], 36 * GIB),
        ],
    )
    def test_a_group_has_no_more_swap_than_it_may_take(self, tmp_path, version, swap_limits, most):
        given = {"limits": [("/pod/a", 4 * GIB)], "swap_limits": swap_limits, "version": version}
        assert memory_limit(machine(tmp_path, swap=32 * GIB, group="/pod/a", **given)) == most

    def test_a_container_that_sees_its_own_group_as_the_outermost(self, tmp_path):
        assert memory_limit(machine(tmp_path, group="/docker/abc", limits=[("/", 4 * GIB)])) == 4 * GIB

    def test_what_cannot_be_read_is_no_limit(self, tmp_path):
        assert memory_limit(tmp_path) is None
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text("nonsense\n")
        assert memory_limit(tmp_path) is None

    def test_this_machine_has_some(self):
        assert memory_limit() > 2**28


class TestFit:
    def test_a_model_that_is_too_large_for_4_gib_is_refused_there_and_not_on_16(self, tmp_path):
        plan = plan_of(parse(TORCH), LARGE, {}, Use(), "host")
        small, large = (memory_limit(machine(tmp_path / str(gib), limits=[("/", gib * GIB)])) for gib in (4, 16))
        assert unfit(plan, large) == ""
        problem = unfit(plan, small)
        assert f"{plan.bytes('start'):,} bytes" in problem
        assert f"{4 * GIB:,} bytes (4.0 GiB)" in problem
        assert "encoder torch: weights, 2,0" in problem
        assert "fewer replicas" in problem

    def test_nothing_is_refused_that_may_fit(self):
        plan = Plan(
            "m", (Process("one", 2, (Part("weights", 100), Part("cache", 90, "filled", key="a.b"), Part("batch", 500, "passing"))),)
        )
        assert plan.bytes("start") == 200
        least = math.ceil(200 / (1 + TOLERANCE))
        assert unfit(plan, least) == "", "a prediction may be so far off"
        assert "weights" in unfit(plan, least - 1)

    def test_the_document_says_how_much_larger_than_the_memory_a_start_that_is_refused_is(self):
        (share,) = re.findall(r"memory at start is more than (\d+) % larger", (ROOT / "docs/operating-setup.md").read_text())
        plan = Plan("m", (Process("one", 1, (Part("weights", 1000 + 10 * int(share)),)),))
        assert (unfit(plan, 1001), unfit(plan, 999) != "") == ("", True)

    def test_a_cache_that_no_memory_could_hold_is_refused(self):
        plan = Plan("m", (Process("one", 1, (Part("cache", 2000, "filled", key="cache.l1_bytes"),)),))
        assert unfit(plan, 2000) == ""
        assert unfit(plan, 1999) == (
            "cache.l1_bytes has one keep 2,000 bytes (2.0 KiB), and there are 1,999 bytes (2.0 KiB) of memory; lower it"
        )

    def test_a_cache_that_no_memory_could_hold_is_refused_beside_stores_that_are_larger_together(self):
        encoders = Process("encoder", 4, (Part("states", 12 * GIB, "filled", key="encoder.options.torch.state_bytes"),))
        none = Process("ranker", 0, (Part("states", 40 * GIB, "filled", key="ranker.options.torch.state_bytes"),))
        others = (Part("own", 40 * GIB, "passing"), Part("kept", 40 * GIB, "filled", "gpu", key="c.d"))
        shard = Process("l2 shard", 1, (*others, Part("answers", 30 * GIB, "filled", key="cache.l2_bytes")))
        assert unfit(Plan("m", (encoders, none, shard)), 16 * GIB).startswith("cache.l2_bytes has l2 shard keep 32,212,254,720 bytes")
        assert unfit(Plan("m", (encoders, none, shard)), 30 * GIB) == ""

    def test_the_configuration_can_have_it_tried(self, bundle, caplog):
        with pytest.raises(ConfigError, match="memory_check: warn has it tried"):
            require_all_fit(parse(TORCH), bundle, {}, room=1000)
        with caplog.at_level(logging.WARNING):
            require_all_fit(parse({**TORCH, "memory_check": "warn"}), bundle, {}, room=1000)
        assert "takes" in caplog.text

    def test_a_replica_is_asked_for_its_own_part_only(self, bundle):
        settings = parse(TORCH)
        alone = replica("encoder", settings, sizes_of(bundle), Use(), "host").bytes("start")
        require_replica_fits(settings, bundle, "encoder", room=max(alone, 300 * 2**20))
        with pytest.raises(ConfigError):
            require_replica_fits(settings, bundle, "encoder", room=alone // 2)

    @pytest.mark.parametrize("placement", ["split", "colocated"])
    def test_a_gateway_is_asked_for_the_bytes_of_its_own_catalogue(self, tmp_path, placement):
        made, settings = make_bundle(tmp_path / "m", items=500), parse({**TORCH, "placement": placement})
        of_all = plan_of(settings, sizes_of(made), {}, Use(), "host").bytes("start")
        of_one = replica("gateway", settings, sizes_of(made), Use(), "host").bytes("start")
        checks = [(require_all_fit, {}, of_all), (require_replica_fits, "gateway", of_one)]
        rooms = [(check, asked, math.ceil(needed / (1 + TOLERANCE))) for check, asked, needed in checks]
        for check, asked, room in rooms:
            check(settings, made, asked, room=room)
        write_catalogue(Catalogue([Item(str(i), f"A thing {i}", {"text": "word " * 4000}) for i in range(500)]), made.path / CATALOGUE)
        for check, asked, room in rooms:
            with pytest.raises(ConfigError, match="of memory as soon as it serves"):
                check(settings, made, asked, room=room)

    def test_a_machine_that_does_not_tell_refuses_nothing(self, bundle, monkeypatch):
        monkeypatch.setattr(fit, "memory_limit", lambda: None)
        require_all_fit(parse(TORCH), bundle, {})


class TestStart:
    """What is refused as it starts, on a machine of 1 MiB."""

    @pytest.fixture
    def tiny(self, monkeypatch):
        monkeypatch.setattr(fit, "memory_limit", lambda: 2**20)

    @pytest.fixture
    async def encoder(self, three_versions):
        settings = {"model_dir": str(three_versions), "encoder": {"order": ["torch"]}}
        made = Encoder(tree := parse(settings), Heartbeat(tree, Handle(SwitchboardDeployment(settings)), "a"))
        yield made
        await made.close()

    def test_genrec_serve_refuses_before_anything_is_started(self, tiny, bundle, monkeypatch):
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it was started"))
        with pytest.raises(ConfigError, match="1,048,576 bytes"):
            serve(ROOT / "ray_config.yaml", model_dir=bundle.path.parent, profile="default")

    def test_a_cluster_elsewhere_is_not_measured_by_this_machine(self, tiny, bundle, monkeypatch):
        monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
        started = []
        monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
        serve(ROOT / "ray_config.yaml", model_dir=bundle.path.parent, profile="default")
        assert started

    def test_so_does_what_serves_for_as_long_as_a_block_lasts(self, tiny, bundle):
        with pytest.raises(ConfigError, match="memory_check"):
            local_document(ROOT / "ray_config.yaml", {"model_dir": str(bundle.path.parent)}, 8000)

    async def test_a_replica_that_cannot_hold_its_model_does_not_start(self, tiny, encoder):
        with pytest.raises(ConfigError, match="1,048,576 bytes"):
            await encoder.start()

    async def test_a_version_that_does_not_fit_is_not_taken_up_and_the_one_before_serves_on(self, encoder, monkeypatch):
        await encoder.load([3], only=True)
        monkeypatch.setattr(fit, "memory_limit", lambda: 2**20)
        encoder.model_cache.want([3, 2])
        await encoder.model_cache.settled()
        assert encoder.holds[3] == READY
        assert "memory_check: warn" in encoder.holds[2]

    async def test_a_version_that_does_not_fit_beside_the_one_that_is_held_is_not_taken_up(self, encoder, monkeypatch):
        monkeypatch.setattr(fit, "sizes_of", lambda bundle: replace(LARGE, name=bundle.version))
        alone = replica("encoder", parse(TORCH), LARGE, Use(), "host").bytes("start")
        monkeypatch.setattr(fit, "memory_limit", lambda: int(1.3 * alone))
        await encoder.load([3], only=True)
        encoder.model_cache.want([3, 2])
        await encoder.model_cache.settled()
        assert encoder.holds[3] == READY
        assert encoder.holds[2].startswith("tiny/2 beside tiny/3 takes ")
        assert "encoder: encoder torch: weights of tiny/3, " in encoder.holds[2]

    def test_a_gateway_counts_the_versions_that_it_holds_once_more_without_what_a_process_has_once(self, bundle):
        small = {stage: {"order": ["torch"], "options": {"torch": {"state_bytes": 2**20}}} for stage in ("encoder", "ranker")}
        settings = parse({**TORCH, **small, "cache": {"l1_bytes": 2**20}, "placement": "colocated"})
        process = replica("gateway", settings, sizes_of(bundle, sampled_entry(bundle)), Use(), "host")
        once = sum(part.bytes for part in process.parts if part.when == "start" and part.name.startswith(("Python", "library")))
        needed = math.ceil((2 * process.bytes("start") - once) / (1 + TOLERANCE))
        require_replica_fits(settings, bundle, "encoder", room=needed, beside=[bundle])
        with pytest.raises(ConfigError, match=f"{bundle.version} beside {bundle.version} takes"):
            require_replica_fits(settings, bundle, "encoder", room=needed - 1, beside=[bundle])

    @pytest.mark.parametrize("read", [True, False], ids=["read before", "never read"])
    def test_a_version_that_is_held_and_was_deleted_refuses_no_other(self, tmp_path, caplog, read):
        old, new = (make_bundle(tmp_path / "m", items=500) for _ in range(2))
        items = [Item(str(i), f"A thing {i}", {"text": "word " * 4000}) for i in range(500)]
        write_catalogue(Catalogue(items), old.path / CATALOGUE)
        if read:
            assert len(old.catalogue) == 500
        shutil.rmtree(old.path)
        settings = parse(TORCH)
        require_replica_fits(settings, new, "gateway", room=2**60, beside=[old])
        assert (f"the items of {old.version} cannot be read" in caplog.text) is not read
        alone = replica("gateway", settings, sizes_of(new, sampled_entry(new)), Use(), "host").bytes("start")
        with pytest.raises(ConfigError, match=f"catalogue of {old.version}, " if read else f"{new.version} beside {old.version} takes "):
            require_replica_fits(settings, new, "gateway", room=alone // 2, beside=[old])


class TestCommand:
    @pytest.fixture
    def run(self):
        app.command("size")(size)  # as the program registers what is called
        yield lambda *arguments: CliRunner().invoke(app, ["size", "--config", str(ROOT / "ray_config.yaml"), *arguments])
        app.registered_commands.pop()

    def test_json_has_every_part_in_bytes(self, run, bundle):
        told = json.loads(run("--model-dir", str(bundle.path.parent), "--json", "--users", "10", "--replicas", "encoder=2").stdout)
        encoder = next(one for one in told["processes"] if one["name"] == "encoder")
        assert encoder["count"] == 2
        assert encoder["bytes"]["start"] == sum(one["bytes"] for one in encoder["parts"] if one["when"] == "start")
        assert told["bytes"]["start"] == sum(one["count"] * one["bytes"]["start"] for one in told["processes"])
        assert told["items"] == 3000
        assert told["refused"] == ""

    def test_a_table_names_parts_and_the_settings_that_say_how_much(self, run, bundle):
        shown = run("--model-dir", str(bundle.path.parent), "--memory", "64GiB").stdout
        assert "kept answers (l1)" in shown
        assert "cache.l1_bytes" in shown
        assert shown.endswith("It fits.\n")

    @pytest.mark.parametrize(("device", "columns"), [("cpu", 80), ("gpu", 88)])
    def test_no_row_of_the_table_is_longer_than_a_terminals_lines(self, run, bundle, monkeypatch, device, columns):
        arguments = ("--model-dir", str(bundle.path.parent), "--device", device)
        in_a_file = run(*arguments).stdout
        monkeypatch.setattr("deployments.cli.size._terminal_columns", lambda: columns)
        rows = run(*arguments).stdout.partition("There are")[0].splitlines()
        assert max(map(len, rows)) <= columns < max(map(len, in_a_file.splitlines()))
        below = ("      encoder.options.", "      generator.options.")
        assert any(row.startswith(below) for row in rows), "what has no place in its row stands below it"

    def test_what_is_told_of_a_gpu_is_said_not_to_be_measured(self, run, bundle):
        of_gpu, of_cpu = (run("--model-dir", str(bundle.path.parent), "--device", device).stdout for device in ("gpu", "cpu"))
        assert "no GPU was measured" in of_gpu
        assert "measured" not in of_cpu

    def test_a_model_that_is_not_trained_is_sized_by_its_numbers(self, run):
        sizes = ("--items", "1000000", "--layers", "4", "--dim", "128", "--heads", "4", "--window", "500")
        told = json.loads(run(*sizes, "--json", "--decoder", "none", "--no-ranker").stdout)
        parts = {one["name"]: one["bytes"] for process in told["processes"] for one in process["parts"]}
        assert parts["encoder torch: weights"] > 4 * 1_000_000 * 128
        assert not any(name.startswith(("generator", "ranker")) for name in parts)

    @pytest.mark.parametrize("items", [20, 3000, 20_000])
    def test_the_decoder_of_a_model_that_is_not_trained_has_the_tokens_that_training_would_give_it(self, run, items):
        """The decoder has parameters of the preset `tiny` and, for each token, an embedding and a row of the head."""
        ids = build_semantic_ids(np.random.default_rng(0).normal(size=(items + 1, 8)).astype(np.float32))
        expected = DecoderConfig(levels=3, vocabulary=ids.vocabulary, state_dim=50, **PRESETS["tiny"]).parameters * 4
        assert _weights(run("--items", str(items), "--window", "20", "--json"))["generator torch_beam: weights"] == expected

    def test_another_catalogue_of_the_same_model(self, run, bundle):
        asked = run("--model-dir", str(bundle.path.parent), "--items", "1000000", "--json")
        assert json.loads(asked.stdout)["items"] == 1_000_000
        given = json.loads((bundle.path / MANIFEST).read_text())["decoder"]["config"]
        trained_anew = DecoderConfig.model_validate({**given, "vocabulary": fitting_vocabulary(1_000_000, 3)})
        assert _weights(asked)["generator torch_beam: weights"] == trained_anew.parameters * 4

    def test_status_1_where_the_memory_that_is_given_does_not_suffice(self, run, bundle):
        asked = run("--model-dir", str(bundle.path.parent), "--memory", "200 MB")
        assert asked.exit_code == 1
        assert "Serving would be refused" in asked.stdout

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("--memory", "much"), "--memory 'much' is not a size"),
            (("--memory", "0"), "--memory '0' is not a size"),
            (("--replicas", "encoder"), "--replicas 'encoder' is not of the form"),
            (("--replicas", "coder=2"), "there is no deployment 'coder'"),
            (("--replicas", "encoder=many"), "--replicas 'encoder=many' is not of the form"),
            (("--replicas", "gateway=0"), "--replicas 'gateway=0' is not of the form DEPLOYMENT=NUMBER with one replica at least"),
            (
                ("--layers", "3"),
                "--model-dir names a trained model, and --layers, --dim, --heads or --window are of one that is not trained",
            ),
            (("--decoder", "base"), "are of a model that is not trained yet; add --layers, --dim, --heads or --window, or leave them out"),
            (("--no-ranker",), "--decoder, --ranker and --no-ranker are of a model that is not trained yet"),
        ],
    )
    def test_bad_input_is_told(self, run, bundle, arguments, problem):
        asked = run("--model-dir", str(bundle.path.parent), *arguments)
        assert isinstance(asked.exception, ConfigError)
        assert problem in str(asked.exception)

    def test_a_model_that_is_not_trained_takes_the_number_of_items(self, run):
        assert "give --items" in str(run("--layers", "3").exception)

    def test_a_missing_model_says_what_to_do(self, run, tmp_path):
        assert "genrec train" in str(run("--model-dir", str(tmp_path / "none")).exception)


def _weights(asked):
    """Name -> bytes, of all parts that are told as JSON."""
    return {one["name"]: one["bytes"] for process in json.loads(asked.stdout)["processes"] for one in process["parts"]}


def _plan(bundle, **tree):
    return plan_of(parse({**TORCH, **tree}), sizes_of(bundle), {}, Use(), "host")


@pytest.mark.parametrize(
    ("stage", "name", "option", "value"),
    [
        ("encoder", "torch", "state_bytes", "256MB"),
        ("encoder", "torch", "keep_from", "many"),
        ("generator", "torch_beam", "prompt_bytes", "64MB"),
        ("generator", "torch_beam", "cache_bytes", 1.5e7),
        ("ranker", "torch", "state_bytes", None),
    ],
)
def test_a_size_that_is_no_whole_number_is_refused_with_its_key(bundle, stage, name, option, value):
    settings = parse({"model_dir": str(bundle.path.parent), **TORCH, stage: {"order": [name], "options": {name: {option: value}}}})
    with pytest.raises(ConfigError, match=rf"options\.{name}\.{option} \({value!r}\) must be a whole number, written out as 67108864"):
        require_replica_fits(settings, bundle, stage)


@pytest.mark.parametrize(
    ("stage", "name", "option"),
    [
        ("encoder", "mine", "state_bytes"),
        ("encoder", "mine", "keep_from"),
        ("encoder", "torch", "state_bytes"),
        ("generator", "torch_beam", "cache_bytes"),
        ("ranker", "mine", "micro_batch"),
    ],
)
def test_options_of_a_backend_of_ones_own_are_no_sizes_whatever_their_names_and_its(bundle, stage, name, option):
    own = {"backends": {name: "my_package.fast:Fast"}, "order": [name], "options": {name: {option: "256MB"}}}
    settings = parse({"model_dir": str(bundle.path.parent), **TORCH, stage: own})
    require_replica_fits(settings, bundle, stage, room=2**60)
    parts = replica(stage, settings, sizes_of(bundle), Use(), "host").parts
    assert not [part for part in parts if part.name.startswith(f"{stage} {name}:")]
