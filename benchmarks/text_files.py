"""`from_csv` and `from_json` here and on the reference, in turns.

    python benchmarks/text_files.py [ROUNDS] [reference|behaviour]

`reference` is 0.15.3, `behaviour` 0.14.3. Prints the seconds of a call on the wall, and how many times as long the
reference takes. Arrow reads with all processors, where it can; `OMP_NUM_THREADS=1` leaves it one.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import turns

ROWS = 50_000


def write_files(folder: Path) -> None:
    """Write the files that the programs read: numbers, and numbers beside text in quotes."""
    numbers = random.Random(0)
    floats = [[numbers.random() for _ in range(10)] for _ in range(ROWS)]
    names = [f"c{i}" for i in range(10)]
    lines = [",".join(map(repr, row)) for row in floats]
    (folder / "floats.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
    lines = [",".join(str(int(value * 1e9)) for value in row) for row in floats]
    (folder / "ints.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
    lines = [f'{i},{row[0]!r},"text {i % 1000}, or other",{i % 2 == 0}' for i, row in enumerate(floats)]
    (folder / "mixed.csv").write_text("\n".join(["n,x,s,b", *lines]) + "\n")
    objects = [
        "{" + ", ".join(f'"{name}": {value!r}' for name, value in zip(names, row)) + "}" for row in floats[: ROWS // 5]
    ]
    (folder / "rows.jsonl").write_text("\n".join(objects) + "\n")
    (folder / "rows.json").write_text("[" + ",".join(objects) + "]")


PROGRAMS = {
    "from_csv, 10 columns of floats": "floats.csv",
    "from_csv, 10 columns of ints": "ints.csv",
    "from_csv, ints, floats, text in quotes, bools": "mixed.csv",
    "from_json, lines": "rows.jsonl",
    "from_json, an array": "rows.json",
}


def programs(name: str) -> turns.Call:
    """The call of a program, on the package that this interpreter has."""
    from tensordict import TensorDict

    kind, _, path = name.partition(" ")
    options = {} if kind == "csv" else {"lines": kind == "jsonl"}
    read = TensorDict.from_csv if kind == "csv" else TensorDict.from_json
    return lambda: float(len(next(iter(read(path, **options).values()))))


def main() -> None:
    """Print a line for each program."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    beside = sys.argv[2] if len(sys.argv) > 2 else "reference"
    found = turns.environments()
    found["reference"] = found["reference"].parents[2] / f".venv-{beside}" / "bin" / "python"
    turns.environments = lambda suffix="": found  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder, turns.workers(__file__) as sides:
        write_files(Path(folder))
        for name, file in PROGRAMS.items():
            program = f"{Path(file).suffix[1:]} {folder}/{file}"
            figures = turns.compare(program, sides, rounds)
            print(f"{name:50} {figures['ours']:.4f} {figures['reference']:.4f} {figures['ratio']:.2f}", flush=True)


if __name__ == "__main__":
    turns.work(programs) if "--worker" in sys.argv else main()
