"""The page about the terminal: each command prints what stands below it."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from tensordict_cli.runners import main

PAGE = (Path(__file__).parents[2] / "docs/guides/terminal.md").read_text()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_commands_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    setup = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert setup is not None
    exec(setup[1], {})
    commands = 0
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, expected = part.partition("\n")
            name, *arguments = shlex.split(line)
            assert name == "tensordict" and main(arguments) in (0, 1)
            found = capsys.readouterr().out
            assert doctest.OutputChecker().check_output(expected, found, FLAGS), f"{line}\n{found}"
            commands += 1
    assert commands >= 8
