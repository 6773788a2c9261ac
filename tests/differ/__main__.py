"""Random programs on this package and on the reference: where do the two differ?

A program makes 1 to 3 containers and calls 1 to 6 public operations with valid and invalid arguments. Two worker
processes, one per package, run the same lines; after every line the result and every variable are summarised and
compared. Both raise is equal; one raises is a difference; unrelated exception classes are a weaker one. In the end
results are overwritten, so that a view where the other side copies shows too. A call that fails here and has changed
a variable is a difference of its own. Differences are made small and grouped; judged.txt says which are known.
The exit status is 1 if a group is of class A (ours is wrong) or `?` (nobody has looked at it).
"""

from __future__ import annotations

import argparse
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
from differ.programs import make_program, text_of
from differ.sides import Sides

OUT = pathlib.Path(tempfile.gettempdir()) / "differ"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python tests/differ", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, help="stop after this time (default: 600, without --programs)")
    parser.add_argument("--programs", type=int, help="stop after this many programs")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first program (default: 0)")
    parser.add_argument("--only", default="", help="draw only lines of grammar.txt that match this pattern")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help=f"folder for the groups (default: {OUT})")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help="instead of a run:")
    show = commands.add_parser("show", help="print the groups of earlier runs")
    show.add_argument("letters", nargs="?", default="", help="of these letters only, such as A?")
    program = commands.add_parser("program", help="print the program of a seed")
    program.add_argument("number", type=int)
    lines = commands.add_parser("exec", help="run the lines of a file on both sides, print what differs")
    lines.add_argument("file", type=pathlib.Path)
    commands.add_parser("seen", help="note the groups of earlier runs that are `?` as looked at, in seen.txt")
    return parser.parse_args(arguments)


def fuzz(options: argparse.Namespace) -> int:
    """Run programs until the time is up or their number is reached; the exit status."""
    start = time.monotonic()
    seconds = options.seconds or (600.0 if options.programs is None else float("inf"))
    seeds = itertools.count(options.seed)
    if options.programs is not None:
        seeds = itertools.islice(seeds, options.programs)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"groups-{options.seed}.jsonl"
    with Sides() as sides:
        fuzzing = Fuzzing(sides, options.only)
        for number, seed in enumerate(seeds):
            if time.monotonic() - start >= seconds:
                break
            fuzzing.run(seed)
            if number % 500 == 499:
                judging.save(fuzzing.groups, path)
                counts = json.dumps(fuzzing.counts)
                print(f"{time.monotonic() - start:7.0f} s: {counts}", file=sys.stderr, flush=True)
    judging.save(fuzzing.groups, path)
    text, letters = judging.report(fuzzing.groups)
    print(text)
    print(f"{time.monotonic() - start:.0f} s: {json.dumps(fuzzing.counts)}")
    return int(any(letters[letter] for letter in judging.BAD))


def execute(text: str) -> None:
    """Run lines on both sides and print what differs."""
    lines: list[tuple[str, str | None]] = []
    for line in text.strip().split("\n"):
        match = re.match(r"(\w+) = (.*)", line)
        lines.append((match[2], match[1]) if match else (line, None))
    with Sides() as sides:
        theirs, ours = sides.run(lines)
    for name, replies in (("reference", theirs), ("ours", ours)):
        if isinstance(replies, dict):
            print(f"{name}: {replies['dead']}")
            return
    known: set[Any] = set()
    for (code, result), a, b in zip(lines, theirs, ours):
        print(f"{result} = {code}" if result else code)
        for name, reply in (("reference", a), ("ours", b)):
            if a["exc"] or b["exc"]:
                error = reply["exc"]
                print(f"    {name}: {error['cls']}: {error['msg']}" if error else f"    {name}: runs")
        for difference in in_states(a["state"], b["state"]):
            if difference not in known and difference.kind != "missing variable":
                known.add(difference)
                print(f"    {difference}")


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
