"""Time of one run, and of three runs at once, with different values of GOMP_SPINCOUNT.

    python benchmarks/spin_count.py recipes/quickstart.yaml run.test=false

The default of libgomp is 300000.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median
from tempfile import TemporaryDirectory


def main() -> None:
    """Time `finetune train` in turn with each value, and print a table of medians."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--spin-counts", nargs="+", default=("1000", "3000", "10000", "300000"))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_intermixed_args()
    command = [sys.executable, "-m", "finetune", "train", arguments.recipe, *arguments.overrides]
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.repeats):
        for spin_count in arguments.spin_counts:
            for num_runs in (1, 3):
                elapsed = time_runs(command, spin_count, num_runs=num_runs)
                seconds.setdefault((spin_count, num_runs), []).append(elapsed)
    print("| GOMP_SPINCOUNT | one run | three at once | ratio |")
    print("|--:|--:|--:|--:|")
    for spin_count in arguments.spin_counts:
        one, three = (median(seconds[spin_count, num_runs]) for num_runs in (1, 3))
        print(f"| {spin_count} | {one:.1f} s | {three:.1f} s | {three / one:.1f} |")


def time_runs(command: list[str], spin_count: str, *, num_runs: int) -> float:
    """Start runs at once and wait for them. Returns: seconds until the last one ends."""
    environment = {**os.environ, "GOMP_SPINCOUNT": spin_count}
    with TemporaryDirectory(prefix="spin-") as folder:
        started = time.perf_counter()
        processes = [
            subprocess.Popen(
                [*command, "--out", f"{folder}/{number}"],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for number in range(num_runs)
        ]
        exit_codes = [process.wait() for process in processes]
        if any(exit_codes):
            sys.exit(f"failed: {' '.join(command)}")
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
