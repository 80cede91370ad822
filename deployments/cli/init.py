"""`genrec init`: the configuration and the launch files of a service, in a directory of its own."""

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import ConfigError
from deployments.shipped import LAUNCH

EXAMPLE_MODEL = "models/ml-100k"
EXAMPLE_HOME = "/opt/genrec"
NAME = re.compile(r"\w[\w.-]*")
UNIT_PATH = re.compile(r"[^\s\"'\\$%]+")  # what systemd takes as it stands
Directory = Annotated[Path, typer.Argument(help="where to write; its name becomes the model's, as in models/shop")]


def init(directory: Directory) -> None:
    """Write ray_config.yaml, one_machine.yaml and the files for systemd, Docker, ray up and Kubernetes, all for one model."""
    home = directory.resolve()
    if not NAME.fullmatch(home.name):
        raise ConfigError(f"{home.name!r} cannot be a model's name; use letters, digits, '.', '_' and '-', as in: genrec init shop")
    for path, cure in ((home, "take another directory"), (_command(), "install genrec elsewhere")):
        if not UNIT_PATH.fullmatch(str(path)):
            raise ConfigError(f"{path} has a space, a quote, '$', '%' or a backslash, which a systemd unit cannot name; {cure}")
    texts = {path.name: filled_in(path.read_text(), home) for path in sorted(LAUNCH.iterdir()) if path.is_file()}
    write(texts, home)
    typer.echo(f"wrote {', '.join(texts)}\n\nNext, in {home}:")
    typer.echo(f"  genrec train table --path events.csv --items items.csv --model-dir models/{home.name}")
    typer.echo(f"  genrec compile --model-dir models/{home.name}")
    typer.echo("  genrec serve --config one_machine.yaml")


def filled_in(text: str, home: Path) -> str:
    """A launch file with the paths of this installation in place of the examples, all at once: a path may itself hold an example."""
    paths = {f"{EXAMPLE_HOME}/.venv/bin/genrec": str(_command()), EXAMPLE_HOME: str(home), EXAMPLE_MODEL: f"models/{home.name}"}
    return re.sub("|".join(map(re.escape, paths)), lambda example: paths[example[0]], text)


def _command() -> Path:
    """The command `genrec`: beside the interpreter or, as of `pip install --user`, on the search path. Raises ConfigError without one."""
    beside = Path(sys.executable).with_name("genrec")
    found = str(beside) if beside.is_file() else shutil.which("genrec")
    if not found:
        raise ConfigError(f"the command `genrec` is neither {beside} nor on the search path; have it on PATH, or install genrec anew")
    return Path(found).absolute()


def write(texts: dict[str, str], home: Path) -> None:
    """Write all files, or none where one exists already or the disk does not take them all. Raises ConfigError."""
    if there := [name for name in texts if (home / name).exists()]:
        raise ConfigError(f"{home} already has {', '.join(there)}; nothing was written: move them away, or name another directory")
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".init-", dir=home) as drafts:
            for name, text in texts.items():
                (Path(drafts) / name).write_text(text)
            for name in texts:
                (Path(drafts) / name).rename(home / name)
    except OSError as error:
        raise ConfigError(f"{home} cannot be written: {error}; make room or name another directory, and run it again") from error
