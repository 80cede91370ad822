"""Load on a server, open loop: requests come when they are due, however long the answers to earlier ones take.

    plan = Plan("http://127.0.0.1:8000", (Phase("before", 50, 10), Phase("after", 50, 20)), bodies)
    with Load(plan) as load:            # a process of its own: what the caller does costs the clients no time
        sleep(load.until("after")); kill_something()
        results = load.results()
    results.phase("after").percentile(99), results.failed.sum()

A latency counts from the moment a request was due, not from when it could be sent, so a stall is seen by every request it held up. With
`clients` in place of rates the loop is closed: so many callers, each of which asks again as soon as it is answered.

    python -m benchmarks.load --url http://127.0.0.1:8000 --rate 50 --seconds 10 --body '{"user_id": "1", "behaviours": []}'
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Annotated, Any, Literal, Self

import numpy as np
import typer
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
NO_ANSWER, OUT_OF_TIME = 0, -1
"""In place of a status: the connection was refused or lost; nothing came in time."""
PATIENCE_S = 60.0
COLUMNS = {
    "due": float,
    "latency": float,
    "status": np.int16,
    "retry_after": float,
    "attempts": np.int16,
    "body": np.int32,
    "degraded": bool,
    "version": np.int32,
    "stages": np.int32,
    "tier": np.int32,
    "items": np.uint32,
    "model_ms": float,
}
"""What is taken down of each request, in this order; see Results."""


@dataclass(frozen=True)
class Phase:
    """So many seconds at so many requests/s; in a closed loop the rate does not matter."""

    name: str
    rate: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What is sent. `bodies` are sent in turns.

    `retries`: how often a request is sent again that found no server, or was answered 502, 503 or 504, each time after `retry_pause_s`.
    `examine`: also note the backends that answered, which costs the driver some microseconds a request.
    """

    url: str
    phases: tuple[Phase, ...]
    bodies: tuple[str, ...]
    path: str = "/v1/recommend"
    headers: dict[str, str] = field(default_factory=dict)
    arrivals: Literal["constant", "poisson"] = "constant"
    clients: int = 0
    timeout_s: float = 10.0
    retries: int = 0
    retry_pause_s: float = 0.1
    examine: bool = False
    connections: int = 4000
    seed: int = 0

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def due(self) -> FloatArray:
        """When each request is due, in seconds from the beginning, in order, (N,)."""
        rng, start, due = np.random.default_rng(self.seed), 0.0, []
        for phase in self.phases:
            count = round(phase.rate * phase.seconds)
            even = np.arange(count) / phase.rate if count else np.zeros(0)
            # given their number, the moments of a Poisson process are uniform
            due.append(start + (even if self.arrivals == "constant" else np.sort(rng.uniform(0, phase.seconds, count))))
            start += phase.seconds
        return np.concatenate(due)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "Plan":
        tree = json.loads(text)
        return cls(**{**tree, "phases": tuple(Phase(**phase) for phase in tree["phases"]), "bodies": tuple(tree["bodies"])})


@dataclass(frozen=True, eq=False)
class Results:
    """What became of N requests, in the order in which they were due; arrays (N,).

    `due`: seconds from the beginning; `latency`: seconds from then to the last byte; `status`: as HTTP's, NO_ANSWER or OUT_OF_TIME;
    `retry_after`: seconds, nan where not told; `attempts`: how often it was sent; `body`: which of the plan's.
    Where the answers were examined, else 0: `degraded`, `version` and `stages` ("encode=torch generate=vllm") and `tier` as indices into
    `words`, `items`: a checksum of the items' ids in order, `model_ms`: what the stages say they took, all together.
    """

    began: float
    phases: tuple[Phase, ...]
    words: tuple[str, ...]
    due: FloatArray
    latency: FloatArray
    status: NDArray[np.int16]
    retry_after: FloatArray
    attempts: NDArray[np.int16]
    body: NDArray[np.int32]
    degraded: BoolArray
    version: NDArray[np.int32]
    stages: NDArray[np.int32]
    tier: NDArray[np.int32]
    items: NDArray[np.uint32]
    model_ms: FloatArray

    def __len__(self) -> int:
        return len(self.due)

    @property
    def ok(self) -> BoolArray:
        return np.asarray(self.status == 200)

    @property
    def rejected(self) -> BoolArray:
        """Told to come back later, and when; at once, where the gateway that had it was lost: that is a failure."""
        return np.asarray(np.isin(self.status, (429, 503)) & (self.retry_after > 0))

    @property
    def failed(self) -> BoolArray:
        return ~(self.ok | self.rejected)

    def where(self, mask: BoolArray) -> "Results":
        return replace(self, **{name: getattr(self, name)[mask] for name in COLUMNS})

    def between(self, start: float, stop: float) -> "Results":
        """Those due in these seconds from the beginning."""
        return self.where((self.due >= start) & (self.due < stop))

    def phase(self, name: str) -> "Results":
        start = starts(self.phases)[name]
        seconds = sum(phase.seconds for phase in self.phases if phase.name == name)
        return self.between(start, start + seconds)

    def percentile(self, q: float) -> float:
        """Of the answered requests' latency, in milliseconds; nan where none was answered."""
        return self.where(self.ok).percentile_of_all(q)

    def percentile_of_all(self, q: float) -> float:
        """The same, failed ones included."""
        return float(np.percentile(self.latency, q)) * 1e3 if len(self) else float("nan")

    def goodput(self, within_s: float = float("inf")) -> float:
        """Requests/s answered with 200 in this time, over the span in which they were due."""
        good = self.ok & (self.latency <= within_s)
        return float(good.sum()) / max(1e-9, self.span)

    def throughput(self) -> float:
        """Answers of 200 a second by when they came: the slope of their number, so that it does not matter how many come at a time, nor
        how many were under way when the measuring began.
        """
        came = np.sort((self.due + self.latency)[self.ok])
        return float(np.polyfit(came, np.arange(len(came)), 1)[0]) if len(came) > 1 else 0.0

    @property
    def span(self) -> float:
        """Seconds from the first to the last, and one gap more."""
        if len(self) < 2:
            return 1.0
        return float(self.due[-1] - self.due[0]) * len(self) / (len(self) - 1)

    def statuses(self) -> dict[str, int]:
        values, counts = np.unique(self.status, return_counts=True)
        names = {NO_ANSWER: "no connection", OUT_OF_TIME: "out of time"}
        return {names.get(int(value), str(value)): int(count) for value, count in zip(values, counts, strict=True)}

    def named(self, column: Literal["version", "stages", "tier"]) -> dict[str, int]:
        """How often each occurs among the answered."""
        values, counts = np.unique(getattr(self, column)[self.ok], return_counts=True)
        return {self.words[value]: int(count) for value, count in zip(values, counts, strict=True)}

    def summary(self) -> dict[str, Any]:
        return {
            "requests": len(self),
            "rate_per_s": round(len(self) / max(1e-9, self.span), 2) if len(self) else 0.0,
            "goodput_per_s": round(self.goodput(), 2),
            "failed": int(self.failed.sum()),
            "rejected": int(self.rejected.sum()),
            "degraded": int(self.degraded.sum()),
            "attempts": int(self.attempts.sum()),
            "p50_ms": round(self.percentile(50), 2),
            "p99_ms": round(self.percentile(99), 2),
            "statuses": self.statuses(),
        }

    def windows(self, width_s: float = 1.0) -> list[dict[str, float]]:
        """The same figures for each window of this width, by when requests were due."""
        edges = np.arange(0, sum(phase.seconds for phase in self.phases), width_s).tolist()
        return [{"at_s": round(edge, 3), **self.between(edge, edge + width_s).figures(width_s)} for edge in edges]

    def figures(self, width_s: float) -> dict[str, float]:
        """What one window shows; rates are per second."""
        return {
            "rate": len(self) / width_s,
            "good": float(self.ok.sum()) / width_s,
            "failed": float(self.failed.sum()),
            "rejected": float(self.rejected.sum()),
            "degraded": float(self.degraded.sum()),
            "p50_ms": round(self.percentile(50), 3),
            "p99_ms": round(self.percentile(99), 3),
        }


def starts(phases: Sequence[Phase]) -> dict[str, float]:
    """When each phase begins, in seconds from the beginning; of several of one name, the first."""
    found: dict[str, float] = {}
    start = 0.0
    for phase in phases:
        found.setdefault(phase.name, start)
        start += phase.seconds
    return found


class Load:
    """A plan under way, in a process of its own, from entering the `with` block on, which raises RuntimeError where the driver fails.
    `niceness`: of that process at least, so that it leaves the core to others; one that is started nicer stays so.
    """

    def __init__(self, plan: Plan, niceness: int = 0) -> None:
        self.plan, self._niceness = plan, niceness
        self.began = 0.0
        self._directory = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.load_client", str(self._out)]
        root = Path(__file__).resolve().parents[1]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self._process.stdin
        assert self._process.stdout
        if self._niceness > os.getpriority(os.PRIO_PROCESS, self._process.pid):  # to take niceness away is not every user's right
            os.setpriority(os.PRIO_PROCESS, self._process.pid, self._niceness)
        with suppress(BrokenPipeError), self._process.stdin as plan:  # it may have ended already
            plan.write(self.plan.dump())
        if not (began := self._process.stdout.readline()):
            error = _ended(self._process.wait())
            self.__exit__(None, None, None)
            raise error
        self.began = float(began)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process
        assert self._process.stdout
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._directory.cleanup()

    @property
    def now(self) -> float:
        """Seconds from the beginning."""
        return monotonic() - self.began

    def until(self, name: str, plus_s: float = 0.0) -> float:
        """Seconds from now to so long after the beginning of this phase; 0 where that is over."""
        return max(0.0, starts(self.plan.phases)[name] + plus_s - self.now)

    def results(self) -> Results:
        """Wait for the last answer. Raises RuntimeError where the driver failed."""
        assert self._process
        status = self._process.wait(self.plan.seconds + (self.plan.retries + 1) * self.plan.timeout_s + PATIENCE_S)
        if status:
            raise _ended(status)
        with np.load(self._out, allow_pickle=False) as stored:
            columns = {name: stored[name] for name in stored.files}
        return Results(self.began, self.plan.phases, tuple(columns.pop("words").tolist()), **columns)

    @property
    def _out(self) -> Path:
        return Path(self._directory.name) / "results.npz"


def _ended(status: int) -> RuntimeError:
    return RuntimeError(f"the load driver ended with status {status}; what it printed says why")


def run(plan: Plan) -> Results:
    """Carry out a plan and wait for it."""
    with Load(plan) as load:
        return load.results()


def main(
    *,
    url: Annotated[str, typer.Option()],
    body: Annotated[str, typer.Option(help="of a request")],
    rate: Annotated[float, typer.Option(help="requests/s")] = 10.0,
    seconds: Annotated[float, typer.Option()] = 10.0,
    clients: Annotated[int, typer.Option(help="a closed loop of so many callers, in place of the rate")] = 0,
) -> None:
    """One phase, and its figures as JSON."""
    results = run(Plan(url, (Phase("load", rate, seconds),), (body,), clients=clients, examine=True))
    print(json.dumps(results.summary(), indent=2))


if __name__ == "__main__":
    typer.run(main)
