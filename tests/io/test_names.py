"""The file names of entries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensordict.core.exceptions import SaveError
from tensordict.memory.names import file_name, folder_name

# As the reference 0.14.3 writes them, found by saving an entry of each name.
REFERENCE = {
    **{chr(code): f"%{code:02X}" for code in [*range(33), 127]},
    **{char: f"%{ord(char):02X}" for char in '"%*/:<>?\\|'},
    "": "%",
    ".": "%2E",
    "..": "%2E%2E",
    "...": "...",
    ".a": ".a",
    "a.": "a.",
    "../x": "..%2Fx",
    "a b": "a%20b",
    "a/b": "a%2Fb",
    "%41": "%2541",
    "clé": "clé",
    "日本": "日本",
    "meta.json": "meta.json",
}
PLAIN = [chr(code) for code in range(33, 127) if chr(code) not in '."%*/:<>?\\|'] + ["\x80", "\xa0", "\u2028", "😀"]


@pytest.mark.parametrize(("name", "encoded"), REFERENCE.items(), ids=repr)
def test_encoding_is_the_reference_s(name: str, encoded: str) -> None:
    assert file_name(name, True) == encoded


@pytest.mark.parametrize("name", PLAIN, ids=ascii)
def test_other_characters_stand_as_they_are(name: str) -> None:
    assert file_name(name, True) == name


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=2, max_size=2, unique=True))
def test_encoding_is_injective_and_stays_in_its_folder(names: list[str]) -> None:
    first, second = (file_name(name, True) for name in names)
    assert first != second
    for encoded in (first, second):
        assert encoded not in ("", ".", "..")
        assert not set(encoded) & {"/", "\0"}


def test_plain_names() -> None:
    assert file_name("a b%", False) == "a b%"
    for name in ("a/b", "../x", "/etc", "a\0"):
        with pytest.raises(SaveError, match="robust_key=True"):
            file_name(name, False)
    for name in ("..", ".", ""):
        with pytest.raises(SaveError, match="robust_key=True"):
            folder_name(name, False, ())


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(SaveError, match="UTF-8"):
        file_name("a\ud800", True)


def test_folders_make_way_for_files() -> None:
    assert folder_name("a b", True, ()) == "a%20b"
    assert folder_name("meta.json", True, ()) == "meta%2Ejson"
    assert folder_name("x.memmap", True, ()) == "x.memmap"
    assert folder_name("x.memmap", True, {"x.memmap"}) == "x%2Ememmap"
