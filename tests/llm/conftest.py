"""The language data that two of the checkers need, as small as it can be: the tests download nothing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import nltk
import pytest


@pytest.fixture(scope="session", autouse=True)
def punkt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of NLTK's data with a `punkt_tab` of our own, which splits sentences but after two abbreviations."""
    root = tmp_path_factory.mktemp("nltk_data")
    english = root / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    (english / "abbrev_types.txt").write_text("dr\nmr\n")
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (english / name).write_text("")
    nltk.data.path.insert(0, str(root))
    yield root
    nltk.data.path.remove(str(root))


@pytest.fixture
def forked() -> Iterator[None]:
    """Processes are forked, and so have the folder above: from Python 3.14 on they are not unless that is asked for."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
