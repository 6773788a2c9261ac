"""The examples of the documents for torchsnapshot, as written there (typos aside), and what they promise on memory."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import uuid
import warnings
from typing import Any, Optional

import pytest
import torch

from tensordict import MemmapTensor, TensorDict
from tensordict.prototype import tensorclass

with warnings.catch_warnings():
    # Its import and its calls use functions deprecated since its last release.
    warnings.simplefilter("ignore")
    import torchsnapshot
    from torchsnapshot import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")


@tensorclass
class MyClass:
    x: torch.Tensor
    y: Optional[MyClass] = None  # noqa: UP045 (as the document has it)


def test_the_two_main_commands(tmp_path: pathlib.Path) -> None:
    tensordict_source = TensorDict({"a": torch.randn(3), "b": {"c": torch.randn(3)}}, [])
    tensordict_target = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3)}}, [])
    path = f"{tmp_path}/snapshot"

    state = {"state": tensordict_source}
    snapshot = torchsnapshot.Snapshot.take(app_state=state, path=path)

    snapshot = Snapshot(path=path)
    state_target = {"state": tensordict_target}
    snapshot.restore(app_state=state_target)

    assert (tensordict_source == tensordict_target).all()


def test_general_use_case(tmp_path: pathlib.Path) -> None:
    tensordict = TensorDict({"a": torch.randn(3), "b": {"c": torch.randn(3)}}, [])
    state = {"state": tensordict}
    path = f"{tmp_path}/{uuid.uuid4()}"
    snapshot = torchsnapshot.Snapshot.take(app_state=state, path=path)
    # later
    snapshot = torchsnapshot.Snapshot(path=path)
    tensordict2 = TensorDict()
    target_state = {"state": tensordict2}
    snapshot.restore(app_state=target_state)
    assert (tensordict == tensordict2).all()


def test_big_datasets(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a": torch.randn(3), "b": TensorDict({"c": torch.randn(3, 1)}, [3, 1])}, [3])
    td.memmap_()
    assert isinstance(td["b", "c"], MemmapTensor)

    app_state = {"state": torchsnapshot.StateDict(tensordict=td.state_dict(keep_vars=True))}
    snapshot = torchsnapshot.Snapshot.take(app_state=app_state, path=f"{tmp_path}/{uuid.uuid4()}")

    td_dest = TensorDict({"a": torch.zeros(3), "b": TensorDict({"c": torch.zeros(3, 1)}, [3, 1])}, [3])
    td_dest.memmap_()
    assert isinstance(td_dest["b", "c"], MemmapTensor)
    app_state = {"state": torchsnapshot.StateDict(tensordict=td_dest.state_dict(keep_vars=True))}
    snapshot.restore(app_state=app_state)
    # sanity check
    assert (td_dest == td).all()
    assert td_dest["b"].batch_size == td["b"].batch_size
    assert isinstance(td_dest["b", "c"], MemmapTensor)


def test_tensorclass(tmp_path: pathlib.Path) -> None:
    tc: Any = MyClass(x=torch.randn(3), y=MyClass(x=torch.randn(3), batch_size=[]), batch_size=[])
    tc.memmap_()
    assert isinstance(tc.y.x, MemmapTensor)

    app_state = {"state": torchsnapshot.StateDict(tensordict=tc.state_dict(keep_vars=True))}
    snapshot = torchsnapshot.Snapshot.take(app_state=app_state, path=f"{tmp_path}/{uuid.uuid4()}")

    tc_dest: Any = MyClass(x=torch.randn(3), y=MyClass(x=torch.randn(3), batch_size=[]), batch_size=[])
    tc_dest.memmap_()
    assert isinstance(tc_dest.y.x, MemmapTensor)
    app_state = {"state": torchsnapshot.StateDict(tensordict=tc_dest.state_dict(keep_vars=True))}
    snapshot.restore(app_state=app_state)

    assert (tc_dest == tc).all()
    assert tc_dest.y.batch_size == tc.y.batch_size
    assert isinstance(tc_dest.y.x, MemmapTensor)


def test_a_tensorclass_in_memory(tmp_path: pathlib.Path) -> None:
    tc: Any = MyClass(x=torch.randn(3), y=MyClass(x=torch.randn(3), batch_size=[]), batch_size=[])
    torchsnapshot.Snapshot.take(app_state={"state": tc}, path=f"{tmp_path}/snapshot")
    other: Any = MyClass(x=torch.zeros(3), y=MyClass(x=torch.zeros(3), batch_size=[]), batch_size=[])
    Snapshot(path=f"{tmp_path}/snapshot").restore(app_state={"state": other})
    assert (other == tc).all() and isinstance(other.y, MyClass)


BIG = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
os.environ["TORCHSNAPSHOT_PER_RANK_MEMORY_BUDGET_BYTES"] = str(16 << 20)
import torch, torchsnapshot
from tensordict import TensorDict
from torchsnapshot.knobs import override_is_batching_disabled, override_max_chunk_size_bytes

MIB = 1 << 20
SIZE = 256

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("RssAnon"))

class Peak:
    def __enter__(self):
        self.start = self.most = anonymous()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.stop.wait(0.001):
            self.most = max(self.most, anonymous())
    def __exit__(self, *rest):
        self.stop.set()
        self.thread.join()
        self.extra = self.most - self.start

folder = sys.argv[1]
row = TensorDict({"a": torch.zeros(MIB // 4), "b": {"c": torch.zeros(MIB // 4)}})
source = row.expand(SIZE // 2).memmap_like(folder + "/source")
source["a"].fill_(1)
source["b", "c"].fill_(2)
target = row.expand(SIZE // 2).memmap_like(folder + "/target")
with override_max_chunk_size_bytes(MIB), override_is_batching_disabled(True):
    with Peak() as taking:
        state = {"state": torchsnapshot.StateDict(tensordict=source.state_dict(keep_vars=True))}
        snapshot = torchsnapshot.Snapshot.take(app_state=state, path=folder + "/snapshot")
    with Peak() as restoring:
        snapshot.restore(app_state={"state": torchsnapshot.StateDict(tensordict=target.state_dict(keep_vars=True))})
    assert (TensorDict.load_memmap(folder + "/target") == source).all()
    target["a"].zero_()
    with Peak() as loading:
        snapshot = torchsnapshot.Snapshot.take(app_state={"state": source}, path=folder + "/whole")
        snapshot.restore(app_state={"state": target})
    assert (target == source).all()
print(taking.extra, restoring.extra, loading.extra)
# The chunks in flight depend on how fast the disk is; a full copy would be SIZE.
assert max(taking.extra, restoring.extra, loading.extra) < SIZE * 3 // 4
"""


@pytest.mark.seconds
def test_a_preallocated_dataset_is_filled_without_a_copy_in_memory(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", BIG, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
