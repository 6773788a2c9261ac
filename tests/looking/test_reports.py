"""`tensordict report`: what is on the page, of every format, in how much memory, and how it looks in a browser."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import subprocess
import sys
import uuid
from typing import Any

import numpy as np
import pytest
import torch

from cases import mark_slow
from tensordict import (
    DatasetWriter,
    NonTensorStack,
    TensorClass,
    TensorDict,
    lazy_stack,
    save,
)
from tensordict.core.exceptions import SaveError
from tensordict.io.formats.opening import write_save
from tensordict.io.saving.progress import NO_BAR
from tensordict.looking import measuring
from tensordict.looking.html_report import MARK, report
from tensordict_cli.runners import main

FORMATS = ["directory", "archive", "consolidated", "h5", "zarr", "safetensors", "dataset", "url"]


class Step(TensorClass):
    obs: torch.Tensor
    text: str = "no"


def container(rows: int = 40) -> TensorDict:
    """Leaves of several kinds; some have striking values."""
    obs = torch.linspace(-1, 1, rows * 6).reshape(rows, 6)
    obs[:, 2] = 5
    obs[3, 4] = float("nan")
    obs[0, 5] = float("inf")
    grid = torch.arange(16, dtype=torch.uint8) * 16
    return TensorDict(
        {
            "obs": obs,
            "image": grid.expand(rows, 3, 16, 16).clone(),
            "done": torch.arange(rows) % 4 == 0,
            "agent": {"zero": torch.zeros(rows, 2), "action": torch.arange(rows) % 5},
            "prompt": NonTensorStack(*[f"<b>prompt {row}</b>" for row in range(rows)]),
        },
        batch_size=[rows],
    )


def saved(format: str, folder: pathlib.Path, td: TensorDict | None = None) -> str:
    td = container() if td is None else td
    path = str(folder / f"{format}-{uuid.uuid4().hex}")
    if format == "url":
        path = f"memory://{uuid.uuid4().hex}/save"
        td.save(path)
    elif format == "dataset":
        with DatasetWriter(path, rows_per_shard=16) as writer:
            writer.extend(td)
    else:
        write_save(td, path, format)
    return path


def section(html: str, name: str) -> str:
    """The text of a section, a line for each row, item or card."""
    found = re.search(rf'<h2 id="{name}">.*?</section>', html, re.DOTALL)
    assert found is not None, f"there is no section {name}"
    cells = re.sub(r"</(t[dh]|h3)>", " | ", re.sub(r"<svg.*?</svg>", "", found[0], flags=re.DOTALL))
    return re.sub(r"<[^>]+>", "", re.sub(r"</(tr|li|div|h2)>", "\n", cells))


# --- what is on the page ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format: str, tmp_path: pathlib.Path) -> None:
    path = saved(format, tmp_path)
    page = report(path)
    assert page.problems == [] and page.html.startswith(MARK)
    structure = section(page.html, "structure")
    assert re.search(r"obs \| float32 \| \[40, 6\] \| 1 \| 960 B \| -1 \|.* \| 5 \| 1 \| ", structure)
    assert re.search(r"agent.action \| int64 \| \[40\] \| 1 \| 320 B \| 0 \| 2 \| 1.4322 \| 4 \| 0 \| 8 \|", structure)
    findings = section(page.html, "findings").split("\n")
    assert "obs: 1 of 240 elements (0.42%) are NaN" in findings
    assert "obs: 1 of 240 elements (0.42%) are infinite" in findings
    assert "obs: columns that are constant: 1 of 6, [2]" in findings
    assert "obs: columns that are NaN in some rows: 1 of 6, [4]" in findings
    assert "agent.zero: all 80 elements are 0" in findings
    # Pixels do not count as columns.
    assert not any(line.startswith("image") for line in findings)
    # Each leaf with numbers has a histogram, apart from the constant one.
    assert page.html.count("<svg") == 4
    assert re.search(r"prompt \| NonTensorStack \| \[40\] \| 40 texts: .*: 1, … 35 more", section(page.html, "values"))
    assert page.html.count('src="data:image/png;base64,') == 6 and "… 34 more images" in page.html
    rows = section(page.html, "first-rows").split("\n")
    cells = next(line for line in rows if line.startswith("1 | ")).split(" | ")
    assert len([line for line in rows if re.match(r"\d \| ", line)]) == 5
    assert "False" in cells and "&lt;b&gt;prompt 1&lt;/b&gt;" in cells


@pytest.mark.parametrize("two", [False, True])
def test_it_is_one_page_that_runs_and_loads_nothing(two: bool, tmp_path: pathlib.Path) -> None:
    td = container().set("<script>alert(1)</script>", torch.zeros(40))
    first, second = (saved("directory", tmp_path, item) for item in (td, container()))
    html = report(first, second if two else None).html
    assert not re.search(r"<(script|link|iframe|object|embed)|\bon\w+=|javascript:|@import", html)
    assert not re.findall(r'(?:src|href)="(?!data:image/png|#)[^"]*"', html)
    assert not re.search(r"url\((?!#)", html)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_two_saves_side_by_side(tmp_path: pathlib.Path) -> None:
    other = container().set("obs", container()["obs"] + 1).exclude(("agent", "zero")).set("new", torch.ones(40))
    page = report(saved("directory", tmp_path), saved("h5", tmp_path, other))
    differences = section(page.html, "differences").split("\n")
    assert "agent.zero | missing | Tensor |  | " in differences
    assert "new | additional |  | Tensor | " in differences
    assert "obs | elements | 238 of 240 differ, by at most 1 |  | " in differences
    assert not any(line.startswith(("done", "prompt", "image")) for line in differences)
    structure = section(page.html, "structure")
    assert re.search(r"obs \| A \| float32 \|.*\nobs \| B \| float32 \|", structure)
    assert re.search(r"agent.zero \| B \| missing \|", structure) and re.search(r"new \| A \| missing \|", structure)
    # Both are in one histogram.
    assert page.html.count("<svg") == 4
    assert "A: agent.zero: all 80" in section(page.html, "findings")


def test_the_same_twice(tmp_path: pathlib.Path) -> None:
    one = saved("directory", tmp_path)
    assert "None: keys, kinds, shapes, dtypes, values and elements are the same." in report(one, one).html
    # The page says what it is of, and nothing of when.
    assert report(one).html == report(one).html


def test_members_of_lazy_stacks_are_looked_at_together(tmp_path: pathlib.Path) -> None:
    lazy_stack([TensorDict(a=torch.full((n + 1,), float(n)), s=f"m{n}") for n in range(3)]).save(tmp_path / "a")
    structure = section(report(tmp_path / "a").html, "structure")
    assert "a | float32 | [3, *] | " in structure or "*.a | float32 | [*] | 3 | 24 B | 0 | 1.3333 | " in structure
    lazy_stack([Step(obs=torch.full((2,), float(n))) for n in range(3)]).save(tmp_path / "b")
    assert "*.obs | float32 | [2] | 3 | 24 B | 0 | 1 | " in section(report(tmp_path / "b").html, "structure")


def test_leaves_of_all_kinds(tmp_path: pathlib.Path) -> None:
    td = TensorDict(
        {
            "scalar": torch.tensor(2.5),
            "none": torch.zeros(0, 3),
            "complex": torch.tensor([1 + 2j, 3 - 2j]),
            "half": torch.tensor([0.5, 1.5], dtype=torch.bfloat16),
            "unsigned": torch.tensor([2**64 - 1, 0], dtype=torch.uint64),
            "huge": torch.tensor([torch.finfo(torch.float64).max, torch.finfo(torch.float64).min], dtype=torch.float64),
            "nan": torch.full((3,), float("nan")),
            "byte": torch.tensor([1, 2], dtype=torch.float8_e4m3fn),
        }
    )
    page = report(saved("directory", tmp_path, td))
    structure = section(page.html, "structure")
    for line in (
        r"scalar \| float32 \| \[\] \| 1 \| 4 B \| 2.5 \| 2.5 \| nan \| 2.5 \| 0 \| 0",
        r"complex \| complex64 \| \[2\] \| 1 \| 16 B \|  \| 2\+0j \|",
        r"half \| bfloat16 \| \[2\] \| 1 \| 4 B \| 0.5 \| 1 \|",
        r"unsigned \| uint64 \| \[2\] \| 1 \| 16 B \| 0 \|.* \| 18446744073709551615 \|",
        r"nan \| float32 \| \[3\] \| 1 \| 12 B \|  \| nan \| nan \|  \| 3 \| 0",
    ):
        assert re.search(line, structure), line
    assert "none: it has no elements" in section(page.html, "findings")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("format", ["directory", "dataset", "url"])
def test_ragged_leaves(format: str, tmp_path: pathlib.Path) -> None:
    ragged = torch.nested.nested_tensor([torch.arange(n) for n in (1, 2, 3)], layout=torch.jagged)
    page = report(saved(format, tmp_path, TensorDict({"a": ragged}, [3])))
    assert re.search(
        r"a \| int64 \| \[3, \*\] \| 1 \| .* \| 0 \| 0.66667 \| 0.8165 \| 2 \|", section(page.html, "structure")
    )


def test_a_broken_entry_is_reported(tmp_path: pathlib.Path) -> None:
    path = saved("directory", tmp_path)
    os.truncate(f"{path}/obs.memmap", 100)
    page = report(path)
    assert len(page.problems) == 1 and "obs" in page.problems[0]
    assert "obs" in section(page.html, "findings") and re.search(
        r"agent.action \| int64", section(page.html, "structure")
    )
    assert main(["report", path, "-o", str(tmp_path / "page.html")]) == 1


def test_nothing_is_unpickled(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.zeros(2), value=Bomb())
    td.save(tmp_path / "a", allow_pickle=True)
    assert "pickled" in section(report(tmp_path / "a").html, "values")


class Bomb:
    def __reduce__(self) -> Any:
        return os._exit, (3,)


# --- how much is read -------------------------------------------------------------------------------------------------


def test_histograms_of_long_leaves_are_of_elements_at_random(tmp_path: pathlib.Path) -> None:
    # A sample at equal steps would have one column of 64 only.
    leaf = torch.arange(64.0).expand(50_000, 64).clone()
    found = measuring.measure_leaf(measuring.LeafGroup(("a",), 1, [spec(leaf)]), 0, NO_BAR)
    assert found.tally.count == leaf.numel() and found.is_drawn and 60_000 < found.sample.size < 70_000
    counts = np.histogram(found.sample, np.arange(-0.5, 64))[0]
    assert counts.min() > 0.8 * counts.mean() and counts.max() < 1.2 * counts.mean()
    assert found.columns is not None and len(found.columns.constant()) == 64


def spec(leaf: torch.Tensor) -> Any:
    return measuring.LeafSpec.of(leaf)


def test_a_sample_says_so(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    td = TensorDict({"a": torch.arange(10 << 20, dtype=torch.int32), "b": torch.arange(3)})
    path, page = saved("directory", tmp_path, td), tmp_path / "page.html"
    assert main(["report", path, "--sample", "10", "-o", str(page)]) == 0
    html = page.read_text()
    # Every fourth piece of 8 MiB, of five.
    assert "Of 40.00% of the elements, in pieces at equal distances:" in html
    assert html.count("pieces at equal distances") == 1
    assert "Elements were not compared" in report(path, path, limit=10 << 20).html


MEMORY = """
import sys, threading
from tensordict.looking.html_report import report
from tensordict_cli.runners import main

def private():
    status = open("/proc/self/status")
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) << 10

report(sys.argv[2])
before, most, done = private(), 0, threading.Event()

def watch():
    global most
    while not done.wait(0.002):
        most = max(most, private())

watcher = threading.Thread(target=watch)
watcher.start()
code = main(["report", sys.argv[1], "-o", sys.argv[3]])
done.set()
watcher.join()
print(most - before)
sys.exit(code)
"""


@pytest.mark.parametrize("format", mark_slow(["directory", "h5", "dataset"], keep=["directory", "h5"]))
def test_memory_does_not_limit_the_size(format: str, tmp_path: pathlib.Path) -> None:
    """Mapped memory belongs to the file, and the system can reclaim it."""
    big = torch.zeros(64, 1 << 20, dtype=torch.uint8)
    path = saved(format, tmp_path, TensorDict({"a": big}, [len(big)]))
    small = saved(format, tmp_path, TensorDict({"a": big[:9]}, [9]))
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, path, small, str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "a: all 67,108,864 elements are 0" in (tmp_path / "page.html").read_text()
    assert int(done.stdout.split()[-1]) < 40 << 20


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved("archive", tmp_path)
    assert main(["report", path]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"report.html: [\d.]+ KiB\n", out) and err == ""
    assert (tmp_path / "report.html").read_text() == report(path).html
    assert main(["report", path, path, "-o", "report.html"]) == 0
    assert 'id="differences"' in (tmp_path / "report.html").read_text()


def test_what_is_no_report_is_not_replaced(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("archive", tmp_path)
    before = pathlib.Path(path).read_bytes()
    assert main(["report", path, "-o", path]) == 2
    assert "is not a report; use --force" in capsys.readouterr().err and pathlib.Path(path).read_bytes() == before
    assert main(["report", path, "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "notes.html").write_text("mine")
    assert main(["report", path, "-o", str(tmp_path / "notes.html"), "--force"]) == 0


def test_where_nothing_is(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none"), "-o", str(tmp_path / "page.html")]) == 2
    assert not (tmp_path / "page.html").exists()
    with pytest.raises((FileNotFoundError, SaveError)):
        report(tmp_path)


def test_without_matplotlib(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(container(), tmp_path / "a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'tensordict[report]'")):
        report(tmp_path / "a")


def test_bars_on_standard_error(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("archive", tmp_path)
    report(path, path, progress=True)
    err = capsys.readouterr().err
    assert "reading: 100%" in err and "comparing:" in err and re.search(r"drawing: 100%.* 5/5 ", err)
    report(path, path)
    assert capsys.readouterr().err == ""


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("two", "dark"),
    mark_slow(itertools.product([False, True], [False, True]), keep=[(False, False), (True, True)]),
    ids=["one-light", "one-dark", "two-light", "two-dark"],
)
def test_it_is_seen_in_light_and_dark(two: bool, dark: bool, tmp_path: pathlib.Path, picture: Any) -> None:
    other = container(30).set("obs", torch.randn(30, 6, generator=torch.Generator().manual_seed(0)))
    first, second = saved("directory", tmp_path), saved("archive", tmp_path, other)
    html = report(first, second if two else None).html.replace(str(tmp_path), "runs")
    pixels = picture(html, f"report-{'two' if two else 'one'}", dark, (1200, 2000)).astype(int)
    ground = np.median(pixels.mean(-1))
    assert ground < 40 if dark else ground > 230
    red, blue = pixels[..., 0], pixels[..., 2]
    # The bars of the histograms, of the second save in another colour.
    if two:
        assert (blue - red > 40).mean() > 0.001 and (red - blue > 40).mean() > 0.003
    else:
        assert ((blue - red > 60) & (blue > 100)).mean() > 0.01
