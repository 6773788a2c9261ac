"""What mypy and pyright say in strict mode, without plugins.

Nothing about good.py, every mistake of bad.py, and the types in revealed.py.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
FILES = ("good.py", "bad.py", "revealed.py")


def bad_lines() -> set[int]:
    lines = (HERE / "bad.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# bad")}


def run(*command: str, folder: pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=folder, timeout=600
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def compare(found: dict[tuple[str, int], str]) -> None:
    """Every mistake is found and nothing else; `found` has the messages by file and line."""
    bad = {("bad.py", number) for number in bad_lines()}
    lines = {name: (HERE / name).read_text().splitlines() for name in FILES}
    wrong = [f"{name}:{number}: {text}" for (name, number), text in sorted(found.items()) if (name, number) not in bad]
    missed = [f"{name}:{number}: {lines[name][number - 1]}" for name, number in sorted(bad - found.keys())]
    report = ["refused although it is good:", *wrong, "accepted although it is bad:", *missed]
    assert not wrong and not missed, "\n".join(report)


def test_mypy(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "mypy.ini"
    config.write_text(
        f"[mypy]\nstrict = true\nmypy_path = {SOURCE}\nfollow_imports = silent\ncache_dir = {tmp_path / 'cache'}\n"
    )
    text = run("mypy", "--config-file", str(config), *(str(HERE / name) for name in FILES), folder=tmp_path)
    found = {}
    for line in text.splitlines():
        if ": error:" in line:
            place, _, message = line.partition(": error: ")
            name, number = place.rsplit(":", 1)
            found[pathlib.Path(name).name, int(number)] = message
    compare(found)


def test_pyright(tmp_path: pathlib.Path) -> None:
    for name in FILES:
        shutil.copy(HERE / name, tmp_path / name)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(SOURCE)], "typeCheckingMode": "strict"})
    )
    text = run("pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path), folder=tmp_path)
    problems = [problem for problem in json.loads(text)["generalDiagnostics"] if problem["severity"] == "error"]
    compare(
        {
            (pathlib.Path(problem["file"]).name, problem["range"]["start"]["line"] + 1): problem["message"]
            for problem in problems
        }
    )
