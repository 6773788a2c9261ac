"""The examples of seeds/000 to 004 as written, typos aside; what they print is compared exactly."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any, Optional

import pytest
import torch

from tensordict import MemmapTensor, MemoryMappedTensor, TensorClass, TensorDict, load_memmap
from tensordict.prototype import tensorclass


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
    """What seeds/002 prints, with the devices of the place."""
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
    """The document's metadata files are those of an older format; format/FORMAT.md names today's."""
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
