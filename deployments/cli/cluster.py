"""`genrec cluster`: several Ray nodes on this machine for trials, and the environment for nodes that are started by hand."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from cluster import profile as profiles
from cluster.errors import ConfigError
from deployments.cli.config import ConfigFile
from deployments.cli.local_cluster import STATE_FILE, LocalCluster
from deployments.cli.node_plan import MOST_NODES
from deployments.cli.serve import Profile
from deployments.cli.signals import end_in_order

app = typer.Typer(no_args_is_help=True, help="Try genrec on several Ray nodes on this machine, and prepare nodes for it.")
Directory = Annotated[
    Path | None, typer.Option("--dir", help="where its logs and state are (default: genrec-UID/cluster in the system's /tmp)")
]


@app.command()
def env(*, profile: Profile = None) -> None:
    """Print the variables and the limit of open files that a node needs before `ray start`: env=$(genrec cluster env) && eval "$env"."""

    def fallen_back(reason: str) -> None:
        typer.echo(f"genrec: {reason}; so this is the default profile, which all nodes need then: --profile default", err=True)

    variables = profiles.environment(profile, fallen_back)
    files, _ = profiles.open_files()
    typer.echo(f"ulimit -S -n {files}")
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def up(
    path: ConfigFile = Path("ray_config.yaml"),
    *,
    nodes: Annotated[int, typer.Option(help="Ray nodes; the first is the head, which runs no replicas", min=1, max=MOST_NODES)] = 3,
    cpus: Annotated[int, typer.Option(help="CPUs that each node says it has", min=1)] = 8,
    port: Annotated[int, typer.Option(help="where the head's proxy listens", min=1, max=65535)] = 8000,
    redis: Annotated[str | None, typer.Option(help="where the head keeps what must outlive it, such as redis://127.0.0.1:6379")] = None,
    profile: Profile = None,
    directory: Directory = None,
) -> None:
    """Start the nodes, deploy the application, and wait until it answers."""
    end_in_order()
    directory = directory or default_directory()
    if (directory / STATE_FILE).exists():
        raise ConfigError(f"a trial cluster runs with {directory} already; end it first: genrec cluster down")
    cluster = LocalCluster(path, {}, nodes=nodes, cpus=cpus, port=port, redis=redis, profile=profile, directory=directory)
    with Console(stderr=True).status(f"starting {nodes} nodes; their logs are in {directory}"):
        cluster.start()
    show(cluster)


@app.command()
def status(*, directory: Directory = None) -> None:
    """Show the nodes, what runs on each, and where their proxies answer."""
    show(LocalCluster.find(directory or default_directory()))


@app.command("kill-node")
def kill_node(index: Annotated[int, typer.Argument(help="the node's number; 0 is the head")], *, directory: Directory = None) -> None:
    """End all processes of a node at once, with kill -9."""
    LocalCluster.find(directory or default_directory()).kill_node(index)


@app.command("start-node")
def start_node(
    index: Annotated[int, typer.Argument(help="the node's number; 0, the head, needs --redis")], *, directory: Directory = None
) -> None:
    """Start a node again that was killed."""
    cluster = LocalCluster.find(directory or default_directory())
    if index == 0:
        cluster.restart_head()
    else:
        cluster.start_node(index)


@app.command()
def down(*, directory: Directory = None) -> None:
    """End the trial cluster."""
    LocalCluster.find(directory or default_directory()).stop()


def default_directory() -> Path:
    """The directory of trial clusters by default, one for each user of the machine."""
    return profiles.private_directory() / "cluster"


def show(cluster: LocalCluster) -> None:
    """Print a table with a row for each node."""
    replicas = cluster.replicas()
    answering = set(cluster.urls)
    table = Table("node", "session", "Ray's name", Column("proxy", no_wrap=True, min_width=22), "replicas")
    for node in cluster.nodes:
        names = sorted(replica["deployment"] for replica in replicas if replica["node_id"] == node.node_id)
        proxy = node.url if node.url in answering else "none answers"
        table.add_row(
            f"{node.index} (head)" if node.index == 0 else str(node.index),
            str(node.pid) if node.alive else "killed",
            node.node_id[:12],
            proxy,
            ", ".join(names) or "-",
        )
    Console().print(table)
