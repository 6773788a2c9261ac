"""Programs: containers, then lines with drawn arguments, written as code."""

from __future__ import annotations

import pathlib
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from differ.arguments import Arguments, containers_in
from differ.sides import Lines, Reply, Side, Summary
from differ.specs import Containers, Spec, render, simpler

GRAMMAR = pathlib.Path(__file__).with_name("grammar.txt")
# Placeholders that are part of an operation's name.
NAMED = {
    "unary",
    "unary_",
    "binary",
    "binary_",
    "reduce",
    "minmax",
    "aminmax",
    "cumm",
    "varstd",
    "cast",
    "tfun1",
    "tbinary",
    "treduce",
    "tshape",
    "tshape1",
    "tswap",
    "tsplit",
    "isdtype",
    "op",
    "iop",
    "cmp",
    "attr",
    "tcls",
    "sampling",
}
# Simple arguments, which a program keeps when it still shows the same difference with them.
SIMPLE: dict[str, list[str]] = {
    "dim": ["0", "-1"],
    "dimx": ["0", "-1"],
    "rdim": ["0", "-1"],
    "idx": ["0", ":", "0:1", "None"],
    "idxt": ["0"],
    "num": ["1"],
    "n": ["1"],
    "newval": ["T(2)", "1", '"text"'],
    "aval": ["0"],
    "value": ['"text"'],
    "operand": ["1"],
    "default": ["None"],
    "key": ['"a"', '"b"'],
    "nkey": ['"n1"'],
    "keys": ['["a"]'],
    "upd": ['{"a": 1}'],
    "lit": ['{"a": T(2)}', "{}"],
    "anyobj": ['{"a": T(2)}'],
    "bsz": ["[]", "[2]"],
    "names": ["None"],
    "shape": ["-1"],
    "fn": ["lambda u: u + 1"],
    "mfn": ["lambda u: u + 1"],
    "mfn2": ["lambda u, v: u + v"],
    "tcls": ["TCA"],
    "tds": ["[x0, x0]"],
    "nfn": ["lambda n, u: u + 1"],
    "binary": ["add"],
    "binary_": ["add_"],
    "unary": ["abs", "exp"],
    "unary_": ["abs_", "exp_"],
    "reduce": ["sum"],
    "op": ["+"],
    "cmp": ["=="],
    "dtype": ["f32", "f64"],
    "tbinary": ["add"],
    "cfilter": ["lambda k, v: True"],
    "mode": ["None"],
    "side": ['"left"'],
}


class Token(NamedTuple):
    """A piece of a template; `group` numbers the optional argument that it belongs to."""

    text: str
    placeholder: bool
    group: int | None


@cache
def parse(template: str) -> list[Token]:
    """The pieces of a template."""
    tokens: list[Token] = []
    group, groups, depth, i = None, 0, 0, 0
    text = ""

    def flush() -> None:
        nonlocal text
        if text:
            tokens.append(Token(text, False, group))
        text = ""

    template = template.lstrip("!")
    while i < len(template):
        char = template[i]
        if match := re.match(r"\{(\w+)\}", template[i:]):
            flush()
            tokens.append(Token(match[1], True, group))
            i += match.end()
            continue
        i += 1
        if char == "?" and template[i - 2] in "( ":
            flush()
            groups += 1
            group, depth = groups, 0
            continue
        if group is not None and char == "," and depth == 0:
            text += ", "
            flush()
            group = None
            i += template[i : i + 1] == " "
            continue
        if group is not None and char in ")]}" and depth == 0:
            flush()
            group = None
        elif group is not None:
            depth += (char in "([{") - (char in ")]}")
        text += char
    flush()
    return tokens


@cache
def templates(only: str = "") -> list[str]:
    """The lines of the grammar that match a pattern."""
    lines = [line for line in GRAMMAR.read_text().splitlines() if line and not line.startswith("#")]
    return [line for line in lines if re.search(only, line)]


class Step:
    """One line of a program; its value is bound to the variable `result`, if there is one."""

    result: str | None

    def code(self) -> str:
        raise NotImplementedError

    def operation(self) -> str:
        """The operation of the line, without its arguments."""
        raise NotImplementedError

    def simpler(self) -> Iterator[Step]:
        """Lines that are simpler in one respect."""
        return iter(())

    def uses(self, variable: str) -> bool:
        return re.search(rf"\b{variable}\b", self.code()) is not None

    def __str__(self) -> str:
        return f"{self.result} = {self.code()}" if self.result else self.code()


class Construction(Step):
    """A container."""

    def __init__(self, result: str, spec: Spec) -> None:
        self.result: str = result
        self.spec = spec

    def code(self) -> str:
        return render(self.spec)

    def operation(self) -> str:
        return "construct"

    def simpler(self) -> Iterator[Step]:
        return (Construction(self.result, spec) for spec in simpler(self.spec))


class Change(Step):
    """Writing to a result in place, to see whose memory it is: `mutate(r1)` or `graft(r1)`."""

    result = None

    def __init__(self, function: str, line: Line) -> None:
        self.function, self.line = function, line

    def code(self) -> str:
        return f"{self.function}({self.line.result})"

    def operation(self) -> str:
        return f"{self.function} result of {self.line.operation()}"


class Line(Step):
    """A template with drawn arguments; `on` says which of the optional ones are given."""

    def __init__(self, template: str, result: str | None, values: list[str], on: dict[int, bool]) -> None:
        self.template, self.values, self.on = template, values, on
        self.result = result

    def placeholders(self) -> list[str]:
        return [token.text for token in parse(self.template) if token.placeholder]

    def receiver(self) -> str | None:
        """The expression of the container that it is called on."""
        names = self.placeholders()
        return self.values[names.index("x")] if "x" in names else None

    def code(self) -> str:
        values = iter(self.values)
        out = ""
        for token in parse(self.template):
            text = next(values) if token.placeholder else token.text
            if token.group is None or self.on.get(token.group):
                out += text
        return re.sub(r",\s*\)", ")", out) if "?" in self.template else out

    def operation(self) -> str:
        given = {n: v for n, v in zip(self.placeholders(), self.values) if n in NAMED}
        name = re.sub(r"\?[^,)]*,? ?", "", self.template)
        name = re.sub(r"\{(\w+)\}", lambda match: given.get(match[1], match[1]), name)
        return re.sub(r", \)", ")", name)

    def is_several(self) -> bool:
        """Return whether it makes several calls. If a later call fails, the changes of the first one may stay."""
        return (
            self.result is None and re.match(r"with |for |[^;]*;|.*\.unbind|\w+\[\d\] \S+= ", self.code()) is not None
        )

    def simpler(self) -> Iterator[Step]:
        named = {name for value in self.values for name in re.findall(r"\b[rx]\d\b", value)}
        for variable in sorted(named, reverse=True):
            for other in (name for name in ("x0", "x1", "x2") if name != variable):
                yield self._with([re.sub(rf"\b{variable}\b(\[\d\])?", other, value) for value in self.values])
        for group, on in self.on.items():
            if on:
                yield Line(self.template, self.result, self.values, {**self.on, group: False})
        for i, name in enumerate(self.placeholders()):
            for text in SIMPLE.get(name, []):
                if self.values[i] != text:
                    yield self._with([*self.values[:i], text, *self.values[i + 1 :]])

    def _with(self, values: list[str]) -> Line:
        return Line(self.template, self.result, values, dict(self.on))


Program = list[Step]


def lines_of(program: Program) -> Lines:
    """Return the text that the workers run."""
    return [(step.code(), step.result) for step in program]


def text_of(program: Program) -> str:
    return "\n".join(map(str, program))


def draw_line(rng: random.Random, state: dict[str, Summary], number: int, only: str = "") -> Line | None:
    """A line on one of the containers that the variables hold."""
    pool = [found for name, summary in state.items() for found in containers_in(summary, name)]
    if not pool:
        return None
    x, summary = rng.choices(pool, [3 if name.startswith("r") else 2 for name, _ in pool])[0]
    grammar = templates(only)
    template = rng.choice(grammar)
    if "{x}" not in template and rng.random() < 0.3:
        template = rng.choice(grammar)
    arguments = Arguments(rng, x, summary, pool)
    values: list[str] = []
    on: dict[int, bool] = {}
    for token in parse(template):
        if token.group is not None and token.group not in on:
            on[token.group] = rng.random() < 0.45
        if token.placeholder:
            values.append(arguments.draw(token.text))
    return Line(template, None if template.startswith("!") else f"r{number}", values, on)


class Drawing:
    """A program that is drawn line by line while the reference runs it."""

    def __init__(self, seed: int, reference: Side, only: str = "") -> None:
        self.rng, self.reference, self.only = random.Random(seed), reference, only
        self.program: Program = []
        self.replies: list[Reply] = []
        self.state: dict[str, Summary] = {}

    def draw(self) -> None:
        """One to three containers, one to six lines, and changes to the last results."""
        self.reference.ask("new")
        if self._containers() and self._lines():
            self._changes()

    def _add(self, step: Step) -> bool:
        """Run a step; whether the program can go on."""
        reply: dict[str, Any] = self.reference.ask("step", step.code(), step.result)
        self.program.append(step)
        self.replies.append(reply)
        if "dead" in reply:
            return False
        self.state = reply["state"]
        return reply["exc"] is None or "Hang" not in reply["exc"]["cls"]

    def _containers(self) -> bool:
        draw = Containers(self.rng)
        batch_size: list[int] | None = None
        for i in range(self.rng.choice([1, 1, 2, 2, 3])):
            same = batch_size is not None and self.rng.random() < 0.7
            spec = draw.container(batch_size if same else None)
            batch_size = spec.get("bs")
            if not self._add(Construction(f"x{i}", spec)):
                return False
        return True

    def _lines(self) -> bool:
        for i in range(self.rng.choice([1, 2, 3, 4, 5, 6])):
            line = draw_line(self.rng, self.state, i, self.only)
            if line is None:
                return True
            if not self._add(line):
                return False
        return True

    def _changes(self) -> None:
        lines = [step for step in self.program if isinstance(step, Line) and step.result in self.state]
        for line in lines[:-4:-1]:
            kind = self.state[line.result]["k"]
            if kind in ("td", "tensor", "list", "dict"):
                graft = kind in ("td", "list") and self.rng.random() < 0.25
                self._add(Change("graft" if graft else "mutate", line))


def make_program(seed: int, reference: Side, only: str = "") -> tuple[Program, Any]:
    """The program of a seed, and what the reference replies to each of its lines."""
    drawing = Drawing(seed, reference, only)
    drawing.draw()
    return drawing.program, drawing.replies
