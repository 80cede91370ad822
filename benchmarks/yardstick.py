"""Print how fast this machine is just now, so that durations of two runs can be compared: `python -m benchmarks.yardstick`.

Each core runs the same loop of plain Python in a process of its own. The loop's processor time tells the speed of a core; the wall time
beyond it is what other processes and other machines on the same host took.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

TURNS = 10_000_000


@dataclass(frozen=True)
class Loop:
    """One run of the loop, in seconds."""

    processor_s: float
    wall_s: float


def run_loop(turns: int = TURNS) -> Loop:
    wall, processor = time.perf_counter(), time.process_time()
    total = 0
    for turn in range(turns):
        total += turn & 7
    return Loop(time.process_time() - processor, time.perf_counter() - wall)


def describe(loops: list[Loop]) -> str:
    """`yardstick: 2 cores, 0.55 s of processor time each for 10 million turns, 1% of the time taken by others`."""
    processor_s = sum(loop.processor_s for loop in loops) / len(loops)
    taken = 1 - sum(loop.processor_s for loop in loops) / sum(loop.wall_s for loop in loops)
    turns = f"{TURNS // 1_000_000} million turns"
    return f"yardstick: {len(loops)} cores, {processor_s:.2f} s of processor time each for {turns}, {taken:.0%} of the time taken by others"


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores) as processes:
        print(describe(list(processes.map(run_loop, [TURNS] * cores))), flush=True)


if __name__ == "__main__":
    main()
