"""Tables and `describe`, here, by the reference, and by the calls of the libraries that cannot be avoided.

    python benchmarks/tables.py    # with the interpreter of .venv-reference, the reference

Prints milliseconds, the least of some rounds, on the wall and of the processor (all threads). Ten columns of a million
float64 for pandas, Parquet and `describe`, of a hundred thousand for CSV and of ten thousand for JSON; a hundred
columns for Arrow, of a thousand and of a million rows, which must take the same time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import tensordict
from tensordict import TensorDict


def least(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The least times of a call, on the wall and of the processor, in ms."""
    times = []
    for _ in range(rounds):
        start, used = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - start, time.process_time() - used))
    return min(wall for wall, _ in times) * 1e3, min(used for _, used in times) * 1e3


def main() -> None:
    """Print a line for each call."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    columns = {f"c{i}": np.random.rand(1_000_000) for i in range(10)}
    frame = pd.DataFrame(columns)
    td = TensorDict({name: torch.from_numpy(values) for name, values in columns.items()}, [1_000_000])
    table = pa.table(columns)
    with tempfile.TemporaryDirectory() as folder:
        path, own = f"{folder}/own.parquet", f"{folder}/library.parquet"
        texts, lines = f"{folder}/rows.csv", f"{folder}/rows.jsonl"
        frame[:100_000].to_csv(texts, index=False)
        frame[:10_000].to_json(lines, orient="records", lines=True)
        some, few = td[:100_000], td[:10_000]
        again = {"overwrite": True} if hasattr(td, "to_arrow") else {}  # the reference replaces unasked
        calls: dict[str, Callable[[], object]] = {
            "to_pandas": td.to_pandas,
            "  library: DataFrame(dict of arrays)": lambda: pd.DataFrame(columns),
            "from_pandas": lambda: TensorDict.from_pandas(frame),
            "  library: a copy of each column": lambda: [frame[name].to_numpy(copy=True) for name in columns],
            "to_parquet": lambda: td.to_parquet(path),
            "  library: pyarrow.parquet.write_table": lambda: pq.write_table(table, own),
            "from_parquet": lambda: TensorDict.from_parquet(path),
            "  library: pyarrow.parquet.read_table": lambda: pq.read_table(own),
            "to_csv": lambda: some.to_csv(path + ".csv", **again),
            "  library: DataFrame.to_csv": lambda: frame[:100_000].to_csv(own + ".csv", index=False),
            "from_csv": lambda: TensorDict.from_csv(texts),
            "  library: pandas.read_csv": lambda: pd.read_csv(texts),
            "to_json, lines": lambda: few.to_json(path + ".jsonl", lines=True, **again),
            "  library: DataFrame.to_json": lambda: frame[:10_000].to_json(
                own + ".jsonl", orient="records", lines=True
            ),
            "from_json, lines": lambda: TensorDict.from_json(lines, lines=True),
            "  library: pandas.read_json": lambda: pd.read_json(lines, lines=True),
        }
        if hasattr(td, "describe"):
            calls["describe"] = td.describe
        calls["  library: DataFrame.describe"] = frame.describe
        if hasattr(td, "to_arrow"):
            for rows in (1_000, 1_000_000):
                wide = TensorDict({f"c{i}": torch.zeros(rows, dtype=torch.uint8) for i in range(100)}, [rows])
                arrow = wide.to_arrow()
                calls[f"to_arrow, 100 columns of {rows}"] = wide.to_arrow
                calls[f"from_arrow, 100 columns of {rows}"] = lambda arrow=arrow: TensorDict.from_arrow(arrow)  # type: ignore[misc]
        print(f"tensordict {tensordict.__version__}")
        for name, call in calls.items():
            wall, used = least(call, 30 if "arrow," in name else rounds)
            print(f"{name:45} {wall:9.2f} ms {used:9.2f} ms of the processor")


if __name__ == "__main__":
    main()
