"""MemoryMappedTensor: construction, indexing, pickling, and use from other processes."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from tensordict import MemmapTensor, MemoryMappedTensor, TensorDict
from tensordict.core.exceptions import SaveError
from tensordict.memory import system

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.complex128,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
]


def example(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose bytes are all different enough to notice a mix-up."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64) % (2 if dtype is torch.bool else 97)
    return raw.to(torch.uint8).view(dtype).view(shape)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


@pytest.fixture(params=["file", "anonymous"])
def filename(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str | None:
    return str(tmp_path / "x.memmap") if request.param == "file" else None


def test_old_name() -> None:
    assert MemmapTensor is MemoryMappedTensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_from_tensor_keeps_every_dtype(dtype: torch.dtype, filename: str | None) -> None:
    source = example(dtype, 3, 4)
    mapped = MemoryMappedTensor.from_tensor(source, filename=filename)
    assert type(mapped) is MemoryMappedTensor
    assert mapped.shape == source.shape
    assert same_bytes(mapped, source)
    if filename is not None:
        assert mapped.filename == filename
        assert pathlib.Path(filename).read_bytes() == source.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3).expand(4, 3),
        torch.arange(12)[::3],
        torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj(),
        torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj().imag,
        torch.zeros(0, 3),
        torch.tensor(3),
    ],
    ids=["transposed", "expanded", "strided", "conjugated", "negative-bit", "empty", "scalar"],
)
def test_from_tensor_of_any_layout(source: torch.Tensor, filename: str | None) -> None:
    mapped = MemoryMappedTensor.from_tensor(source, filename=filename)
    assert torch.equal(mapped, source)
    assert mapped.is_contiguous()


def test_large_layouts_are_written_in_slabs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensordict.memory.files.SLAB", 64)
    monkeypatch.setattr("tensordict.memory.files.CHUNK", 48)
    for source in (torch.arange(600).view(5, 4, 30).transpose(0, 2), torch.arange(100).expand(3, 100)):
        path = tmp_path / str(source.dim())
        assert torch.equal(MemoryMappedTensor.from_tensor(source, filename=path), source)
        assert torch.equal(MemoryMappedTensor.from_tensor(source.contiguous()), source)


def test_factories(filename: str | None, tmp_path: pathlib.Path) -> None:
    made = MemoryMappedTensor.empty(2, 3, dtype=torch.int16, filename=filename)
    assert (made.shape, made.dtype) == ((2, 3), torch.int16)
    assert not made.any()
    assert MemoryMappedTensor.zeros((2,)).tolist() == [0, 0]
    assert MemoryMappedTensor.zeros(torch.Size([])).shape == ()
    assert MemoryMappedTensor.ones(shape=(2,), dtype=torch.bool).tolist() == [True, True]
    assert MemoryMappedTensor.full(2, fill_value=3).dtype is torch.int64
    assert MemoryMappedTensor.full((2,), 2.5, filename=tmp_path / "full").tolist() == [2.5, 2.5]
    like = torch.zeros(3, dtype=torch.bfloat16)
    for name in ("empty_like", "zeros_like", "ones_like"):
        result = getattr(MemoryMappedTensor, name)(like, filename=tmp_path / name)
        assert (result.shape, result.dtype, result.sum().item()) == ((3,), like.dtype, 3 * (name == "ones_like"))
    assert MemoryMappedTensor.full_like(like, 2).tolist() == [2, 2, 2]
    assert MemoryMappedTensor(torch.ones(2), filename=tmp_path / "new").filename == str(tmp_path / "new")


def test_factories_refuse_nonsense() -> None:
    with pytest.raises(TypeError, match="no shape"):
        MemoryMappedTensor.empty()
    with pytest.raises(TypeError, match="fill_value"):
        MemoryMappedTensor.full(2, 3, 4)
    with pytest.raises(TypeError, match="existok"):
        MemoryMappedTensor.empty(2, existok=True)
    with pytest.raises(RuntimeError, match="live on the CPU"):
        MemoryMappedTensor.empty(2, device="meta")
    with pytest.raises(TypeError, match=r"torch\.as_tensor"):
        MemoryMappedTensor.from_tensor(np.ones(2))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="detach"):
        MemoryMappedTensor.from_tensor(torch.ones(2, requires_grad=True))
    with pytest.raises(NotImplementedError, match="sparse"):
        MemoryMappedTensor.from_tensor(torch.eye(2).to_sparse())


def test_from_tensor_shape_and_copy_data() -> None:
    assert MemoryMappedTensor.from_tensor(torch.ones(1), shape=(3,)).tolist() == [1, 1, 1]
    assert MemoryMappedTensor.from_tensor(torch.ones(3), copy_data=False).tolist() == [0, 0, 0]
    assert MemoryMappedTensor.from_tensor(torch.ones(3), copy_data=False, shape=(2,)).tolist() == [0, 0]


def test_existing_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    old = MemoryMappedTensor.from_tensor(torch.zeros(1000), filename=path)
    for make in (MemoryMappedTensor.from_tensor, MemoryMappedTensor.empty_like):
        with pytest.raises(RuntimeError, match=str(path)):
            make(torch.ones(2), filename=path)
    new = MemoryMappedTensor.from_tensor(torch.ones(2), filename=path, existsok=True)
    assert os.listdir(tmp_path) == ["x"]
    assert path.stat().st_size == 8
    # The longer file that `old` maps is still whole: no access past an end that has moved.
    assert (old.sum().item(), new.tolist()) == (0, [1, 1])
    assert new.filename == str(path)


def test_memory_mapped_input(tmp_path: pathlib.Path) -> None:
    first = MemoryMappedTensor.from_tensor(torch.ones(2), filename=tmp_path / "a")
    assert MemoryMappedTensor.from_tensor(first) is first
    assert MemoryMappedTensor.from_tensor(first, filename=tmp_path / "a") is first
    with pytest.raises(RuntimeError, match="copy_existing=True"):
        MemoryMappedTensor.from_tensor(first, filename=tmp_path / "b")
    second = MemoryMappedTensor.from_tensor(first, filename=tmp_path / "b", copy_existing=True)
    second.zero_()
    assert first.tolist() == [1, 1]


def test_filename_of_anonymous() -> None:
    with pytest.raises(RuntimeError, match="anonymous"):
        _ = MemoryMappedTensor.from_tensor(torch.ones(2)).filename


def test_relative_filename_is_made_absolute(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert MemoryMappedTensor.from_tensor(torch.ones(2), filename="x").filename == str(tmp_path / "x")


def test_operations_give_plain_tensors(filename: str | None) -> None:
    mapped = MemoryMappedTensor.from_tensor(torch.arange(6.0).view(2, 3), filename=filename)
    for result in (mapped + 1, mapped.clone(), torch.stack([mapped, mapped]), mapped.view(-1), mapped == mapped):
        assert type(result) is torch.Tensor
    assert repr(mapped.contiguous()) == "MemoryMappedTensor([[0., 1., 2.],\n                    [3., 4., 5.]])"


@pytest.mark.parametrize("index", [0, (1, 2), slice(1), ..., None, (slice(None), 1), (slice(None, None, 2),)], ids=repr)
def test_view_index_maps_the_same_memory(index: Any, filename: str | None) -> None:
    source = torch.arange(6.0).view(2, 3)
    mapped = MemoryMappedTensor.from_tensor(source, filename=filename)
    part = mapped[index]
    assert type(part) is MemoryMappedTensor
    assert torch.equal(part, source[index])
    assert part.untyped_storage().data_ptr() == mapped.untyped_storage().data_ptr()
    if filename is not None:
        assert part.filename == filename
    part.fill_(9)
    source[index] = 9
    assert torch.equal(mapped, source)
    if filename is not None:
        assert pathlib.Path(filename).read_bytes() == source.numpy().tobytes()


@pytest.mark.parametrize(
    "index", [[0, 1], torch.tensor([0]), torch.tensor([True, False]), (0, [1, 2]), np.array([0])], ids=repr
)
def test_copy_index_gives_a_plain_tensor(index: Any, filename: str | None) -> None:
    source = torch.arange(6.0).view(2, 3)
    part = MemoryMappedTensor.from_tensor(source, filename=filename)[index]
    assert type(part) is torch.Tensor
    assert torch.equal(part, source[index])


part = st.one_of(
    st.integers(-2, 1),
    st.slices(2),
    st.none(),
    st.just(...),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
    st.lists(st.integers(0, 1), min_size=1, max_size=3).map(torch.tensor),
    st.booleans(),
)


@given(st.lists(part, max_size=4).map(tuple))
def test_only_shared_memory_is_called_memory_mapped(index: tuple[Any, ...]) -> None:
    mapped = MemoryMappedTensor.from_tensor(torch.arange(16.0).view(2, 2, 2, 2))
    try:
        result = mapped[index]
    except (IndexError, ValueError):
        return
    shares = result.untyped_storage().data_ptr() == mapped.untyped_storage().data_ptr()
    assert (type(result) is MemoryMappedTensor) == shares or not result.numel()


def test_from_filename(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    MemoryMappedTensor.from_tensor(torch.arange(6), filename=path)
    assert MemoryMappedTensor.from_filename(path, torch.int64, (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert MemoryMappedTensor.from_filename(path, torch.int64, [2, 3], 1).tolist() == [3, 4, 5]
    assert MemoryMappedTensor.from_filename(path, torch.int64, (2,)).tolist() == [0, 1]


def test_from_filename_never_creates_nor_grows(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(FileNotFoundError):
        MemoryMappedTensor.from_filename(path, torch.int64, (2,))
    assert not path.exists()
    path.write_bytes(b"1234")
    with pytest.raises(SaveError, match=r"4 bytes.*needs 16"):
        MemoryMappedTensor.from_filename(path, torch.int64, (2,))
    assert path.read_bytes() == b"1234"
    with pytest.raises(SaveError, match="regular"):
        MemoryMappedTensor.from_filename(tmp_path, torch.int64, (2,))


def test_from_storage(tmp_path: pathlib.Path) -> None:
    plain = torch.arange(4.0)
    mapped = MemoryMappedTensor.from_storage(plain.untyped_storage(), dtype=torch.float32, shape=(2, 2))
    mapped[0, 0] = 5
    assert plain[0] == 5
    assert MemoryMappedTensor(plain.untyped_storage(), shape=(4,), dtype=torch.float32).tolist() == plain.tolist()
    with pytest.raises(SaveError, match="16 bytes"):
        MemoryMappedTensor.from_storage(plain.untyped_storage(), dtype=torch.float32, shape=(5,))
    MemoryMappedTensor.from_tensor(plain, filename=tmp_path / "x")
    storage = torch.UntypedStorage.from_file(str(tmp_path / "x"), True, 16)
    named = MemoryMappedTensor.from_storage(storage, filename=tmp_path / "x", index=1)
    assert (named.item(), named.filename) == (1, str(tmp_path / "x"))
    with pytest.raises(RuntimeError, match="maps"):
        MemoryMappedTensor.from_storage(storage, filename=tmp_path / "y")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_empty_nested(filename: str | None) -> None:
    shapes = torch.tensor([[2, 3], [1, 2]])
    nested = MemoryMappedTensor.empty_nested(shapes, dtype=torch.int32, filename=filename)
    assert type(nested) is MemoryMappedTensor
    for value, item in enumerate(nested.unbind()):
        item.fill_(value + 1)
    if filename is not None:
        again = MemoryMappedTensor.from_filename(filename, torch.int32, shapes)
    else:
        again = MemoryMappedTensor.from_handler(nested._handler, torch.int32, shapes)  # type: ignore[arg-type]
    assert [item.tolist() for item in again.unbind()] == [[[1] * 3] * 2, [[2, 2]]]
    assert [x.tolist() for x in pickle.loads(pickle.dumps(nested)).unbind()] == [x.tolist() for x in nested.unbind()]
    with pytest.raises(TypeError, match="items"):
        MemoryMappedTensor.empty_nested(2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pickle(dtype: torch.dtype, filename: str | None) -> None:
    mapped = MemoryMappedTensor.from_tensor(example(dtype, 3, 4), filename=filename)
    for part in (mapped, mapped[1], mapped[:, 2], mapped[1:, ::2]):
        again = pickle.loads(pickle.dumps(part))
        assert type(again) is MemoryMappedTensor
        assert same_bytes(again, part)
        if filename is not None:
            assert again.filename == filename
            assert len(pickle.dumps(part)) < 500


def test_pickle_of_a_file_is_a_reference(tmp_path: pathlib.Path) -> None:
    mapped = MemoryMappedTensor.from_tensor(torch.zeros(10_000), filename=tmp_path / "x")
    data = pickle.dumps(mapped[5:])
    mapped[5] = 3
    again = pickle.loads(data)
    assert again[0] == 3
    again[1] = 4
    assert mapped[6] == 4
    mapped = again = None  # type: ignore[assignment]
    gc.collect()
    (tmp_path / "x").write_bytes(b"too short")
    with pytest.raises(SaveError, match="9 bytes"):
        pickle.loads(data)


def test_copies(filename: str | None) -> None:
    mapped = MemoryMappedTensor.from_tensor(torch.zeros(2), filename=filename)
    deep, shallow = copy.deepcopy(mapped), copy.copy(mapped)
    mapped.fill_(1)
    assert (type(deep), deep.tolist()) == (torch.Tensor, [0, 0])
    assert (type(shallow), shallow.tolist()) == (MemoryMappedTensor, [1, 1])
    both = copy.deepcopy([mapped, mapped])
    assert both[0] is both[1]


def add_one(queue: Any, done: Any, tensor: torch.Tensor | None) -> None:
    """Runs in another process: adds one to the tensor that it gets or receives."""
    if tensor is None:
        tensor = queue.get(timeout=60)
    assert type(tensor) is MemoryMappedTensor
    tensor += 1
    done.set()


@pytest.mark.parametrize("way", ["argument", "queue"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_other_processes_write_the_same_memory(method: str, way: str, filename: str | None) -> None:
    context = mp.get_context(method)
    mapped = MemoryMappedTensor.from_tensor(torch.arange(6.0).view(2, 3), filename=filename)
    queue, done = context.Queue(), context.Event()
    process = context.Process(target=add_one, args=(queue, done, mapped[1] if way == "argument" else None))
    process.start()
    if way == "queue":
        queue.put(mapped[1])
    assert done.wait(60)
    process.join(60)
    assert process.exitcode == 0
    assert mapped.tolist() == [[0, 1, 2], [4, 5, 6]]


def test_handler_survives_its_tensor() -> None:
    mapped = MemoryMappedTensor.from_tensor(torch.arange(3))
    handler = mapped._handler
    assert handler is not None
    again = MemoryMappedTensor.from_handler(handler, torch.int64, (3,))
    descriptor = MemoryMappedTensor.from_handler(os.dup(handler.fd), torch.int64, (3,), index=slice(1, 3))
    mapped[2] = 8
    del mapped, handler
    gc.collect()
    assert (again.tolist(), descriptor.tolist()) == ([0, 1, 8], [1, 8])


def test_descriptors_are_given_back() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    tensors = [MemoryMappedTensor.from_tensor(torch.ones(2)) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) > before
    del tensors
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_full_disk_is_an_error_at_allocation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(system, "reserve", full)
    with pytest.raises(OSError, match=str(tmp_path / "x")) as caught:
        MemoryMappedTensor.empty(1000, filename=tmp_path / "x")
    assert caught.value.errno == errno.ENOSPC
    assert not os.listdir(tmp_path)


def test_numbers_in_mapped_tensors_are_formatted_as_in_others(tmp_path):
    loss = TensorDict(loss=torch.tensor([0.12345])).memmap(tmp_path / "run")["loss"][0]
    assert type(loss) is MemoryMappedTensor and f"{loss:.3f}" == "0.123" and f"{loss}" == str(loss)
    with pytest.raises(TypeError):
        f"{loss.expand(2):.3f}"


@pytest.mark.parametrize("shape", [(4, 3), (), (0, 2)])
def test_parent_shape_is_that_of_the_memory(shape: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    value = torch.zeros(shape)
    for made in (
        MemoryMappedTensor.from_tensor(value),
        MemoryMappedTensor.zeros(shape),
        MemoryMappedTensor.from_tensor(value, filename=tmp_path / "x"),
    ):
        assert made.parent_shape == shape
        if shape == (4, 3):
            assert made[0].parent_shape == made[:2].parent_shape == shape
