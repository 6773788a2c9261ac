"""Random programs on this package and on the reference: where do the two differ?

A program makes 1 to 3 containers and calls 1 to 6 public operations with valid and invalid arguments. Worker
processes, one per package, run the same lines; after every line the result and every variable are summarised and
compared. Both raise is equal; one raises is a difference; unrelated exception classes are a weaker one. In the end
results are overwritten, so that a view where the other side copies shows too. A call that fails here and has changed
a variable is a difference of its own. Differences are made small and grouped; judged.txt says which are known.
The exit status is 1 if a group is of class A (ours is wrong) or `?` (nobody has looked at it). Such a group becomes `r`
if the reference disagrees with itself there and ours does not (equivalents.py).

The reference runs at two levels, 0.14.3 and 0.15.3. What 0.14.3 runs counts; where it refuses a line, 0.15.3 is asked,
and if that runs it, ours must give the same. Some programs are drawn on 0.15.3, so that they go on with its results.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import itertools
import json
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

if not __package__:  # `python tests/differ` puts this folder on the path, not the one that the package is in
    sys.path[0] = str(pathlib.Path(__file__).parents[1])

from differ import judging
from differ.comparing import in_states
from differ.fuzzing import Fuzzing
from differ.judging import Group
from differ.programs import make_program, text_of
from differ.sides import Sides

OUT = pathlib.Path(tempfile.gettempdir()) / "differ"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python tests/differ", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, help="stop after this time (default: 600, without --programs)")
    parser.add_argument("--programs", type=int, help="stop after this many programs")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first program (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="run in so many processes, each with workers of its own")
    parser.add_argument("--only", default="", help="draw only lines of grammar.txt that match this pattern")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help=f"folder for the groups (default: {OUT})")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help="instead of a run:")
    show = commands.add_parser("show", help="print the groups of earlier runs")
    show.add_argument("letters", nargs="?", default="", help="of these letters only, such as A?")
    program = commands.add_parser("program", help="print the program of a seed")
    program.add_argument("number", type=int)
    lines = commands.add_parser("exec", help="run the lines of a file on all sides, print what differs")
    lines.add_argument("file", type=pathlib.Path)
    commands.add_parser("seen", help="note the groups of earlier runs that are `?` as looked at, in seen.txt")
    return parser.parse_args(arguments)


def fuzz(options: argparse.Namespace) -> int:
    """Run programs until the time is up or their number is reached; the exit status."""
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        parts = list(pool.map(_fuzz_part, itertools.repeat(options), range(options.jobs)))
    text, letters = judging.report([group for groups, _ in parts for group in groups])
    counts = sum((counts for _, counts in parts), collections.Counter())
    print(text)
    print(f"{time.monotonic() - start:.0f} s: {json.dumps(counts)}")
    return int(any(letters[letter] for letter in judging.BAD))


def _fuzz_part(options: argparse.Namespace, part: int) -> tuple[list[Group], collections.Counter[str]]:
    """Run the programs of one job; return the groups and the counts."""
    end = time.monotonic() + (options.seconds or (600.0 if options.programs is None else float("inf")))
    seeds = itertools.count(options.seed + part, options.jobs)
    if options.programs is not None:
        seeds = range(options.seed + part, options.seed + options.programs, options.jobs)
    path = options.out / f"groups-{options.seed + part}.jsonl"
    with Sides() as sides:
        fuzzing = Fuzzing(sides, options.only)
        for number, seed in enumerate(seeds):
            if time.monotonic() >= end:
                break
            fuzzing.run(seed)
            if number % 500 == 499:
                judging.save(fuzzing.groups, path)
                print(f"job {part}: {json.dumps(fuzzing.counts)}", file=sys.stderr, flush=True)
    judging.save(fuzzing.groups, path)
    return fuzzing.groups, fuzzing.counts


def execute(text: str) -> None:
    """Run lines on all sides and print what differs."""
    lines: list[tuple[str, str | None]] = []
    for line in text.strip().split("\n"):
        match = re.match(r"(\w+) = (.*)", line)
        lines.append((match[2], match[1]) if match else (line, None))
    with Sides() as sides:
        newest = sides.newest.run(lines)
        replies = sides.run(lines, newest=newest)
    named = {"0.14.3": replies.reference, "0.15.3": newest, "ours": replies.ours}
    for name, side in named.items():
        if isinstance(side, dict):
            print(f"{name}: {side['dead']}")
            return
    known: set[Any] = set()
    for i, (code, result) in enumerate(lines):
        print(f"{result} = {code}" if result else code)
        answers = {name: side[i] for name, side in named.items()}
        ours = answers["ours"]
        for name, reply in answers.items():
            if any(reply["exc"] for reply in answers.values()):
                error = reply["exc"]
                print(f"    {name}: {error['cls']}: {error['msg']}" if error else f"    {name}: runs")
            for difference in in_states(reply["state"], ours["state"]):
                if (name, difference) not in known and difference.kind != "missing variable":
                    known.add((name, difference))
                    print(f"    beside {name}: {difference}")


def main() -> int:
    options = parse()
    if options.command == "show":
        print(judging.report(judging.load(options.out), options.letters)[0])
    elif options.command == "program":
        with Sides() as sides:
            print(text_of(make_program(options.number, sides.reference, options.only)[0]))
    elif options.command == "exec":
        execute(options.file.read_text())
    elif options.command == "seen":
        judging.accept(judging.load(options.out))
    else:
        return fuzz(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
