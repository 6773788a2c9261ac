"""That `check.py`, which `make lint` runs, finds what is against the plan."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def load_program(name: str) -> Any:
    """Load a program in this folder as a module."""
    spec = importlib.util.spec_from_file_location(f"house_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load_program("check")
flows = load_program("flows")

FOUND = {"entries": 3, "hooks": 2, "flows": {"td[0]": 6}}
PLAN = {**FOUND, "rooms": {"core": 10, "ops": 10, "public": 10}}


def house(folder: Path, **files: str) -> Any:
    """A package with these files; in their names, `__` stands for a slash."""
    for name, text in {"__init__": "", **files}.items():
        path = folder / "tensordict" / (name if name == "__init__" else name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
    return check.House(folder)


def problems(made: Any, **found: Any) -> list[str]:
    return list(check.problems(made, PLAN, {**FOUND, **found, "rooms": made.lines()}))


def test_a_house_in_order(tmp_path: Path) -> None:
    made = house(tmp_path, core__keys="import torch", ops__shape="from tensordict.core import keys", base="import os")
    assert problems(made) == []


@pytest.mark.parametrize(
    "text",
    [
        "from tensordict.ops import shape",
        "from tensordict import ops",
        "import tensordict.ops.shape as shape",
        "def late():\n    from tensordict.ops.shape import view",
        "from tensordict.base import Base",
    ],
)
def test_imports_point_one_way(tmp_path: Path, text: str) -> None:
    made = house(tmp_path, core__keys=text, ops__shape="", base="")
    [problem] = problems(made)
    assert "core/keys.py" in problem and "core/ must not import" in problem


def test_what_type_checkers_see_is_free(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tensordict.ops import shape"
    assert problems(house(tmp_path, core__keys=text, ops__shape="")) == []


def test_budgets(tmp_path: Path) -> None:
    made = house(tmp_path, core__keys="x = 1\n" * 11, ops__shape="", other__new="")
    assert problems(made, hooks=3) == [
        "hooks: 3, and house.toml allows 2",
        "core/ has 11 lines of code, and house.toml allows 10 and 3 % more",
        "other is no room of house.toml",
    ]


def test_flows_have_budgets(tmp_path: Path) -> None:
    made = house(tmp_path, core__keys="", ops__shape="", base="")
    assert problems(made, flows={"td[0]": 7, "td[1]": 1}) == [
        "td[0]: 7 calls, and house.toml allows 6",
        "td[1]: 1 calls, and house.toml allows 0",
    ]


def test_calls_are_counted_in_all_threads() -> None:
    import threading

    from tensordict import TensorDict

    td = TensorDict({"a": [1]})

    def flow() -> None:
        other = threading.Thread(target=td.is_empty)
        other.start()
        other.join()

    assert flows.count_calls(flow) == flows.count_calls(td.is_empty) != (0, 0, 0)


def test_a_generator_is_one_call() -> None:
    def generate() -> Iterator[int]:
        yield from range(5)

    package, flows._PACKAGE = flows._PACKAGE, __file__
    try:
        assert flows.count_calls(lambda: list(generate())).calls == 2
    finally:
        flows._PACKAGE = package


def test_lookups_and_makers_are_counted(tmp_path: Path) -> None:
    text = (
        "from tensordict.core import registry\nx = registry.lookup('A')()\ndef f(name):\n    registry.lookup(name)._of"
    )
    makers = "import torch\ndense: object\nvalue: object\nother = 1"
    made = house(tmp_path, core__makers=makers, ops__shape=text)
    assert (made.lookups(), made.makers()) == (2, 2)
    (tmp_path / "without").mkdir()
    assert house(tmp_path / "without").makers() == 0


def test_lines_of_code() -> None:
    text = (
        '"""Doc.\n\nMore.\n"""\n\n# A comment.\nx = [\n    1,\n]\n\n\ndef f():\n    """Doc."""\n    return x  # why\n'
    )
    assert check.code_lines(text) == 5


def test_one_class_a_name(tmp_path: Path) -> None:
    made = house(tmp_path, core__keys="class Path: ...", ops__shape="def f():\n    class Path: ...")
    [problem] = problems(made)
    assert "2 classes are called Path, in tensordict/core/keys.py, tensordict/ops/shape.py" in problem


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    x = d['k']\nexcept KeyError:\n    x = None",
        "try:\n    x = d.k\nexcept (TypeError, AttributeError):\n    x = None",
        "import contextlib\nwith contextlib.suppress(LookupError):\n    x = d['k']",
        "def read(self):\n    return self.__dict__.get('k')",
        "def read(self):\n    return 'k' in self.__dict__",
        "class Entries(MutableMapping[str, int]):\n    def get(self, name, default=None): ...",
    ],
)
def test_reads_that_compiled_code_does_not_guard(tmp_path: Path, text: str) -> None:
    [problem] = problems(house(tmp_path, core__keys=text))
    assert "tensordict/core/keys.py:" in problem and "compiled code does not guard" in problem


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    x = d['k']\nexcept KeyError:  # guarded: the error lists the names\n    raise ValueError(list(d))",
        "try:\n    x = int('k')\nexcept ValueError:\n    x = None",
        "x = d.get('k')",
        "class Entries(Mapping[str, int]):\n    def get(self, name): ...\n    def __contains__(self, name): ...",
    ],
)
def test_reads_that_compiled_code_guards(tmp_path: Path, text: str) -> None:
    assert problems(house(tmp_path, core__keys=text)) == []


def test_code_that_is_not_compiled_may_catch_what_is_absent(tmp_path: Path) -> None:
    assert problems(house(tmp_path, core__keys="", base="try:\n    x = {}['k']\nexcept KeyError:\n    x = None")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nadd = torch._foreach_add",
        "import torch\nadd = torch._C._nn.pad_sequence",
        "import torch._functorch.vmap",
        "from torch.utils import _pytree",
        "from torch import _dynamo as compiler",
        "def late():\n    from torch._C import _functorch",
        "import torch.nn as nn\nx = nn._reduction",
        "def version(tensor):\n    return tensor._version",
    ],
)
def test_private_names_of_torch_are_in_one_module(tmp_path: Path, text: str) -> None:
    [problem] = problems(house(tmp_path, core__keys=text))
    assert "core/keys.py" in problem and "private in torch" in problem
    assert problems(house(tmp_path / "other", core__torch_internals=text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.__version__",
        "import torch\nclass Net(torch.nn.Module):\n    def f(self):\n        return self._parameters",
        "from torch import nn\nnn.Module._apply(None, None)",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch._subclasses import FakeTensor",
    ],
)
def test_what_is_public_or_for_subclasses_is_free(tmp_path: Path, text: str) -> None:
    assert problems(house(tmp_path, core__keys=text)) == []
