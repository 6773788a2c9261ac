"""The usual mistakes, and what this package and the reference say about them: the source of docs/guides/errors.md.

python tests/mistakes.py  # runs all of them, here and on the reference, and writes the page anew

tests/test_mistakes.py keeps every message on the page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "errors.md"

# Runs before every mistake, on both packages.
SETUP = """
import torch
from tensordict import PersistentTensorDict, TensorClass, TensorDict, lazy_stack, load_memmap
from tensordict.nn import TensorDictModule


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor


def data(features=4):
    return TensorDict({"obs": torch.zeros(3, features), "meta": {"reward": torch.zeros(3)}}, batch_size=[3])


td = data()
step = Step(obs=torch.zeros(3, 4), reward=torch.zeros(3), batch_size=[3])
params = TensorDict({"w": torch.ones(3, requires_grad=True)})
linear = torch.nn.Linear(4, 2)
"""


class Mistake(NamedTuple):
    """A mistaken piece of code, and the code that would have worked."""

    wrong: str
    right: str


MISTAKES: dict[str, list[Mistake]] = {
    "Making a container": [
        Mistake(
            'TensorDict({"obs": torch.zeros(5)}, batch_size=[3])', 'TensorDict({"obs": torch.zeros(3)}, batch_size=[3])'
        ),
        Mistake(
            'TensorDict({"obs": torch.zeros(3)}, batch_size="3")', 'TensorDict({"obs": torch.zeros(3)}, batch_size=3)'
        ),
        Mistake("TensorDict([torch.zeros(3)], batch_size=[3])", 'TensorDict({"obs": torch.zeros(3)}, batch_size=[3])'),
        Mistake(
            'TensorDict({"obs": torch.zeros(3)}, bacth_size=[3])', 'TensorDict({"obs": torch.zeros(3)}, batch_size=[3])'
        ),
        Mistake("TensorDict({1: torch.zeros(3)}, batch_size=[3])", 'TensorDict({"1": torch.zeros(3)}, batch_size=[3])'),
        Mistake(
            'TensorDict({"obs": torch.zeros(3, 4)}, batch_size=[3, 4], names=["time"])',
            'TensorDict({"obs": torch.zeros(3, 4)}, batch_size=[3, 4], names=["time", None])',
        ),
        Mistake("td.batch_size = [4]", "td.batch_size = []"),
    ],
    "Keys": [
        Mistake('td["osb"]', 'td["obs"]'),
        Mistake('td["meta", "rewrad"]', 'td["meta", "reward"]'),
        Mistake('td["meta.reward"]', 'td["meta", "reward"]'),
        Mistake('td[["meta", "reward"]]', 'td["meta", "reward"]'),
        Mistake('td["obs", "pixels"]', 'td["meta", "reward"]'),
        Mistake('td["obs", "pixels"] = torch.zeros(3)', 'td["image", "pixels"] = torch.zeros(3)'),
        Mistake("td.set(1, torch.zeros(3))", 'td.set("1", torch.zeros(3))'),
        Mistake('td.select("osb")', 'td.select("obs")'),
        Mistake('td.pop("osb")', 'td.pop("osb", None)'),
        Mistake("torch.zeros(3) in td", '"obs" in td'),
        Mistake("for key, value in td: pass", "for key, value in td.items(): pass"),
    ],
    "Indexing": [
        Mistake("td[5]", "td[2]"),
        Mistake("td[0, 1]", 'td["obs"][0, 1]'),
        Mistake("td[1.0]", "td[1]"),
        Mistake('td[0, "obs"]', 'td["obs"][0]'),
        Mistake("td[torch.tensor([True, False])]", "td[torch.tensor([True, False, True])]"),
        Mistake("td[0][0]", "td[0]"),
        Mistake("td[:2] = data()", "td[:2] = data()[:2]"),
        Mistake('td[:2] = {"obs": torch.zeros(3, 4)}', 'td[:2] = {"obs": torch.zeros(2, 4)}'),
    ],
    "Writing": [
        Mistake('td["new"] = torch.zeros(4)', 'td["new"] = torch.zeros(3)'),
        Mistake('td.lock_()["new"] = torch.zeros(3)', 'with td.lock_().unlock_(): td["new"] = torch.zeros(3)'),
        Mistake('del td.lock_()["obs"]', 'td.lock_().exclude("obs")'),
        Mistake('td.set_("obs", torch.zeros(3, 5))', 'td.set("obs", torch.zeros(3, 5))'),
        Mistake('td.update_({"obs": torch.zeros(3, 5)})', 'td.update({"obs": torch.zeros(3, 5)})'),
        Mistake('td.update_({"osb": torch.zeros(3, 4)})', 'td.update_({"obs": torch.zeros(3, 4)})'),
        Mistake('td.set_("obs", "text")', 'td.set("obs", "text")'),
        Mistake('params.set_("w", torch.zeros(3))', 'params.data.set_("w", torch.zeros(3))'),
        Mistake("params.add_(1)", "params.data.add_(1)"),
    ],
    "Shapes": [
        Mistake("td.view(4)", "td.view(3, 1)"),
        Mistake("td.expand(4)", "td.expand(4, 3)"),
        Mistake("td.unsqueeze(3)", "td.unsqueeze(1)"),
        Mistake("td.transpose(0, 1)", "td.unsqueeze(1).transpose(0, 1)"),
        Mistake("td.split([1, 1])", "td.split([1, 2])"),
        Mistake('td.names = ["time", "agent"]', 'td.names = ["time"]'),
        Mistake('td.sum(dim="time")', 'td.refine_names("time").sum(dim="time")'),
        Mistake("if td == data(): pass", "if (td == data()).all(): pass"),
        Mistake("for row in td[0]: pass", "for row in td: pass"),
        Mistake("torch.vmap(lambda td: td + 1, in_dims=1)(td)", "torch.vmap(lambda td: td + 1, in_dims=0)(td)"),
    ],
    "Several containers": [
        Mistake("torch.stack([data(), data(features=5)])", "lazy_stack([data(), data(features=5)])"),
        Mistake("torch.stack([data(), data()[:2]])", "torch.cat([data(), data()[:2]])"),
        Mistake('torch.stack([data(), data().exclude("obs")])', 'lazy_stack([data(), data().exclude("obs")])'),
        Mistake("torch.stack([data(), torch.zeros(3)])", 'torch.stack([data()["obs"], torch.zeros(3, 4)])'),
        Mistake(
            'torch.cat([data(), data().exclude("obs")])', 'torch.cat([data().select("meta"), data().exclude("obs")])'
        ),
        Mistake('data() + data().exclude("obs")', 'data().add(data().exclude("obs"), default=0)'),
        Mistake('data() + data().to("meta")', 'data().to("meta") + data().to("meta")'),
        Mistake('td + "one"', "td + 1"),
        Mistake('td.to("gpu")', 'td.to("meta")'),
        Mistake('td.to("float32")', "td.to(torch.float32)"),
        Mistake(
            'lazy_stack([data(), data(features=5)])["obs"]',
            'lazy_stack([data(), data(features=5)]).get("obs", as_list=True)',
        ),
    ],
    "Modules and tensorclasses": [
        Mistake(
            'TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])(td)',
            'TensorDictModule(linear, in_keys=["obs"], out_keys=["action"])(td)',
        ),
        Mistake(
            'TensorDictModule(linear, in_keys=["obs"], out_keys=["loc", "scale"])(td)',
            'TensorDictModule(linear, in_keys=["obs"], out_keys=["loc"])(td)',
        ),
        Mistake(
            'TensorDictModule(torch.nn.Linear(5, 2), in_keys=["obs"], out_keys=["action"])(td)',
            'TensorDictModule(torch.nn.Linear(4, 2), in_keys=["obs"], out_keys=["action"])(td)',
        ),
        Mistake(
            'with TensorDict({"weigth": torch.zeros(2, 4)}).to_module(linear): pass',
            "with TensorDict.from_module(linear).to_module(linear): pass",
        ),
        Mistake(
            "Step(obs=torch.zeros(3), rewrad=torch.zeros(3), batch_size=[3])",
            "Step(obs=torch.zeros(3), reward=torch.zeros(3), batch_size=[3])",
        ),
        Mistake(
            "Step(obs=torch.zeros(3), batch_size=[3])",
            "Step(obs=torch.zeros(3), reward=torch.zeros(3), batch_size=[3])",
        ),
        Mistake("step.rewrad", "step.reward"),
        Mistake("step.rewrad = torch.zeros(3)", "step.reward = torch.zeros(3)"),
        Mistake("td.backward()", "params.sum(reduce=True).backward()"),
    ],
    "Files": [
        Mistake('td.memmap("notes.txt")', 'td.memmap("saved")'),
        Mistake('td.memmap("run", existsok=False)', 'td.memmap("run")'),
        Mistake('load_memmap("absent")', 'load_memmap("run")'),
        Mistake('load_memmap("foreign")', 'load_memmap("run")'),
        Mistake('load_memmap("notes.txt")', 'load_memmap("run")'),
        Mistake(
            'PersistentTensorDict(filename="run.h5", batch_size=[3], mode="r")["obs"] = torch.ones(3, 4)',
            'PersistentTensorDict(filename="run.h5", batch_size=[3], mode="r+")["obs"] = torch.ones(3, 4)',
        ),
        Mistake(
            'load_memmap("run").lock_()["new"] = torch.zeros(3)', 'load_memmap("run").clone()["new"] = torch.zeros(3)'
        ),
    ],
}

# Create the files on which a mistake works.
FILES = """
import os
open("notes.txt", "w").write("mine")
os.mkdir("foreign")
open("foreign/notes.txt", "w").write("mine")
td.memmap("run")
td.to_h5("run.h5").close()
"""


def said(code: str, with_files: bool = False) -> str:
    """Run code in an empty folder with the names of `SETUP`; return its error, or nothing."""
    names: dict[str, object] = {"__name__": "__main__"}
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            exec(SETUP, names)
            if with_files:
                exec(FILES, names)
            exec(code, names)
        except Exception as error:
            notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()))
            text = f"{type(error).__name__}: {error}{notes}"
        else:
            return ""
        finally:
            os.chdir(before)
    text = text.replace(f"{os.path.realpath(folder)}/", "").replace(f"{folder}/", "")
    return " ".join(text.split())


def all_said() -> dict[str, str]:
    """Return the error of this package for every mistake."""
    return {
        mistake.wrong: said(mistake.wrong, topic == "Files") for topic, rows in MISTAKES.items() for mistake in rows
    }


# Prints what the package of an environment says, given the folder of this file.
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import mistakes
print(json.dumps(mistakes.all_said()))
"""


def shown(text: str, length: int = 1000) -> str:
    """A message as it stands in the table: long ones, which print whole containers, are cut."""
    text = text if len(text) <= length else f"{text[:length].rstrip()} ..."
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def page(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Build the page from the errors of both packages."""
    lines = [_HEAD]
    for topic, rows in MISTAKES.items():
        lines += [f"## {topic}", "", "| written | this package | what works | the reference |", "|---|---|---|---|"]
        for mistake in rows:
            reference = shown(theirs[mistake.wrong], 200) if theirs[mistake.wrong] else "(nothing)"
            cells = [shown(mistake.wrong), shown(ours[mistake.wrong]), shown(mistake.right), reference]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


_HEAD = f"""\
# Errors, and what would have worked

This page lists usual mistakes: the error of this package, a call that works, and the error of the reference (0.14.3).
Programs can catch the built-in types: `MissingKeyError` is a `KeyError`, `LockedError` a `RuntimeError`, `ShapeError`
both a `ValueError` and a `RuntimeError`. `python tests/mistakes.py` runs all of them and writes this page. A test
compares each message. Messages of the reference that print whole containers are shortened. Square brackets hold the
notes of an exception, which Python prints below its message.

Every line starts from these names:

```py
{SETUP.strip()}
```

Lines about files start from a folder with a save (`run`, `run.h5`), a text file (`notes.txt`) and a folder of another
program (`foreign`).

"""

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    PAGE.parent.mkdir(exist_ok=True)
    command = [ROOT / ".venv-behaviour" / "bin" / "python", "-I", "-W", "ignore", "-c", PROGRAM, ROOT / "tests"]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    PAGE.write_text(page(all_said(), json.loads(found.stdout)))
