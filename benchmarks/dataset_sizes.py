"""Training speed, time to the first step and memory for datasets of other sizes.

    python benchmarks/dataset_sizes.py recipes/cifar10/nano_32.yaml DATA/cifar10 --sizes 1000 500000

The rows of a parquet dataset are repeated up to each size. The first measurement of a size has an
empty cache, the following ones a warm cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq


def main() -> None:
    """Write a dataset of each size, run `finetune bench` on it, and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("dataset", help="folder with train-*.parquet")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--sizes", nargs="+", type=int, default=(1_000, 100_000))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_intermixed_args()
    files = sorted(Path(arguments.dataset).rglob("train*.parquet"))
    table = pa.concat_tables([pq.read_table(file) for file in files])
    print("| images | images/s | first step | host |")
    print("|--:|--:|--:|--:|")
    for size in arguments.sizes:
        with TemporaryDirectory(prefix="sizes-") as folder:
            target = Path(folder) / "data" / "train-00000-of-00001.parquet"
            target.parent.mkdir()
            with pq.ParquetWriter(target, table.schema) as writer:
                for start in range(0, size, len(table)):
                    writer.write_table(table.slice(0, size - start), row_group_size=1000)
            command = [sys.executable, "-m", "finetune", "bench", arguments.recipe]
            command += [f"data.source=parquet:{target.parent}", *arguments.overrides]
            command += ["--json", "--repeats", "1", "--steps", str(arguments.steps)]
            environment = {**os.environ, "FINETUNE_CACHE": f"{folder}/cache"}
            for _ in range(arguments.repeats):
                done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
                found = json.loads(done.stdout)
                print(
                    f"| {size:,} | {found['train']['median']:.1f} | "
                    f"{found['seconds_to_first_step']:.1f} s | "
                    f"{found['host_bytes'] / 2**20:,.0f} MiB |"
                )


if __name__ == "__main__":
    main()
