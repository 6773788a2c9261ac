"""Reading the public formats of IFEval: JSON lines with prompts, and JSON lines with the responses to them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from tensordict.containers.dense import TensorDict
from tensordict.containers.functional import lazy_stack
from tensordict.containers.lazy import LazyStackedTensorDict
from tensordict.containers.nontensor import NonTensorData
from tensordict.core.json_text import parse_json

_OF_A_PROMPT = ("key", "prompt", "instruction_id_list", "kwargs")


def read_responses(
    responses: str | os.PathLike[str], prompts: str | os.PathLike[str] | None = None
) -> tuple[LazyStackedTensorDict, list[str]]:
    """Read responses, each with the instructions of its prompt.

    Args:
        responses: a file with one object per line, that has `prompt` and `response`.
        prompts: a file with one object per line, that has `prompt`, `instruction_id_list`, `kwargs` and perhaps `key`.
            Without it, each line of `responses` has these too.

    Returns:
        a lazy stack of containers with these entries, one per response and then one per prompt that has none; and for
        each, the file and the line that it is from. An entry that a line lacks is missing.

    Raises:
        ValueError: a line is no JSON object, has no prompt, or its prompt is not among `prompts`; two lines of
            `prompts` disagree about a prompt; there are no responses. The file and the line are named.
        OSError: a file cannot be read.
    """
    known = None if prompts is None else _by_prompt(prompts)
    rows, places, answered = [], [], set()
    for place, line in _lines(responses):
        prompt = _prompt(line, place)
        if known is not None:
            if prompt not in known:
                raise ValueError(f"{place}: this prompt is not in {os.fspath(prompts or '')}: {prompt[:60]!r}")
            answered.add(prompt)
            line = {**known[prompt][1], **{name: line[name] for name in ("response",) if name in line}}
        rows.append(line)
        places.append(place)
    if not rows:
        raise ValueError(f"{os.fspath(responses)}: there are no responses in it")
    for prompt, (place, line) in (known or {}).items():
        if prompt not in answered:
            rows.append(line)
            places.append(place)
    return lazy_stack([_held(row) for row in rows]), places


def _held(row: Mapping[str, Any]) -> TensorDict:
    """A row with its values as they are, whatever they are: judging them is the scorer's."""
    names = [name for name in (*_OF_A_PROMPT, "response") if row.get(name) is not None]
    return TensorDict({name: NonTensorData(row[name]) for name in names})


def _by_prompt(path: str | os.PathLike[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The lines of a file of prompts, each with its place, by prompt."""
    known: dict[str, tuple[str, dict[str, Any]]] = {}
    for place, line in _lines(path):
        prompt = _prompt(line, place)
        asked = {name: line[name] for name in _OF_A_PROMPT if name in line}
        before, other = known.setdefault(prompt, (place, asked))
        if any(other.get(name) != asked.get(name) for name in ("instruction_id_list", "kwargs")):
            raise ValueError(f"{place}: this prompt is in {before} with other instructions: {prompt[:60]!r}")
    return known


def _prompt(line: Mapping[str, Any], place: str) -> str:
    prompt = line.get("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f"{place}: there is no text under 'prompt', only {sorted(line)}")
    return prompt


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its place; empty lines are passed over."""
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            place = f"{os.fspath(path)}:{number}"
            if not text.strip():
                continue
            try:
                line = parse_json(text)
            except ValueError as error:
                raise ValueError(f"{place}: this line is no JSON: {error}") from error
            if not isinstance(line, dict):
                raise ValueError(f"{place}: this line is no JSON object, but a {type(line).__name__}")
            yield place, line
