"""Call the instruction checkers of EleutherAI's lm-evaluation-harness; used by the scorer."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensordict.core.exceptions import InstructionError, suggest
from tensordict.core.extras import require

EXTRA = "ifeval"
# The NLTK data that a type of instruction needs, and its folder in NLTK's data.
_DATA = {"length_constraints:number_sentences": "punkt_tab", "change_case:capital_word_frequency": "punkt_tab"}
_FOLDERS = {"punkt_tab": "tokenizers/punkt_tab/english/"}
# Finds the name of missing data in the errors of NLTK.
_RESOURCE = re.compile(r"nltk\.download\('(\w+)'\)")


def judge(instruction_id: str, arguments: Mapping[str, Any], response: str) -> tuple[bool, bool]:
    """Return whether a response follows an instruction: strictly, and loosely.

    Args:
        instruction_id: the type of instruction, such as `"punctuation:no_comma"`.
        arguments: the arguments of the checker, such as `{"num_words": 40, "relation": "at least"}`.
        response: the text to check.

    Raises:
        InstructionError: the id is unknown, the arguments do not fit the type, or the checker lacks data.
        ModuleNotFoundError: the harness is not installed.
    """
    checker = _make_checker(instruction_id, arguments)
    texts = _loose_texts(response)
    strict = _follows(checker, texts[0])
    return strict, strict or any(_follows(checker, text) for text in texts[1:])


@functools.cache
def registry() -> Mapping[str, Any]:
    """Return the checker classes of the harness by instruction id.

    Raises:
        ModuleNotFoundError: the harness, or a package that its checkers need, is not installed. The message says what
            to install.
    """
    for module in ("nltk", "immutabledict", "lm_eval.tasks"):
        require(module, EXTRA)
    factory = require("langdetect", EXTRA).DetectorFactory
    if factory.seed is None:
        # Without a fixed seed, langdetect may find different languages in the same text.
        factory.seed = 0
    with _without_downloads():
        known: Mapping[str, Any] = require("lm_eval.tasks.ifeval.instructions_registry", EXTRA).INSTRUCTION_DICT
    return known


def missing_data(instruction_ids: Iterable[str]) -> dict[str, int]:
    """Return the missing NLTK data by name, each with the number of these instructions that need it.

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
    """Set another rank than 0 for the import of the checkers. With `LOCAL_RANK` 0, it would download NLTK data."""
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


def _make_checker(instruction_id: str, arguments: Mapping[str, Any]) -> Any:
    known = registry()
    if instruction_id not in known:
        hint = suggest(instruction_id, known) or f"; known are {', '.join(known)}"
        raise InstructionError(f"this instruction id is unknown{hint}")
    checker = known[instruction_id](instruction_id)
    _check_names(arguments, checker.get_instruction_args_keys())
    try:
        checker.build_description(**arguments)
    except Exception as error:
        # The checker is code of another package, and may raise any error for arguments that it does not take.
        raise InstructionError(f"its checker does not take {dict(arguments)}: {_format_error(error)}") from error
    held = checker.get_instruction_args() or {}
    for name, value in arguments.items():
        if _normalize(held[name]) != _normalize(value):
            raise InstructionError(
                f"its checker does not take {name}={value!r}: it would check for a random value in its place"
            )
    return checker


def _check_names(arguments: Mapping[str, Any], taken: Sequence[str]) -> None:
    """Refuse missing and unknown arguments. A checker would fail on them, or replace them by random values."""
    missing = [name for name in taken if name not in arguments]
    unknown = [name for name in arguments if name not in taken]
    if missing or unknown:
        problems = [f"lack {missing}"] * bool(missing) + [f"have {unknown} too many"] * bool(unknown)
        raise InstructionError(f"its kwargs {' and '.join(problems)}: this type takes {list(taken)}")


def _normalize(value: object) -> object:
    """Normalize an argument as the checkers do, for example to lower case."""
    if isinstance(value, str):
        return value.strip().lower()
    return sorted(set(value)) if isinstance(value, (list, tuple)) else value


def _loose_texts(response: str) -> list[str]:
    """Return the distinct texts that the loose score accepts; the response itself comes first.

    The others lack the first line, the last line, both, or the asterisks.
    """
    lines = response.split("\n")
    parts = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*parts, *(part.replace("*", "") for part in parts)]))


def _follows(checker: Any, text: str) -> bool:
    """Return whether a text follows the instruction. An empty text follows none."""
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
        raise InstructionError(f"its checker failed: {_format_error(error)}") from error


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
