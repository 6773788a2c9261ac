"""The examples of seeds/000 to 004 as written, typos aside; what they print is compared exactly."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import pathlib
import tempfile
from typing import Any, Optional

import numpy as np
import pytest
import torch

from tensordict import (
    MemmapTensor,
    MemoryMappedTensor,
    TensorClass,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
    lazy_stack,
    load_memmap,
)
from tensordict.prototype import tensorclass
from tensordict.utils import print_directory_tree


def test_000_unlocking_for_a_block() -> None:
    data = TensorDict({"old": torch.zeros(3)}, [3])
    value = torch.ones(3)
    data.lock_()  # data.set will result in an exception
    with pytest.raises(RuntimeError, match="lock"):
        data.set("key", value)
    with data.unlock_():
        data.set("key", value)
    assert data.is_locked
    assert data["key"] is value


def test_000_memory_mapped_images(tmp_path: pathlib.Path) -> None:
    # The document's 1,000,000 images take 691 GB; the file is sparse, but not every file system takes its length.
    my_images = MemoryMappedTensor.empty((1_000, 3, 480, 480), dtype=torch.uint8, filename=tmp_path / "images.memmap")
    mini_batch = my_images[:10]  # just reads the first 10 images of the dataset
    assert isinstance(mini_batch, MemoryMappedTensor)
    assert mini_batch.shape == (10, 3, 480, 480) and mini_batch.dtype == torch.uint8
    assert mini_batch.data_ptr() == my_images.data_ptr()


def on_device(device: str, shared: bool, own_device: str, own_shared: bool, *, second: bool) -> str:
    """The output of seeds/002, with the devices of this machine."""
    rows = [f"        a: Tensor(shape=torch.Size([10]), device={device}, dtype=torch.float32, is_shared={shared})"]
    if second:
        rows.append(
            f"        b: Tensor(shape=torch.Size([10, 10]), device={device}, dtype=torch.float32, is_shared={shared})"
        )
    return (
        "TensorDict(\n    fields={\n" + ",\n".join(rows) + "},\n    batch_size=torch.Size([10]),\n"
        f"    device={own_device},\n    is_shared={own_shared})"
    )


@pytest.mark.gpu
def test_002_devices() -> None:
    tensordict = TensorDict({"a": torch.rand(10)}, [10], device="cuda:0")
    assert str(tensordict) == on_device("cuda:0", True, "cuda:0", True, second=False)
    tensordict["b"] = torch.rand(10, 10)
    assert str(tensordict) == on_device("cuda:0", True, "cuda:0", True, second=True)
    assert str(tensordict.device) == "cuda:0"
    tensordict = tensordict.to(torch.device("cpu"))
    assert str(tensordict) == on_device("cpu", False, "cpu", False, second=True)
    tensordict = tensordict.cuda()
    assert str(tensordict) == on_device("cuda:0", True, "cuda:0", True, second=True)
    tensordict.clear_device_()
    assert str(tensordict) == on_device("cuda:0", True, "None", False, second=True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_002_devices_without_a_gpu(device: str) -> None:
    tensordict = TensorDict({"a": torch.rand(10)}, [10], device=device)
    assert str(tensordict) == on_device(device, False, device, False, second=False)
    tensordict["b"] = torch.rand(10, 10)
    assert str(tensordict) == on_device(device, False, device, False, second=True)
    assert str(tensordict.device) == device
    if device == "cpu":
        tensordict = tensordict.to(torch.device("meta")).to(torch.device("meta"))
        assert str(tensordict) == on_device("meta", False, "meta", False, second=True)
        device = "meta"
    tensordict.clear_device_()
    assert str(tensordict) == on_device(device, False, "None", False, second=True)


def test_002_memmap() -> None:
    tensordict = TensorDict({"a": torch.rand(10), "b": {"c": torch.rand(10)}}, [10])
    tensordict.memmap_()
    expected = """\
TensorDict(
    fields={
        a: MemoryMappedTensor(shape=torch.Size([10]), device=cpu, dtype=torch.float32, is_shared=False),
        b: TensorDict(
            fields={
                c: MemoryMappedTensor(shape=torch.Size([10]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([10]),
            device=cpu,
            is_shared=False)},
    batch_size=torch.Size([10]),
    device=cpu,
    is_shared=False)"""
    assert str(tensordict) == expected


def test_002_memmap_like() -> None:
    tensordict = TensorDict({"a": torch.rand(10), "b": {"c": torch.rand(10)}}, [10])
    mm_tensordict = tensordict.memmap_like()
    assert str(mm_tensordict["a"].contiguous()) == "MemoryMappedTensor([0., 0., 0., 0., 0., 0., 0., 0., 0., 0.])"


@pytest.mark.parametrize("method", ["memmap_", "memmap", "memmap_like"])
def test_002_directory(tmp_path: pathlib.Path, method: str) -> None:
    """The document shows metadata files of an older format; format/FORMAT.md has the current one."""
    tensordict = TensorDict({"a": torch.rand(10), "b": {"c": torch.rand(10)}}, [10])
    getattr(tensordict, method)(prefix=str(tmp_path / "root"))
    found = {str(path.relative_to(tmp_path / "root")) for path in (tmp_path / "root").rglob("*")}
    assert found == {"a.memmap", "b", "b/c.memmap", "b/meta.json", "meta.json"}


def test_004_load_memmap(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    td = TensorDict.fromkeys(["a", "b", "c", ("nested", "e")], 0)
    td.memmap("./saved_td")
    td_load = TensorDict.load_memmap("./saved_td")
    assert (td == td_load).all()
    nested = TensorDict.load_memmap("./saved_td/nested")
    assert nested["e"] == 0


def test_004_load_memmap_out(tmp_path: pathlib.Path) -> None:
    """`out`: optional tensordict where the data should be written."""
    TensorDict.fromkeys(["a", ("nested", "e")], 3).memmap(tmp_path)
    out = TensorDict.fromkeys(["a", ("nested", "e")], 0)
    load_memmap(tmp_path, out=out)
    assert out["a"] == 3 and out["nested", "e"] == 3


def empty_entries(cls: str, device: str) -> str:
    return f"""\
TensorDict(
    fields={{
        a: {cls}(shape=torch.Size([]), device={device}, dtype=torch.float32, is_shared=False),
        b: TensorDict(
            fields={{
                c: {cls}(shape=torch.Size([]), device={device}, dtype=torch.float32, is_shared=False)}},
            batch_size=torch.Size([]),
            device={device},
            is_shared=False)}},
    batch_size=torch.Size([]),
    device={device},
    is_shared=False)"""


def test_004_meta_and_fake(capsys: pytest.CaptureFixture[str]) -> None:
    td = TensorDict({"a": torch.zeros(()), "b": {"c": torch.zeros(())}})
    with tempfile.TemporaryDirectory() as path:
        td.save(path)
        td_load = load_memmap(path, device="meta")
        print("meta:", td_load)
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode():
            td_load = load_memmap(path)
            print("fake:", td_load)
    expected = f"meta: {empty_entries('Tensor', 'meta')}\nfake: {empty_entries('FakeTensor', 'cpu')}\n"
    assert capsys.readouterr().out == expected


def test_004_meta_reads_no_file(tmp_path: pathlib.Path) -> None:
    TensorDict({"a": torch.zeros(5), "b": {"c": torch.zeros(5)}}).save(tmp_path)
    expected = load_memmap(tmp_path, device="meta")
    for leaf in tmp_path.rglob("*.memmap"):
        leaf.chmod(0)
    again = load_memmap(tmp_path, device="meta")
    assert again["b", "c"].is_meta and again["b", "c"].shape == expected["b", "c"].shape == (5,)


@pytest.mark.gpu
def test_004_load_onto_a_gpu(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a": torch.rand(5), "b": {"c": torch.rand(5)}})
    td.save(tmp_path)
    for non_blocking in (False, True):
        loaded = load_memmap(tmp_path, device="cuda", non_blocking=non_blocking)
        torch.cuda.synchronize()
        assert loaded.is_cuda and (loaded.cpu() == td).all()


class ScoreData(TensorClass):
    """The fields of the class that seeds/001 documents."""

    prompt_level_strict_acc: torch.Tensor | None
    inst_level_strict_acc: torch.Tensor | None
    prompt_level_loose_acc: torch.Tensor | None
    inst_level_loose_acc: torch.Tensor | None


def test_001_score_data() -> None:
    def scores(n: int) -> ScoreData:
        return ScoreData(torch.ones(n), None, torch.zeros(n), None, batch_size=[n], device=None, names=None)

    one = scores(3)
    assert next(f.name for f in ScoreData.fields()) == "prompt_level_strict_acc"
    assert (
        one.get("inst_level_strict_acc") is None and one.get("prompt_level_strict_acc") is one.prompt_level_strict_acc
    )
    assert one.set("inst_level_strict_acc", torch.ones(3)) is one and one.inst_level_strict_acc is not None
    results = [ScoreData.stack([scores(3), scores(3)]), ScoreData.cat([scores(3), scores(2)], dim=0)]
    results += [ScoreData.lazy_stack([scores(3), scores(2)]), ScoreData.maybe_dense_stack([scores(3), scores(2)])]
    results += [*scores(3).unbind(0), ScoreData.from_tensordict(scores(2).to_tensordict())]
    assert all(type(result) is ScoreData for result in results)
    assert "inst_level_loose_acc" in scores(1).to_tensordict(retain_none=True)


def test_001_from_any() -> None:
    """The supported objects that the document lists."""

    @dataclasses.dataclass
    class Plain:
        x: torch.Tensor
        y: str

    named = collections.namedtuple("named", ["x", "y"])
    array = np.array([(0.0, 1)], dtype=[("x", "f4"), ("y", "i4")])
    for obj in (Plain(torch.zeros(3), "a"), named(torch.zeros(3), "a"), {"x": torch.zeros(3), "y": "a"}, array):
        td = TensorDict.from_any(obj)
        assert type(td) is TensorDict and set(td.keys()) == {"x", "y"}
    assert set(TensorDict.from_any((torch.zeros(3), "a")).keys()) == {"0", "1"}
    assert TensorDict.from_any(td) is td
    full = TensorDict.from_any({"a": torch.zeros(3, 4), "b": {"c": torch.zeros(3, 4, 5)}}, auto_batch_size=True)
    assert full.batch_size == (3, 4) and full["b"].batch_size == (3, 4, 5)
    assert ScoreData.from_any({"inst_level_loose_acc": torch.ones(2)}, batch_size=[2]).batch_size == (2,)


def test_001_from_dataclass() -> None:
    @dataclasses.dataclass
    class Plain:
        x: torch.Tensor

    assert type(TensorDict.from_dataclass(Plain(torch.zeros(3)))) is TensorDict
    made = TensorDict.from_dataclass(Plain(torch.zeros(3)), as_tensorclass=True)
    assert is_tensorclass(made) and not isinstance(made, Plain)
    into = TensorDict.from_dataclass(Plain(torch.zeros(3)), as_tensorclass=True, dest_cls=MyClass, batch_size=[3])
    assert type(into) is MyClass and into.batch_size == (3,)
    with pytest.raises(TypeError, match="dataclass"):
        TensorDict.from_dataclass({"x": 1})


def test_001_from_h5(tmp_path: pathlib.Path) -> None:
    TensorDict({"key1": torch.zeros(3), "key2": torch.ones(3)}).to_h5(tmp_path / "file.h5").close()
    with TensorDict.from_h5(tmp_path / "file.h5") as td:
        assert str(td) == printed_pair("PersistentTensorDict", "key1", "key2", "[3]")


def printed_pair(cls: str, first: str, second: str, shape: str, dtype: str = "float32", more: str = "") -> str:
    rows = [
        f"        {name}: Tensor(shape=torch.Size({shape}), device=cpu, dtype=torch.{dtype}, is_shared=False)"
        for name in (first, second)
    ]
    return (
        f"{cls}(\n    fields={{\n" + ",\n".join(rows) + "},\n    batch_size=torch.Size([]),\n    device=None,\n"
        f"    is_shared=False{more})"
    )


def test_001_from_namedtuple() -> None:
    data = TensorDict({"a_tensor": torch.zeros(3), "nested": {"a_tensor": torch.zeros(3), "a_string": "zero!"}}, [3])
    nt = data.to_namedtuple()
    assert repr(nt) == (
        "GenericDict(a_tensor=tensor([0., 0., 0.]), nested=GenericDict(a_tensor=tensor([0., 0., 0.]), "
        "a_string='zero!'))"
    )
    expected = """\
TensorDict(
    fields={
        a_tensor: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False),
        nested: TensorDict(
            fields={
                a_string: NonTensorData(data=zero!, batch_size=torch.Size([3]), device=None),
                a_tensor: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([3]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([3]),
    device=None,
    is_shared=False)"""
    assert repr(TensorDict.from_namedtuple(nt, auto_batch_size=True)) == expected


def test_001_from_pytree() -> None:
    class WeirdLookingClass:
        pass

    weird_key = WeirdLookingClass()
    pytree = (
        [torch.randint(10, (3,)), torch.zeros(2)],
        {
            "tensor": torch.randn(2),
            "td": TensorDict({"one": 1}),
            weird_key: torch.randint(10, (2,)),
            "list": [1, 2, 3],
        },
        {"named_tuple": TensorDict({"two": torch.ones(1) * 2}).to_namedtuple()},
    )
    td = TensorDict.from_pytree(pytree)
    pytree_recon: Any = td.to_pytree()
    checked = []

    def check(v1: Any, v2: Any) -> None:
        checked.append(v1)
        assert (v1 == v2).all() if isinstance(v2, (torch.Tensor, TensorDict)) else v1 == v2

    torch.utils._pytree.tree_map(check, pytree, pytree_recon)
    assert len(checked) == 9
    assert weird_key in pytree_recon[1]


def test_001_from_struct_array() -> None:
    x = np.array(
        [("Rex", 9, 81.0), ("Fido", 3, 27.0)],
        dtype=[("name", "U10"), ("age", "i4"), ("weight", "f4")],
    )
    td = TensorDict.from_struct_array(x)
    x_recon = td.to_struct_array()
    assert (x_recon == x).all()
    assert x_recon.shape == x.shape
    # Try modifying x age field and check effect on td
    x["age"] += 1
    assert (td["age"] == torch.from_numpy(np.array([10, 4]))).all()


def test_001_from_tuple() -> None:
    my_tuple = (1, 2, 3)
    td = TensorDict.from_tuple(my_tuple)
    rows = [
        f"        {i}: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False)" for i in range(3)
    ]
    assert str(td) == (
        "TensorDict(\n    fields={\n" + ",\n".join(rows) + "},\n    batch_size=torch.Size([]),\n    device=None,\n"
        "    is_shared=False)"
    )


def test_001_fromkeys_and_state_dict() -> None:
    td = TensorDict.fromkeys(["a", ("b", "c")], 1)
    assert td["b", "c"] == 1
    score = ScoreData(torch.ones(2), None, torch.zeros(2), None, batch_size=[2])
    state = score.state_dict()
    other = ScoreData(torch.zeros(2), None, torch.ones(2), None, batch_size=[2])
    other.load_state_dict(state)
    assert (other == score).all()
    assert set(score.state_dict(flatten=True)) >= {"prompt_level_strict_acc", "prompt_level_loose_acc"}


def test_001_memmap_like(tmp_path: pathlib.Path) -> None:
    # The document's million images; expand does not allocate new memory, nor does the sparse file.
    td = TensorDict(
        {"a": torch.zeros((3, 64, 64), dtype=torch.uint8), "b": torch.zeros(1, dtype=torch.int64)}, batch_size=[]
    ).expand(1_000)
    buffer = td.memmap_like(tmp_path)
    assert buffer.batch_size == (1_000,) and isinstance(buffer["a"], MemmapTensor) and not buffer["a"][7].any()


@pytest.mark.parametrize("method", ["memmap", "memmap_", "memmap_like", "save", "dumps"])
def test_001_tensorclasses_on_disk(tmp_path: pathlib.Path, method: str) -> None:
    score = ScoreData(torch.arange(2.0), None, torch.ones(2), None, batch_size=[2])
    getattr(score, method)(tmp_path)
    for load in (ScoreData.load_memmap, ScoreData.load, TensorDict.load_memmap):
        loaded = load(tmp_path)
        assert type(loaded) is ScoreData and loaded.inst_level_loose_acc is None and loaded.batch_size == (2,)
        assert loaded.prompt_level_strict_acc.tolist() == ([0, 0] if method == "memmap_like" else [0, 1])
    into = ScoreData(torch.zeros(2), None, torch.zeros(2), None, batch_size=[2])
    if method != "memmap_like":
        assert into.load_memmap_(tmp_path) is into and into.prompt_level_strict_acc[1] == 1
    assert ScoreData.load_memmap(tmp_path, device="meta").prompt_level_strict_acc.is_meta
    refreshed = ScoreData.load_memmap(tmp_path)
    assert refreshed.memmap_refresh_() is refreshed


def test_001_cannot_exist_yet(tmp_path: pathlib.Path) -> None:
    """`existsok`: if `False`, an exception will be raised if a tensor already exists in the same path."""
    td = TensorDict(a=torch.zeros(2))
    td.memmap(tmp_path, existsok=False)
    with pytest.raises(RuntimeError, match="a"):
        td.memmap(tmp_path, existsok=False)


def test_001_memmap_returns_a_future(tmp_path: pathlib.Path) -> None:
    future = TensorDict(a=torch.ones(2)).memmap(tmp_path, num_threads=2, return_early=True)
    assert future.result()["a"].tolist() == [1, 1]


@tensorclass
class MyClass:
    x: torch.Tensor
    y: Optional[MyClass] = None  # noqa: UP045 (as the document writes it)


def test_003_tensorclass_in_memory_maps() -> None:
    def made() -> Any:
        inner = MyClass(x=torch.randn(3), batch_size=[])  # type: ignore[call-arg]
        return MyClass(x=torch.randn(3), y=inner, batch_size=[])  # type: ignore[call-arg]

    tc = made()
    tc.memmap_()
    assert isinstance(tc.y.x, MemmapTensor)
    tc_dest = made()
    tc_dest.memmap_()
    assert isinstance(tc_dest.y.x, MemmapTensor)
    tc_dest.update_(tc)
    assert (tc_dest == tc).all()
    assert tc_dest.y.batch_size == tc.y.batch_size
    assert isinstance(tc_dest.y.x, MemmapTensor)


def test_003_metadata() -> None:
    @tensorclass
    class WithText:
        data: torch.Tensor
        metadata: str

    tc: Any = WithText(torch.randn(3), metadata="some text", batch_size=[])  # type: ignore[call-arg]
    data = TensorDict({"tensorclass": tc}, [])
    assert data["tensorclass"].metadata == "some text" and type(data["tensorclass"]) is WithText


def test_003_tensorclass_in_a_directory() -> None:
    @tensorclass
    class MyClass:
        data: torch.Tensor
        metadata: str

    td_list = [TensorDict({"item": i}, batch_size=[]) for i in range(4)]
    tc: Any = MyClass(torch.randn(3), metadata="some text", batch_size=[])  # type: ignore[call-arg]
    data = TensorDict({"td_list": torch.stack(td_list), "tensorclass": tc}, [])
    with tempfile.TemporaryDirectory() as tempdir:
        data.memmap_(tempdir)
        loaded_data = TensorDictBase.load_memmap(tempdir)
        assert (loaded_data == data).all()
        assert loaded_data["tensorclass"].metadata == "some text"
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print_directory_tree(tempdir)
        # The document's stack is a lazy one, which makes a folder of every member; values have a folder by now.
        expected = """\
    td_list/
        item.memmap
        meta.json
    tensorclass/
        _tensordict/
            metadata/
                meta.json
            data.memmap
            meta.json
        meta.json
    meta.json
"""
        assert text.getvalue().partition("/\n")[2] == expected


def test_003_lazy_stack_in_a_directory(tmp_path: pathlib.Path) -> None:
    td_list = [TensorDict({"item": i}, batch_size=[]) for i in range(4)]
    data = TensorDict({"td_list": lazy_stack(td_list)}, [])
    data.memmap_(tmp_path)
    folders = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("item.memmap")}
    assert folders == {f"td_list/{i}/item.memmap" for i in range(4)}
    assert (TensorDict.load_memmap(tmp_path) == data).all()


def test_003_a_dataset_allocated_in_advance(tmp_path: pathlib.Path) -> None:
    def make_datum() -> TensorDict:
        return TensorDict({"image": torch.randint(255, (3, 64, 64)), "label": 0}, batch_size=[])

    dataset_size = 1_000
    data = make_datum().expand(dataset_size)
    data_disk = data.memmap_like(tmp_path)
    del data
    assert data_disk["image"].shape == (dataset_size, 3, 64, 64) and data_disk["label"].shape == (dataset_size,)
    data_disk[3] = make_datum()
    assert TensorDict.load_memmap(tmp_path)[3]["image"].any()


def test_003_existing_memory_maps() -> None:
    td = TensorDict({"a": 1}, [])
    td0 = td.memmap()
    td1 = td0.memmap()
    assert td0["a"] is td1["a"]
    with tempfile.TemporaryDirectory() as tmpdir_0:
        td0 = td.memmap(tmpdir_0)
        td0 = td.memmap(tmpdir_0)  # works, results are just overwritten
        with tempfile.TemporaryDirectory() as tmpdir_1:
            td0.memmap(tmpdir_1, copy_existing=True)
            td_load = TensorDict.load_memmap(tmpdir_1)  # works!
            assert (td_load == td).all()
        with tempfile.TemporaryDirectory() as tmpdir_1:
            with pytest.raises(RuntimeError, match="copy_existing"):
                td0.memmap(tmpdir_1)
            with pytest.raises(OSError, match="meta.json"):
                TensorDict.load_memmap(tmpdir_1)  # breaks!


def test_003_torchsnapshot_in_memory(tmp_path: pathlib.Path) -> None:
    torchsnapshot = pytest.importorskip("torchsnapshot")
    tensordict_source = TensorDict({"a": torch.randn(3), "b": {"c": torch.randn(3)}}, [])
    path = str(tmp_path / "snapshot")
    torchsnapshot.Snapshot.take(app_state={"state": tensordict_source}, path=path)
    # later
    snapshot = torchsnapshot.Snapshot(path=path)
    tensordict2 = TensorDict()
    snapshot.restore(app_state={"state": tensordict2})
    assert (tensordict_source == tensordict2).all()


def test_003_torchsnapshot_in_place(tmp_path: pathlib.Path) -> None:
    torchsnapshot = pytest.importorskip("torchsnapshot")
    td = TensorDict({"a": torch.randn(3), "b": TensorDict({"c": torch.randn(3, 1)}, [3, 1])}, [3])
    td.memmap_()
    assert isinstance(td["b", "c"], MemmapTensor)
    app_state = {"state": torchsnapshot.StateDict(tensordict=td.state_dict(keep_vars=True))}
    snapshot = torchsnapshot.Snapshot.take(app_state=app_state, path=str(tmp_path / "snapshot"))

    td_dest = TensorDict({"a": torch.zeros(3), "b": TensorDict({"c": torch.zeros(3, 1)}, [3, 1])}, [3])
    td_dest.memmap_()
    assert isinstance(td_dest["b", "c"], MemmapTensor)
    app_state = {"state": torchsnapshot.StateDict(tensordict=td_dest.state_dict(keep_vars=True))}
    snapshot.restore(app_state=app_state)
    # sanity check
    assert (td_dest == td).all()
    assert td_dest["b"].batch_size == td["b"].batch_size
    assert isinstance(td_dest["b", "c"], MemmapTensor)


def test_003_torchsnapshot_of_a_tensorclass(tmp_path: pathlib.Path) -> None:
    torchsnapshot = pytest.importorskip("torchsnapshot")

    def made() -> Any:
        inner = MyClass(x=torch.randn(3), batch_size=[])  # type: ignore[call-arg]
        return MyClass(x=torch.randn(3), y=inner, batch_size=[])  # type: ignore[call-arg]

    tc = made()
    tc.memmap_()
    assert isinstance(tc.y.x, MemmapTensor)
    app_state = {"state": torchsnapshot.StateDict(tensordict=tc.state_dict(keep_vars=True))}
    snapshot = torchsnapshot.Snapshot.take(app_state=app_state, path=str(tmp_path / "snapshot"))

    tc_dest = made()
    tc_dest.memmap_()
    assert isinstance(tc_dest.y.x, MemmapTensor)
    app_state = {"state": torchsnapshot.StateDict(tensordict=tc_dest.state_dict(keep_vars=True))}
    snapshot.restore(app_state=app_state)

    assert (tc_dest == tc).all()
    assert tc_dest.y.batch_size == tc.y.batch_size
    assert isinstance(tc_dest.y.x, MemmapTensor)
