"""The documents tell the truth: what they say can be typed can be typed, what they link to is there, what is generated is current."""

import importlib.util
import inspect
import re
import subprocess
import sys

import pytest
import yaml
from ray.serve._private import api

from cluster import serve_keys
from cluster.config import GatewaySettings, Settings
from cluster.errors import ConfigError
from deployments.cli.config import config
from deployments.cli.configuration_reference import configuration_reference
from deployments.dashboards.build import HERE as DASHBOARDS
from deployments.http.api import create_api
from integrations.datasets.table import USUAL_NAMES
from tests.documents import DOCUMENTS, MARK, ROOT, anchors, commands, links, modules, paths, problem, scripts, shell_lines, targets

NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]
EVERY = pytest.mark.parametrize("text", [document.read_text() for document in DOCUMENTS], ids=NAMES)
ASKING = re.compile(r"\b(serve (deploy|status|shutdown)|ray (status|list))\b")
"""Ray's commands that are refused without its token."""
ASKED = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "configuration.md" and ASKING.search(page.read_text())]
"""The pages that have them run: configuration.md says what `serve deploy` ignores, no more."""
CHEAP = (
    "--help",
    "backends",
    "cluster env",
    "config",
    "config --markdown",
    "config --schema",
    "keys new --name shop --tenant shop",
)
"""Of the documents' commands, those that need no model, no data and no cluster."""
NOT_IN_CI = re.compile(
    r"^\s*(?:sudo )?(kubectl|helm|docker|systemctl|journalctl|ray (?:up|down|attach|exec|submit)|gcloud|aws|nvidia-smi)\b"
)
RUN = "import sys; from deployments.cli import main; sys.argv[0] = 'genrec'; main()"


@EVERY
def test_every_command_exists_with_the_options_it_is_shown_with(text):
    assert {str(command): why for command in commands(text) if (why := problem(command))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "genrec trian ml-1m",
        "genrec train ml-1m --epoch 3",
        "genrec models promot 4",
        "genrec models promote 4 --canary 2",
        "genrec models promote",
        'eval "$(genrec cluster environment)"',
        'env=$(genrec cluster environment) && eval "$env"',
        "X=1 genrec config --shema > schema.json",
        "genrec bench compare",
    ],
)
def test_a_command_that_would_be_refused_is_found(line):
    (command,) = commands(f"```\n{line}    # a comment\n```\n")
    assert problem(command)


def test_a_part_of_a_command_in_running_text_may_leave_things_out():
    found = list(commands("`genrec bench compare`, `genrec train --resume`, `genrec train --dim` and `genrec train ... --wrong`"))
    assert [bool(problem(command)) for command in found] == [False, False, False, True]


def test_output_and_quoted_text_are_no_commands():
    text = "```\ngenrec: unknown encoder 'trt'\ncurl -d '{\n  \"genrec\": 1}'\nsystemctl restart genrec --now\n```\n"
    assert list(commands(text)) == []


@pytest.mark.parametrize("arguments", CHEAP)
def test_a_command_that_needs_no_model_runs(arguments, tmp_path):
    command, at = [sys.executable, "-c", RUN, *arguments.split()], ROOT if arguments.startswith("config") else tmp_path
    done = subprocess.run(command, cwd=at, env=_environment(tmp_path), capture_output=True, text=True, timeout=1200, check=False)
    assert (done.returncode, done.stdout.strip() != "") == (0, True), done.stderr


def test_the_commands_that_run_are_those_that_the_documents_name():
    named = {command.arguments for document in DOCUMENTS for command in commands(document.read_text())}
    assert [arguments for arguments in CHEAP if tuple(arguments.split()) not in named] == []


@EVERY
def test_a_command_that_cannot_run_in_ci_says_so(text):
    assert [line for line in shell_lines(text) if NOT_IN_CI.match(line) and MARK not in line] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_relative_link_leads_to_a_file_and_a_heading(document):
    assert [link for link in links(document.read_text()) if not _leads_somewhere(document, link)] == []


def test_a_link_to_a_heading_that_is_not_there_is_found():
    assert _leads_somewhere(ROOT / "README.md", "docs/operating-load.md#rate-limits")
    assert not _leads_somewhere(ROOT / "README.md", "docs/operating-load.md#alarms")
    assert not _leads_somewhere(ROOT / "README.md", "docs/operatin.md")


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_module_and_script_is_there(document):
    text = document.read_text()
    assert [name for name in modules(text) if not _is_module(name, document.parent)] == []
    assert [name for name in scripts(text) if name.startswith(("benchmarks/", "examples/", "docs/")) and not (ROOT / name).is_file()] == []


@EVERY
def test_every_make_target_is_there(text):
    there = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(targets(text) - set(there)) == []


@EVERY
def test_every_http_path_is_in_the_interface(text):
    interface = [re.compile(re.sub(r"\\{\w+\\}", r"[^/]+", re.escape(path))) for path in _interface()]
    assert [path for path in paths(text) if not any(known.fullmatch(path) for known in interface)] == []


def test_an_http_path_that_is_not_there_is_found():
    assert paths("`GET /v1/backends`, `POST /v1/cache:invalidate`; see http://localhost:8000/v1/users/ada/history.") == {
        "/v1/backends", "/v1/cache:invalidate", "/v1/users/ada/history"
    }  # fmt: skip
    assert "/v1/recommendations" not in _interface()


def test_the_configuration_reference_is_current():
    assert (ROOT / "docs/configuration.md").read_text() == configuration_reference(), (
        "run: genrec config --markdown > docs/configuration.md"
    )


def test_two_forms_of_the_reference_at_once_are_refused():
    with pytest.raises(ConfigError, match="give one of them"):
        config(schema=True, markdown=True)


def test_every_key_of_the_tree_is_in_the_reference_with_its_own_default():
    sections = re.split(r"^## ", configuration_reference(), flags=re.MULTILINE)[1:]
    row = re.compile(r"^\| `(.+?)` \| .+? \| (.+?) \|", re.MULTILINE)
    shown = {section.split("\n")[0].strip("`"): dict(row.findall(section)) for section in sections}
    tree = Settings().model_dump(mode="json")
    for name in ("encoder", "generator", "ranker", "gateway", "cache", "events"):
        leaves = dict(_leaves(tree.pop(name)))
        assert {key: yaml.safe_load(shown[name][key].strip("`")) for key in leaves} == leaves
    top = {key: yaml.safe_load(value.strip("`")) for key, value in shown["Top level"].items() if "." not in key}
    assert top == tree, "keys of a part that may be left out have a point in their names"


def test_parts_that_may_be_left_out_or_repeated_have_their_keys_in_the_reference():
    reference = configuration_reference()
    for key in ("rate_limits.default.burst", "rate_limits.tenants.{}.per_s", "api_keys[].sha256"):
        assert f"| `{key}` |" in reference


@EVERY
def test_a_file_in_the_options_of_a_backend_has_its_absolute_path(text):
    shown = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    stages = [stage for tree in shown if isinstance(tree, dict) for stage in tree.values() if isinstance(stage, dict)]
    options = [value for stage in stages for of_one in stage.get("options", {}).values() for value in of_one.values()]
    assert [value for value in options if isinstance(value, str) and "/" in value and not re.match(r"/|\w+://", value)] == []


def test_the_columns_that_are_tried_and_the_options_for_others_stand_in_the_document_of_your_own_data():
    rows = re.findall(r"^\| \w+ \| (`\w+`(?:, `\w+`)*) \| `--([\w-]+)-column` \|", (ROOT / "docs/your-data.md").read_text(), re.MULTILINE)
    told = {role: tuple(re.findall(r"\w+", names)) for names, role in rows}
    assert told == {f"item-{role}" if role in ("id", "title") else role: names for role, names in USUAL_NAMES.items()}


@EVERY
def test_rays_commands_are_shown_with_the_token_that_they_take(text):
    assert [line for line in shell_lines(text) if ASKING.search(line) and "RAY_AUTH_MODE=token" not in line] == []


@pytest.mark.parametrize(
    ("document", "section"),
    [("operating-changes.md", "Settings"), ("operating-alerts.md", "Alerts"), ("add-a-backend.md", "Name it"),
     ("deploy.md", "Upgrade and roll back")],
)  # fmt: skip
def test_where_rays_commands_are_named_what_they_take_is_linked(document, section):
    text = (ROOT / "docs" / document).read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    linked = {link.removeprefix("deploy.md") for link in links(text)}
    assert ("`serve deploy`" in text, "#rays-token" in linked) == (True, True)


@pytest.mark.parametrize("page", ASKED, ids=lambda page: page.name)
def test_a_page_that_names_rays_commands_links_what_they_take_or_shows_them_with_it(page):
    text = page.read_text()
    linked = any(link.endswith("#rays-token") for link in links(text))
    assert linked or any("RAY_AUTH_MODE=token" in line for line in shell_lines(text))


def test_the_token_of_the_systemd_unit_is_shown_where_the_unit_has_it():
    unit, shown = (ROOT / "cluster/launch/genrec.service").read_text(), (ROOT / "docs/deploy.md").read_text()
    (home,), (directory,) = re.findall(r"\bHOME=(\S+)", unit), re.findall(r"^WorkingDirectory=(\S+)", unit, re.MULTILINE)
    assert home == directory
    assert 'RAY_AUTH_TOKEN_PATH="$PWD/.ray/auth_token"' in shown


def test_genrec_is_upgraded_by_a_wheel_of_the_same_version_as_the_launch_files_do_it():
    (options,) = set(re.findall(r"pip install --quiet (--force-reinstall [\w -]+) ", (ROOT / "cluster/launch/ray_up.yaml").read_text()))
    (row,) = [line for line in (ROOT / "docs/deploy.md").read_text().splitlines() if line.startswith("| genrec itself")]
    assert f"`pip install {options} ./genrec-*.whl`" in row


def test_what_serve_takes_as_it_starts_alone_is_told_with_the_way_to_change_it():
    of_the_start = inspect.signature(api.serve_start).parameters.keys() & serve_keys.ServeFile.model_fields.keys()
    (row,) = [line for line in (ROOT / "docs/deploy.md").read_text().splitlines() if line.startswith("| `http_options`")]
    assert set(re.findall(r"`(\w+)`", row.split("|")[1])) == of_the_start
    assert re.search(r"# .*`serve shutdown`.*\nhttp_options:", (ROOT / "ray_config.yaml").read_text())


def test_the_page_that_operators_open_first_leads_to_a_page_for_each_job():
    first, pages = ROOT / "docs/operating.md", sorted((ROOT / "docs").glob("operating-*.md"))
    assert pages
    assert sorted({link for link in links(first.read_text()) if link in {page.name for page in pages}}) == [page.name for page in pages]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("operating*.md")), ids=lambda page: page.stem)
def test_a_page_for_operators_begins_with_a_list_of_its_sections(page):
    sections = [anchors(heading).pop() for heading in re.findall(r"^## .+$", page.read_text(), re.MULTILINE)]
    beginning = page.read_text().partition("\n## ")[0]
    assert [link for link in re.findall(r"\]\(#([^)]+)\)", beginning) if link in sections] == sections


def test_every_alert_has_its_section_in_the_runbook():
    rules = [rule for file in DASHBOARDS.glob("*.yaml") for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]
    runbook = (ROOT / "docs/operating-alerts.md").read_text().partition("\n## Alerts\n")[2]
    assert rules
    assert re.findall(r"^### (\w+)$", runbook, re.MULTILINE) == [rule["alert"] for rule in rules]


def _environment(home):
    return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(home), "COLUMNS": "120"}


def _leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _interface():
    return {*create_api(None, None, GatewaySettings()).fastapi.openapi()["paths"], "/openapi.json", "/docs"}


def _is_module(name, beside):
    """Of the repository, of an example that the document stands beside, or installed."""
    path = name.replace(".", "/")
    of_ours = [(ROOT / path).with_suffix(".py"), ROOT / path / "__main__.py"]
    of_an_example = [] if beside in (ROOT, ROOT / "docs") else [*beside.rglob(f"{path}.py"), *beside.rglob(f"{path}/__main__.py")]
    return any(file.is_file() for file in of_ours + of_an_example) or _is_installed(name)


def _is_installed(name):
    ours = name.split(".")[0] in {"benchmarks", "cluster", "deployments", "integrations", "pipelines", "tests"}
    return not ours and importlib.util.find_spec(name.split(".")[0]) is not None


def _leads_somewhere(document, link):
    file, _, anchor = link.partition("#")
    target = (document.parent / file).resolve() if file else document
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or (target.suffix == ".md" and anchor in anchors(target.read_text()))
