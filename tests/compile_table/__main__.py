"""Runs the table from the command line; the docstring of the package says how."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from compile_table.expected import read_expected, write_expected
from compile_table.families import ROWS
from compile_table.running import Outcome, run_row


def main() -> None:
    """Run rows and print each that is not as expected."""
    parser = argparse.ArgumentParser(prog="python tests/compile_table")
    parser.add_argument("words", nargs="*", help="run the rows whose names have all of these words")
    parser.add_argument("--write", action="store_true", help="write what came of the rows to expected.toml")
    parser.add_argument("--json", type=Path, help="write what came of each row, and its seconds of CPU time")
    parser.add_argument("--part", default="0/1", help="run a part of the rows: 0/2 and 1/2 are all")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = [name for name in ROWS if all(word in name for word in options.words)][part::parts]
    expected = read_expected()
    outcomes: dict[str, Outcome] = {}
    seconds: dict[str, float] = {}
    for name in chosen:
        start = time.process_time()
        try:
            outcomes[name] = run_row(ROWS[name])
        except Exception as error:
            outcomes[name] = Outcome(wrong=f"eager code raised {type(error).__name__}: {error}")
        seconds[name] = round(time.process_time() - start, 2)
        if fault := expected.find_fault(name, outcomes[name]):
            print(f"{name}: {fault}", flush=True)
    if options.json:
        found = {name: {**asdict(outcome), "seconds": seconds[name]} for name, outcome in outcomes.items()}
        options.json.write_text(json.dumps(found, indent=1))
    if options.write:
        write_expected({name: outcomes.get(name) or expected.describe_row(name) for name in ROWS})
    print(f"{len(outcomes)} rows, {sum(seconds.values()):.0f} s of CPU time")


main()
