"""Cases of first_gpu.py: small cases of the kernels once more, watched by NVIDIA's compute-sanitizer.

    python -m benchmarks.first_gpu_sanitizer package.module:function OPTIONS LABEL

runs one case in this process, which is what compute-sanitizer watches. OPTIONS are JSON, LABEL is as the table's row has it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.guarded import Case, Finding, Label, NotHere, alone

PROGRAM, TOOLS = "compute-sanitizer", ("memcheck", "racecheck")
KERNELS = "benchmarks.first_gpu_kernels:cases"
WATCHED = (Label("attention, with gradients", "1 x 64, 1, 33 rows", "fp32"), Label("append", "2 x 50, 3 behind 0, 1, 513", "fp32"))
SHARE = 0.9
"""Of the time that a case may take: after that it ends compute-sanitizer itself, which would go on without it."""
_SUMMARY = re.compile(r"^=+ .*SUMMARY: (\d+) ", re.MULTILINE)
_COMPLAINT = re.compile(r"^=+ (?!COMPUTE-SANITIZER|.*SUMMARY)(\S.*)$", re.MULTILINE)


def cases(*, limit_s: float) -> Iterator[Case]:
    for tool in TOOLS:
        for label in WATCHED:
            yield Case(Label(f"{PROGRAM} {tool}: {label.what}", label.sizes, label.dtype), partial(_kernel, tool, label, SHARE * limit_s))


def _kernel(tool: str, label: Label, limit_s: float) -> Finding:
    if not shutil.which(PROGRAM):
        raise NotHere(f"{PROGRAM} is not installed")
    from benchmarks.devices import DEVICE  # noqa: PLC0415 - imports torch, which is of no use where there is nothing to run

    if DEVICE == "cpu":
        raise NotHere(f"{PROGRAM} watches what runs on a GPU")
    return watched(tool, KERNELS, {"quick": True}, label, limit_s)


def watched(tool: str, cases: str, options: Mapping[str, Any], label: Label, limit_s: float) -> Finding:
    """How many errors the tool found in one case. Raises RuntimeError where that did not run to its end."""
    ran = [sys.executable, "-m", "benchmarks.first_gpu_sanitizer", cases, json.dumps(options), str(label)]
    status, said = _ended([PROGRAM, "--tool", tool, *ran], limit_s)
    summary, complaint = _SUMMARY.search(said), _COMPLAINT.search(said)
    if summary and (count := int(summary[1])):
        return Finding(float(count), 0.0, note=complaint[1] if complaint else "")
    if status or not summary:
        raise RuntimeError(f"status {status}: {' '.join(said.split()[-30:])}")
    return Finding(0.0, 0.0)


def _ended(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else a tensor's neighbours in torch's memory count as its own
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def main(arguments: Sequence[str]) -> int:
    cases, options, label = arguments
    row = alone(cases, json.loads(options), label)
    print(row.verdict, row.note)
    return int(row.verdict != "ok")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
