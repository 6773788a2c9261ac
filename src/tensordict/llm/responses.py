"""Read the public file formats of IFEval: prompts and responses as JSON lines; used by `tensordict ifeval`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from tensordict.containers.dense import TensorDict
from tensordict.containers.free_functions import lazy_stack
from tensordict.containers.lazy import LazyStackedTensorDict
from tensordict.containers.nontensor import NonTensorData
from tensordict.core.json_text import parse_json

_OF_A_PROMPT = ("key", "prompt", "instruction_id_list", "kwargs")


def read_responses(
    responses: str | os.PathLike[str], prompts: str | os.PathLike[str] | None = None
) -> tuple[LazyStackedTensorDict, list[str]]:
    """Read responses, each with the instructions of its prompt.

    Args:
        responses: a file with one JSON object per line, which has `prompt` and `response`.
        prompts: a file with one object per line, which has `prompt`, `instruction_id_list`, `kwargs` and perhaps `key`.
            Without this file, each line of `responses` has these too.

    Returns:
        A lazy stack with one container per response, followed by one per prompt without a response; and for each of
        them its file and line. An entry that a line lacks is missing in its container.

    Raises:
        ValueError: a line is not a JSON object or has no prompt; its prompt is not among `prompts`; two lines of
            `prompts` disagree about a prompt; the file of responses is empty. The message names the file and the line.
        OSError: a file cannot be read.
    """
    known = None if prompts is None else _index_by_prompt(prompts)
    rows, places, answered = [], [], set()
    for place, line in _read_lines(responses):
        prompt = _get_prompt(line, place)
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
    return lazy_stack([_to_container(row) for row in rows]), places


def _to_container(row: Mapping[str, Any]) -> TensorDict:
    """Return a row as a container, with all values unchecked; the scorer judges them."""
    names = [name for name in (*_OF_A_PROMPT, "response") if row.get(name) is not None]
    return TensorDict({name: NonTensorData(row[name]) for name in names})


def _index_by_prompt(path: str | os.PathLike[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Read a file of prompts. Returns a dict from each prompt to its place and its other entries."""
    known: dict[str, tuple[str, dict[str, Any]]] = {}
    for place, line in _read_lines(path):
        prompt = _get_prompt(line, place)
        asked = {name: line[name] for name in _OF_A_PROMPT if name in line}
        before, other = known.setdefault(prompt, (place, asked))
        if any(other.get(name) != asked.get(name) for name in ("instruction_id_list", "kwargs")):
            raise ValueError(f"{place}: this prompt is in {before} with other instructions: {prompt[:60]!r}")
    return known


def _get_prompt(line: Mapping[str, Any], place: str) -> str:
    prompt = line.get("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f"{place}: there is no text under 'prompt', only {sorted(line)}")
    return prompt


def _read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON objects of a file with their places. Empty lines are skipped."""
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
