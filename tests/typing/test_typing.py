"""Results of mypy and pyright in strict mode, without plugins.

Nothing about good.py, revealed.py and program.py, which has to run, too; every mistake of bad.py; and for how many
public names they know no more than `Any`. Each checker runs once: a start costs ten seconds.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
import re
import shutil
import subprocess
import sys

import program
import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("good.py", "bad.py", "revealed.py", "program.py")

# The public names, of one class or of all, that give `Any`, at least for some arguments, and why it can be no more.
AS_ENTRIES = "an entry is a tensor, a container or any value, as the key says"
AS_STORED = "a container, or an instance of the tensorclass that was stored"
AS_VALUES = "the value of a holder may be anything"
LEFT = {
    ".collate": "a container, a tensor or a structure of them, as the samples say",
    "PackLayout.unpack": "a TensorDict, or an instance of the tensorclass that was packed",
    "LazyStackedTensorDict.from_dict": "a lazy stack of a list; one container of a mapping",
    "PersistentTensorDict.file": "a File of h5py or a Group of zarr, which may both be missing",
    "PersistentTensorDict.filename": "a path, a URL or a store of zarr",
    "TensorDictStore.from_store": AS_STORED,
    "TensorDictStore.from_tensordict": AS_STORED,
    "TensorDictStore.to_local": AS_STORED,
    "LazyStackedTensorDictStore.from_lazy_stack": AS_STORED,
    "LazyStackedTensorDictStore.from_store": AS_STORED,
    "LazyStackedTensorDictStore.to_local": AS_STORED,
    "get": AS_ENTRIES,
    "get_at": AS_ENTRIES,
    "get_non_tensor": AS_ENTRIES,
    "pop": AS_ENTRIES,
    "setdefault": AS_ENTRIES,
    "from_any": "a container of a mapping; what else it is given may come back as it is",
    "from_pytree": "a container of a dict, list or tuple; a leaf comes back as it is",
    "to_pytree": "the pytree that the container was made of",
    "to_namedtuple": "an instance of the class that it is given; without one, of a class made for the call",
    "tolist": "lists nested as deep as there are batch dims; a dict where there are none",
    "NonTensorDataBase.data": AS_VALUES + "; of a MetaData[T] it is T",
    "NonTensorStack.data": AS_VALUES,
    "_HolderBase.to_dict": AS_VALUES,
    "to_arrow": "a Table of pyarrow, which has no types",
    "to_hf": "a Dataset of datasets, which has none",
    "to_pandas": "a DataFrame of pandas, whose types pyright knows; mypy would, with pandas-stubs",
    "forward": "subclasses have their own, and entries give entries; what a call gives is known",
    "TensorDictModule.module": "a function or a module of any class, whose attributes are asked for",
    "ProbabilisticTensorDictModule.log_prob": "a tensor; a container if the distribution is composite and not summed",
    "ProbabilisticTensorDictSequential.log_prob": "as of its last module",
    "TruncatedNormal.support": "torch's decorator for constraints has no types",
}


def marked(ending: str) -> set[tuple[str, int]]:
    lines = (HERE / "bad.py").read_text().splitlines()
    return {("bad.py", number) for number, line in enumerate(lines, 1) if line.endswith(ending)}


def run(*command: str, folder: pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=folder, timeout=600
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def public_names() -> list[tuple[str, str, str]]:
    """The class that defines it (or nothing), the name, and the expression, of every public name, once each."""
    found, seen = [], set()
    for module in ("tensordict", "tensordict.nn"):
        owner = importlib.import_module(module)
        for name in owner.__all__:
            thing = getattr(owner, name)
            if not inspect.isclass(thing):
                found.append(("", name, f"{module}.{name}"))
            elif name != "dispatch":  # a function to its callers
                kind = f"{module}.{name}[Any, Any]" if name == "TensorClassModuleBase" else f"{module}.{name}"
                for attribute in dir(thing):
                    home = next((c for c in thing.__mro__ if attribute in vars(c)), object)
                    if attribute.startswith("_") or not home.__module__.startswith("tensordict"):
                        continue
                    if id(vars(home)[attribute]) not in seen:
                        seen.add(id(vars(home)[attribute]))
                        found.append((home.__name__, attribute, f"cast({kind}, None).{attribute}"))
    return found


@pytest.fixture(scope="session")
def public() -> list[tuple[str, str, str]]:
    return public_names()


@pytest.fixture(scope="session")
def mypy_says(
    public: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[str, int, str, str]]:
    """The file, line, kind and text of every message, those about all public names included.

    In the folder and with the options of `make lint`, whose cache makes half a minute three seconds.
    """
    folder = tmp_path_factory.mktemp("public")
    lines = [
        "from typing import Any, cast",
        "import tensordict, tensordict.nn",
        *(f"reveal_type({e})" for *_, e in public),
    ]
    (folder / "public_names.py").write_text("\n".join(lines) + "\n")
    files = [*(str(HERE / name) for name in FILES), str(folder / "public_names.py")]
    messages = re.findall(
        r"^(.+?):(\d+): (error|note): (.*)$", run("mypy", "--strict", *files, folder=ROOT), re.MULTILINE
    )
    return [(pathlib.Path(file).name, int(number), kind, text) for file, number, kind, text in messages]


def results_of(text: str) -> list[str]:
    """Return the result types of a revealed function; any other type is returned unchanged."""
    if not text.startswith(("def ", "Overload(")):
        return [text]
    text = text.removeprefix("Overload(").removesuffix(")") if text.startswith("Overload(") else text
    while (shorter := re.sub(r"\([^()]*\)", "", text)) != text:
        text = shorter
    return [signature.partition(" -> ")[2] for signature in text.split(", def")]


def compare(found: dict[tuple[str, int], str], bad: set[tuple[str, int]]) -> None:
    """Every mistake is found and nothing else; `found` has the messages by file and line."""
    lines = {name: (HERE / name).read_text().splitlines() for name in FILES}
    wrong = [f"{name}:{number}: {text}" for (name, number), text in sorted(found.items()) if (name, number) not in bad]
    missed = [f"{name}:{number}: {lines[name][number - 1]}" for name, number in sorted(bad - found.keys())]
    report = ["refused although it is good:", *wrong, "accepted although it is bad:", *missed]
    assert not wrong and not missed, "\n".join(report)


def test_mypy(mypy_says: list[tuple[str, int, str, str]]) -> None:
    found = {(name, number): text for name, number, kind, text in mypy_says if kind == "error"}
    compare(found, marked("# bad") | marked("# mypy"))


def test_public_names_say_more_than_any(
    public: list[tuple[str, str, str]], mypy_says: list[tuple[str, int, str, str]]
) -> None:
    revealed = {
        number - 2: text.removeprefix("Revealed type is ").strip('"')
        for name, number, _, text in mypy_says
        if name == "public_names.py" and text.startswith("Revealed")
    }
    assert len(revealed) == len(public)
    # Definitions get fewer with each method that a container no longer defines again; names do not.
    assert len(public) > 580
    assert len({name for _, name, _ in public}) > 460
    vague = set()
    for number, text in revealed.items():
        owner, name, _ = public[number - 1]
        if {"Any", "Any | None"} & set(results_of(text)):
            vague.add(name if name in LEFT else f"{owner}.{name}")
    assert vague == LEFT.keys()


def test_pyright(tmp_path: pathlib.Path) -> None:
    for name in FILES:
        shutil.copy(HERE / name, tmp_path / name)
    # Lines that mypy ignores still count for pyright.
    config = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "strict", "enableTypeIgnoreComments": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    text = run("pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path), folder=tmp_path)
    problems = [problem for problem in json.loads(text)["generalDiagnostics"] if problem["severity"] == "error"]
    compare(
        {
            (pathlib.Path(problem["file"]).name, problem["range"]["start"]["line"] + 1): problem["message"]
            for problem in problems
        },
        marked("# bad"),
    )


def test_the_program_runs(tmp_path: pathlib.Path) -> None:
    assert program.main(tmp_path) != 0
