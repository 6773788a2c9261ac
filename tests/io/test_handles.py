"""A pickle of a mapped tensor leads to its file, and never to another one that has taken the path of that."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from tensordict import MemoryMappedTensor, TensorDict, lazy_stack, load_memmap
from tensordict.core.exceptions import SaveError
from tensordict.memory import system

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def make(value: float = 0) -> TensorDict:
    rows = torch.nested.nested_tensor([torch.ones(2) + value, torch.ones(3)])
    stack = lazy_stack([TensorDict(u=torch.full((2,), value)), TensorDict(w=torch.ones(1))])
    return TensorDict({"a": torch.arange(6.0).view(2, 3) + value, "n": {"rows": rows}, "stack": stack}, [2])


def pickle_for_process(value: object) -> bytes:
    content = io.BytesIO()
    ForkingPickler(content).dump(value)
    return content.getvalue()


DUMPS = {"pickle": pickle.dumps, "for another process": pickle_for_process}
# Return the pickled handles of a mapped container.
PARTS: dict[str, Callable[[Any], Any]] = {
    "container": lambda td: td,
    "tensor": lambda td: td["a"],
    "view": lambda td: td["a"][:, 1:],
    "ragged": lambda td: td["n", "rows"],
    "row": lambda td: td[1],
    "stack": lambda td: td["stack"],
}
REPLACED = r"the file '.*memmap' is not the one that was pickled: another save has its path.*load_memmap.*clone\(\)"


@pytest.mark.parametrize("dumps", DUMPS.values(), ids=DUMPS)
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_handle_is_refused_once_its_path_is_another_save(
    part: Callable[[Any], Any], dumps: Callable[[object], Any], tmp_path: pathlib.Path
) -> None:
    td = make().memmap(tmp_path / "saved")
    # A message to a process is received once.
    pickle.loads(dumps(part(td)))
    handle = dumps(part(td))
    make(7).memmap(tmp_path / "saved")
    late = dumps(part(td))
    del td
    for content in (handle, late):
        with pytest.raises(SaveError, match=REPLACED):
            pickle.loads(content)
    assert pickle.loads(dumps(part(load_memmap(tmp_path / "saved")))) is not None


def test_writing_in_place_leaves_a_handle_valid(tmp_path: pathlib.Path) -> None:
    td = make().memmap(tmp_path / "saved")
    handle = pickle.dumps(td)
    td["a"].fill_(5)
    td["a"][0] = 6
    load_memmap(tmp_path / "saved")["a"][1, 2] = 7
    os.utime(tmp_path / "saved" / "a.memmap", ns=(1, 1))
    (tmp_path / "saved" / "a.memmap").chmod(0o600)
    td.make_memmap("more", (2,)).fill_(1)
    back = pickle.loads(handle)
    assert back["a"].tolist() == [[6, 6, 6], [5, 5, 7]]
    back["a"].zero_()
    assert not td["a"].any()


def test_a_tensor_that_stays_in_the_next_save_keeps_its_handle(tmp_path: pathlib.Path) -> None:
    td = make().memmap(tmp_path / "saved")
    stays, goes = pickle.dumps(td["a"]), pickle.dumps(td["n", "rows"])
    changed = td.clone(False)
    changed["n"] = TensorDict({"rows": torch.zeros(2, 5)}, [2])
    changed.memmap(tmp_path / "saved")
    td["a"].fill_(3)
    assert pickle.loads(stays).tolist() == [[3, 3, 3], [3, 3, 3]]
    with pytest.raises(SaveError, match=REPLACED):
        pickle.loads(goes)


def test_a_handle_does_not_lead_to_a_copy(tmp_path: pathlib.Path) -> None:
    """It stands for a copy of the folder on another machine, under the same path."""
    handle = pickle.dumps(make().memmap(tmp_path / "saved")["a"])
    (tmp_path / "saved").rename(tmp_path / "aside")
    with pytest.raises(FileNotFoundError, match=r"saved/a\.memmap"):
        pickle.loads(handle)
    shutil.copytree(tmp_path / "aside", tmp_path / "saved")
    with pytest.raises(SaveError, match="it was copied there"):
        pickle.loads(handle)
    shutil.rmtree(tmp_path / "saved")
    (tmp_path / "aside").rename(tmp_path / "saved")
    assert pickle.loads(handle)[1, 2] == 5


def test_an_inode_that_is_used_again_is_another_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system gives the number of a file that is gone to the next one."""
    path = tmp_path / "x.memmap"
    handle = pickle.dumps(MemoryMappedTensor.from_tensor(torch.ones(3), filename=path))
    inode, made = system.identity_of(str(path))
    assert inode == path.stat().st_ino
    for other, refused in ((made + 1, True), (made, False), (0, False)):
        monkeypatch.setattr(system, "identity_of", lambda where, other=other: (inode, other))
        if refused:
            with pytest.raises(SaveError, match="is not the one that was pickled"):
                pickle.loads(handle)
        else:
            assert pickle.loads(handle).tolist() == [1, 1, 1]


def test_files_have_a_time_of_birth_that_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    path.write_text("one")
    first = system.identity_of(str(path))
    if not first[1]:
        pytest.skip("this file system does not tell when a file was made")
    path.write_text("two")
    os.utime(path, ns=(5, 5))
    (tmp_path / "link").symlink_to(path)
    assert system.identity_of(str(path)) == system.identity_of(str(tmp_path / "link")) == first
    (tmp_path / "y").write_text("new")
    os.replace(tmp_path / "y", path)
    assert system.identity_of(str(path)) != first
    with pytest.raises(FileNotFoundError, match="missing"):
        system.identity_of(str(tmp_path / "missing"))


def test_without_statx_the_number_of_the_inode_counts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "libc", None)
    td = make().memmap(tmp_path / "saved")
    handle = pickle.dumps(td["a"])
    assert pickle.loads(handle)[1, 2] == 5
    make(7).memmap(tmp_path / "saved")
    with pytest.raises(SaveError, match=REPLACED):
        pickle.loads(handle)


LOADING = """
import pickle, sys
try:
    print(pickle.load(open(sys.argv[1], "rb"))["a"].sum().item())
except OSError as error:
    print(error)
"""


def test_another_process_is_told(tmp_path: pathlib.Path) -> None:
    td = make().memmap(tmp_path / "saved")
    (tmp_path / "handle").write_bytes(pickle.dumps(td))

    def load_elsewhere() -> str:
        command = [sys.executable, "-W", "ignore", "-c", LOADING, str(tmp_path / "handle")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert load_elsewhere() == "15.0\n"
    make(7).memmap(tmp_path / "saved")
    assert "is not the one that was pickled" in load_elsewhere()
