"""Printing what lies in a folder."""

from __future__ import annotations

import pathlib

import pytest
import torch

from tensordict import TensorDict
from tensordict.io.saving.tree import print_directory_tree


def test_tree(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict({"a": torch.rand(10), "b": {"c": torch.rand(10)}}, [10]).memmap_(tmp_path / "tensordict")
    text = print_directory_tree(tmp_path / "tensordict", display_metadata=False)
    assert text.splitlines() == [
        "tensordict/",
        "    b/",
        "        c.memmap",
        "        meta.json",
        "    a.memmap",
        "    meta.json",
    ]
    assert capsys.readouterr().out == text + "\n"


def test_size_and_indent(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").write_bytes(bytes(3 << 19))
    text = print_directory_tree(str(tmp_path), indent="..")
    assert text.splitlines() == ["..Directory size: 1.50 MiB", f"..{tmp_path.name}/", "..    x"]


def test_missing_folder(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotADirectoryError, match="nowhere"):
        print_directory_tree(tmp_path / "nowhere")
