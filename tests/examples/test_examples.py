"""Runs the programs in `examples/` as a user would, and checks what they print and leave on disk."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensordict import TensorDict

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of `examples/digits.py` and the directory that it wrote to."""
    root = tmp_path_factory.mktemp("digits")
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "digits.py"), "--root", str(root)],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout, root


def test_the_demo_installs_all_that_it_imports() -> None:
    """`make demo` has an environment of its own, with the extra `demo` and nothing else."""
    extra = re.search(r"^demo = (\[.*\])$", (EXAMPLES.parent / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None
    declared = {re.split("[<>=]", package)[0] for package in ast.literal_eval(extra[1])}
    program = ast.parse((EXAMPLES / "digits.py").read_text())
    names = [alias.name for node in ast.walk(program) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(program) if isinstance(node, ast.ImportFrom)]
    foreign = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"torch", "tensordict"}
    assert {{"sklearn": "scikit-learn"}.get(name, name) for name in foreign} == declared


@pytest.mark.seconds
class TestDigits:
    def test_accuracy_is_above_nine_tenths(self, digits: tuple[str, Path]) -> None:
        output, _ = digits
        accuracy = re.search(r"^accuracy on (\d+) held-out images: ([\d.]+)$", output, re.MULTILINE)
        assert accuracy is not None, output
        assert int(accuracy[1]) == 360
        assert 0.9 < float(accuracy[2]) <= 1

    def test_predictions_are_identical_after_reloading(self, digits: tuple[str, Path]) -> None:
        output, _ = digits
        lines = output.splitlines()
        assert "predictions after reloading identical: True" in lines
        assert "training resumes from the reloaded state: True" in lines

    def test_reports_bytes_read_and_time(self, digits: tuple[str, Path]) -> None:
        output, _ = digits
        read = re.search(r"^bytes read while training: ([\d,]+)$", output, re.MULTILINE)
        seconds = re.search(r"^time per epoch: ([\d.]+) s$", output, re.MULTILINE)
        assert read is not None, output
        assert seconds is not None, output
        # 12 epochs over the 1,437 images that are not held out: 64 bytes of pixels and 8 of label each.
        assert int(read[1].replace(",", "")) == 12 * 1437 * (64 + 8)
        assert float(seconds[1]) > 0

    def test_prints_the_tree_of_what_it_saved(self, digits: tuple[str, Path]) -> None:
        output, root = digits
        tree = output.partition("what was saved:\n")[2].splitlines()
        saved = [path.name + "/" * path.is_dir() for path in root.rglob("*")]
        assert sorted(line.strip() for line in tree if not line.startswith("Directory size")) == sorted(
            [*saved, f"{root.name}/"]
        )

    def test_what_it_saved_holds_the_data(self, digits: tuple[str, Path]) -> None:
        _, root = digits
        data = TensorDict.load_memmap(root / "data")
        assert data.batch_size == (1797,)
        assert data["image"].shape == (1797, 8, 8)
        assert sorted(data["label"].unique().tolist()) == list(range(10))
        checkpoint = TensorDict.load_memmap(root / "checkpoint")
        assert checkpoint["weights", "3", "weight"].shape == (10, 128)
        # 45 batches in each of 12 epochs, and none since: restoring must not write into the checkpoint.
        assert checkpoint["optimizer", "0", "step"].item() == 45 * 12


def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def run(epochs: int) -> str:
        command = [sys.executable, "-W", "error", str(EXAMPLES / "training.py"), "--root", str(tmp_path)]
        done = subprocess.run([*command, "--epochs", str(epochs)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert re.findall(r"^epoch (\d)", run(4), re.MULTILINE) == ["0", "1", "2", "3"]
    out = run(6)
    assert re.findall(r"^epoch (\d)", out, re.MULTILINE) == ["4", "5"]
    found = re.search(r"^accuracy: (.*)$", out, re.MULTILINE)
    assert found is not None and float(found[1]) > 0.9
    history = TensorDict.load_memmap(tmp_path / "history-4")
    assert history["epoch"].tolist() == [4, 5] and f"{history['accuracy'][-1]:.3f}" == found[1]
