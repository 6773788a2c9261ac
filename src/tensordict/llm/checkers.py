"""The bridge to the instruction checkers of EleutherAI's lm-evaluation-harness, which are called as a library."""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensordict.core.errors import InstructionError
from tensordict.core.extras import require

EXTRA = "ifeval"
# The data of NLTK that checkers need, by the type of instruction, and where it lies.
_DATA = {"length_constraints:number_sentences": "punkt_tab", "change_case:capital_word_frequency": "punkt_tab"}
_FOLDERS = {"punkt_tab": "tokenizers/punkt_tab/english/"}
# What NLTK says of data that is not there.
_RESOURCE = re.compile(r"nltk\.download\('(\w+)'\)")


def judge(instruction_id: str, arguments: Mapping[str, Any], response: str) -> tuple[bool, bool]:
    """Whether a response follows an instruction: strictly, and loosely.

    Args:
        instruction_id: such as `"punctuation:no_comma"`.
        arguments: what the checker of this type is told, such as `{"num_words": 40, "relation": "at least"}`.
        response: the text to look at.

    Raises:
        InstructionError: the id is unknown, the arguments are not those of the type, or data is missing that the
            checker needs.
        ModuleNotFoundError: the harness is not installed.
    """
    checker = _checker(instruction_id, arguments)
    texts = _readings(response)
    strict = _follows(checker, texts[0])
    return strict, strict or any(_follows(checker, text) for text in texts[1:])


@functools.cache
def registry() -> Mapping[str, Any]:
    """The checker classes of the harness by instruction id.

    Raises:
        ModuleNotFoundError: the harness, or what its checkers need, is not installed; says what to install.
    """
    for module in ("nltk", "immutabledict", "lm_eval.tasks"):
        require(module, EXTRA)
    factory = require("langdetect", EXTRA).DetectorFactory
    if factory.seed is None:
        # Or the same text is of another language now and then.
        factory.seed = 0
    with _without_downloads():
        known: Mapping[str, Any] = require("lm_eval.tasks.ifeval.instructions_registry", EXTRA).INSTRUCTION_DICT
    return known


def missing_data(instruction_ids: Iterable[str]) -> dict[str, int]:
    """The data of NLTK that is not installed, and how many of these instructions cannot be checked without it.

    Raises:
        ModuleNotFoundError: NLTK is not installed.
    """
    find = require("nltk", EXTRA).data.find
    counts = Counter(_DATA[name] for name in instruction_ids if name in _DATA)
    missing = {}
    for name, count in counts.items():
        try:
            find(_FOLDERS[name])
        except LookupError:
            missing[name] = count
    return missing


@contextlib.contextmanager
def _without_downloads() -> Iterator[None]:
    """Keep the checkers' module from fetching NLTK's data when it is imported: it does so in the process of rank 0."""
    name = "LOCAL_RANK"
    rank = os.environ.get(name)
    os.environ[name] = "-1"
    try:
        yield
    finally:
        if rank is None:
            del os.environ[name]
        else:
            os.environ[name] = rank


def _checker(instruction_id: str, arguments: Mapping[str, Any]) -> Any:
    known = registry()
    if instruction_id not in known:
        close = difflib.get_close_matches(instruction_id, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
        raise InstructionError(f"this instruction id is unknown; {hint}")
    checker = known[instruction_id](instruction_id)
    _check_names(arguments, checker.get_instruction_args_keys())
    try:
        checker.build_description(**arguments)
    except Exception as error:  # Foreign code over foreign data: whatever it raises says that it cannot take them.
        raise InstructionError(f"its checker does not take {dict(arguments)}: {_told(error)}") from error
    held = checker.get_instruction_args() or {}
    for name, value in arguments.items():
        if _plain(held[name]) != _plain(value):
            raise InstructionError(
                f"its checker does not take {name}={value!r}: it would check for a random value in its place"
            )
    return checker


def _check_names(arguments: Mapping[str, Any], taken: Sequence[str]) -> None:
    """Refuse what would make a checker fail, or choose a value at random."""
    missing = [name for name in taken if name not in arguments]
    unknown = [name for name in arguments if name not in taken]
    if missing or unknown:
        problems = [f"lack {missing}"] * bool(missing) + [f"have {unknown} too many"] * bool(unknown)
        raise InstructionError(f"its kwargs {' and '.join(problems)}: this type takes {list(taken)}")


def _plain(value: object) -> object:
    """An argument without the differences that the checkers make themselves, such as upper case."""
    if isinstance(value, str):
        return value.strip().lower()
    return sorted(set(value)) if isinstance(value, (list, tuple)) else value


def _readings(response: str) -> list[str]:
    """The response, and what the loose scores look at too: without its first and its last line, and without asterisks.

    Those that are the same count once.
    """
    lines = response.split("\n")
    parts = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*parts, *(part.replace("*", "") for part in parts)]))


def _follows(checker: Any, text: str) -> bool:
    """Whether a text follows the instruction; one that is empty follows none."""
    if not text.strip():
        return False
    try:
        return bool(checker.check_following(text))
    except Exception as error:  # Foreign code: a checker that fails has not found that the text does not follow.
        resource = _RESOURCE.search(str(error)) if isinstance(error, LookupError) else None
        if resource is not None:
            raise InstructionError(
                f"its checker needs NLTK's {resource[1]!r}, which is not installed here: python -m nltk.downloader "
                f"{resource[1]} (or put it into a folder that the variable NLTK_DATA names)"
            ) from None
        raise InstructionError(f"its checker failed: {_told(error)}") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
