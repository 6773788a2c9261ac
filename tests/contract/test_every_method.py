"""Public methods that no other file of this suite calls, and a check that the suite names every one of them."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cases import OF_ONE, TESTS
from contract.kinds import Kind
from contract.model import Plain, as_path, assert_leaf, assert_matches, changed, index_map, leaves, mapped, replaced
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, TensorDict, TensorDictParams
from tensordict.core.exceptions import WorkerTimeoutError

# Methods of several operands and the values that they are tried on; each exists with `_` behind its name, too.
OF_TWO = ["add", "sub", "mul", "div", "pow", "clamp_max", "clamp_min", "maximum", "minimum"]
OF_THREE = ["addcdiv", "addcmul"]
VALUE = 0.37

# Methods that talk to other processes; tests/parallel calls them.
BETWEEN_PROCESSES = {
    "all_gather", "all_reduce", "arecv", "asend", "broadcast", "from_remote_init", "gather_and_stack", "init_remote",
    "irecv", "isend", "recv", "reduce", "scatter", "send",
}  # fmt: skip


@pytest.fixture
def part(td: Any, plain: Plain, kind: Kind) -> Any:
    """The floating point entries of a container of the kind, all of one value; `plain` is made the same."""
    keys = [path for path, leaf in leaves(plain).items() if leaf.is_floating_point()]
    found = td.select(*keys)
    found.zero_().add_(VALUE)
    return found


def floats(plain: Plain) -> Plain:
    """The floating point entries, filled with `VALUE`."""
    found: Plain = {}
    for name, leaf in plain.items():
        if isinstance(leaf, dict):
            found[name] = floats(leaf)
        elif leaf.is_floating_point():
            found[name] = torch.full_like(leaf, VALUE)
    return found


@pytest.mark.parametrize("name", OF_ONE)
def test_functions_of_one_operand(part: Any, plain: Plain, kind: Kind, name: str) -> None:
    expected = mapped(getattr(torch, name), floats(plain))
    assert_matches(getattr(part, name)(), expected, kind.batch_size)
    assert_matches(part, floats(plain), kind.batch_size)
    assert getattr(part, f"{name}_")() is part
    assert_matches(part, expected, kind.batch_size)


@pytest.mark.parametrize("name", OF_TWO)
def test_functions_of_two_operands(part: Any, plain: Plain, kind: Kind, name: str) -> None:
    other = part.mul(0).add(2.5)
    expected = mapped(lambda leaf: getattr(torch, name)(leaf, torch.full_like(leaf, 2.5)), floats(plain))
    assert_matches(getattr(part, name)(other), expected, kind.batch_size)
    assert getattr(part, f"{name}_")(other) is part
    assert_matches(part, expected, kind.batch_size)


@pytest.mark.parametrize("name", OF_THREE)
def test_functions_of_three_operands(part: Any, plain: Plain, kind: Kind, name: str) -> None:
    other = part.mul(0).add(2.5)
    expected = mapped(lambda leaf: getattr(torch, name)(leaf, leaf * 0 + 2.5, leaf * 0 + 2.5, value=2), floats(plain))
    assert_matches(getattr(part, name)(other, other, value=2), expected, kind.batch_size)
    assert getattr(part, f"{name}_")(other, other, value=2) is part
    assert_matches(part, expected, kind.batch_size)


def test_more_operands(part: Any, td: Any, plain: Plain, kind: Kind) -> None:
    ahead = part + 1
    difference = mapped(lambda leaf: (leaf + 1) - leaf, floats(plain))
    assert_matches(part.rsub(ahead), difference, kind.batch_size)
    for name in ("isneginf", "isposinf"):
        assert_matches(getattr(part, name)(), mapped(getattr(torch, name), floats(plain)), kind.batch_size)
    assert part.lerp_(ahead, 0.5) is part
    assert_matches(part, mapped(lambda leaf: leaf.lerp(leaf + 1, 0.5), floats(plain)), kind.batch_size)
    if "mask" in td.keys():
        masks = td.select("mask")
        assert_leaf(masks.bitwise_and(~masks)["mask"], torch.zeros_like(plain["mask"]), "mask")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_casts(td: Any, plain: Plain, kind: Kind) -> None:
    part = td.select("z")
    assert part.complex32()["z"].dtype is torch.complex32
    for name in ("qint8", "quint8", "qint32", "quint4x2"):
        # Torch makes no quantized tensor by a cast alone.
        with pytest.raises(RuntimeError, match="entry 'z'"):
            getattr(part, name)()
    assert_matches(part, {"z": plain["z"]}, kind.batch_size)


def test_packing(td: Any, plain: Plain, kind: Kind) -> None:
    td = td.select(*[path for path, leaf in leaves(plain).items() if leaf.dtype is torch.float32])
    flat, layout = td.pack()
    dims = len(kind.batch_size)
    columns = [leaf[..., None].flatten(dims) for leaf in td.values(True, True, sort=True)]
    assert torch.equal(flat, torch.cat(columns, -1)) and flat.is_contiguous()
    assert layout.keys == tuple(td.keys(True, True, sort=True)) and layout.keys
    back = layout.unpack(flat)
    for key, leaf in td.items(True, True):
        assert torch.equal(back[key], leaf)
        assert back[key].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    again, same = td.pack(layout=layout)
    assert same == layout and hash(same) == hash(layout) and torch.equal(again, flat)


def test_sizes(td: Any, plain: Plain, kind: Kind) -> None:
    elements = leaves(plain).values()
    assert td.bytes() == sum(leaf.numel() * leaf.element_size() for leaf in elements)
    assert td.param_count() == sum(leaf.numel() for leaf in elements)
    attributes = td.select("z").attrs()
    assert not isinstance(attributes["z"], torch.Tensor)


def test_forms_of_the_same_content(td: Any, plain: Plain, kind: Kind) -> None:
    for result in (td.as_tensor(), td.densify(), td.full_tensor(), td.clear_refs_for_compile_()):
        assert_matches(result, plain, kind.batch_size, kind.extra)
    assert td.densify().consolidate().is_consolidated()
    if kind.batch_size:
        lazily = td.to_lazystack(len(kind.batch_size) - 1)
        assert_matches(lazily, plain, kind.batch_size, kind.extra)
        assert td.maybe_dense_stack([td, td]).batch_size == (2, *kind.batch_size)
    deep = td.atleast_3d()
    assert deep.batch_dims == max(3, len(kind.batch_size)) and deep.numel() == td.numel()
    assert_matches(td.to_padded_tensor(), plain, kind.batch_size, kind.extra)


def test_entries_as_one_tensor(td: Any, plain: Plain, kind: Kind) -> None:
    same = td.apply(lambda leaf: leaf.double().flatten(max(len(kind.batch_size) - 1, 0))[..., :1], batch_size=[])
    rows = [leaf.double().flatten(max(len(kind.batch_size) - 1, 0))[..., :1] for leaf in leaves(plain).values()]
    if not kind.stack_dims:
        assert torch.equal(same.stack_from_tensordict(0), torch.stack(rows))
        assert torch.equal(same.cat_from_tensordict(-1), torch.cat(rows, -1))
    plane = TensorDict({"a": torch.ones(2, 3), "c": torch.zeros(2, 3)}, [2])
    assert torch.equal(
        plane.clone().stack_tensors("a", "c", out_key="b", dim=1)["b"], torch.stack([*plane.values()], 1)
    )
    assert torch.equal(plane.clone().cat_tensors("a", "c", out_key="b", dim=1)["b"], torch.cat([*plane.values()], 1))


def test_keys_that_move(writable: Any, plain: Plain, kind: Kind) -> None:
    moved = writable.rename_keys({"a": "renamed"})
    assert "a" in writable.keys() and "a" not in moved.keys()
    assert_leaf(moved["renamed"], plain["a"], "renamed")
    if kind.nested:
        moved = writable.rename_keys({"a": "mask", "mask": ("b", "a"), ("b", "d", "e"): "a", "no": "z"}, strict=False)
        found = {as_path(key) for key in moved.keys(True)}
        # A container that declares its entries stays when it is empty.
        assert found - {("b", "d")} == {("a",), ("b",), ("b", "a"), ("b", "c"), ("mask",), ("z",)}
        for key, path in {"mask": ("a",), ("b", "a"): ("mask",), "a": ("b", "d", "e")}.items():
            assert_leaf(moved[key], leaves(plain)[path], key)
    for mapping in ({"a": "z"}, {"a": "new", "z": ("new", "one")}, {"a": "new", "z": "new"}, {"a": ("z", "new")}):
        with pytest.raises(ValueError, match="rename_keys"):
            writable.rename_keys(mapping)
    with pytest.raises(KeyError, match="newer"):
        writable.rename_keys({"newer": "new"})
    assert list(writable.rename_keys({"newer": "new"}, strict=False).keys()) == list(writable.keys())
    taken = writable.separates("z")
    assert "z" not in writable.keys()
    assert_leaf(taken["z"], plain.pop("z"), "z")
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_values(writable: Any, plain: Plain, kind: Kind) -> None:
    if kind.is_module:
        pytest.skip("the entries of a module are tensors")
    if not kind.holds_values:
        with pytest.raises(NotImplementedError, match="'new' is a value"):
            writable.set_non_tensor("new", "text")
        return
    writable.set_non_tensor("new", "text")
    # A lazy stack has one for every member.
    assert np.unique(np.array(writable.get_non_tensor("new"))).tolist() == ["text"]
    assert_leaf(writable.get_non_tensor("a"), plain["a"], "a")
    assert writable.get_non_tensor("none", 3) == 3


def test_copying_to_a_part(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("there is no part of a batch without dims")
    values = mapped(changed, mapped(lambda leaf: leaf[:1], plain))
    td.copy_at_(TensorDict(values, (1, *kind.batch_size[1:])), slice(0, 1))
    expected = replaced(plain, kind.batch_size, index_map(kind.batch_size)[:1], values)
    assert_matches(td, expected, kind.batch_size, kind.extra)


def test_new_tensors(td: Any, plain: Plain, kind: Kind) -> None:
    made = td.new_tensor(TensorDict(mapped(torch.zeros_like, plain), kind.batch_size))
    assert_matches(made, mapped(torch.zeros_like, plain), kind.batch_size)


def test_gradients_are_dropped(td: Any, plain: Plain, kind: Kind) -> None:
    part = td.select("z").apply(lambda leaf: leaf.detach().clone().requires_grad_())
    part.sum(reduce=True).backward()
    assert part.grad is not None
    assert part.zero_grad() is part
    assert part.grad is None


def test_memory_for_other_devices(writable: Any) -> None:
    """Without an accelerator torch has neither pinned memory nor streams: nothing may change."""
    if torch.cuda.is_available():
        pytest.skip("what they do is tested with a GPU")
    before = [leaf.clone() for leaf in writable.values(True, True)]
    with pytest.raises(RuntimeError):
        writable.pin_memory_()
    after = list(writable.values(True, True))
    assert all(map(torch.equal, before, after))


@pytest.mark.gpu
def test_streams(td: Any, plain: Plain, kind: Kind) -> None:
    moved = td.to("cuda")
    assert moved.record_stream(torch.cuda.Stream()) is moved
    assert_matches(moved.cpu(), plain, kind.batch_size, kind.extra)


def test_from_other_structures(td: Any, plain: Plain, kind: Kind) -> None:
    dense = td.densify()
    assert_matches(TensorDict.from_any(plain), plain)
    entries = TensorDict(mapped(torch.clone, plain), kind.batch_size)
    assert_matches(TensorDict.from_namedtuple(entries.to_namedtuple(), batch_size=kind.batch_size), plain)
    again = TensorDict.from_pytree(plain).to_pytree()
    assert again.keys() == plain.keys() and torch.equal(again["a"], plain["a"])
    rows = TensorDict.from_struct_array(td.select("a", "z").to_struct_array())
    assert_matches(rows, {"a": plain["a"], "z": plain["z"]}, kind.batch_size)
    again = td.from_dict_instance(mapped(torch.clone, plain), batch_size=kind.batch_size)
    assert_matches(again, plain, kind.batch_size)
    schema = {name: (leaf.shape[len(kind.batch_size) :], leaf.dtype) for name, leaf in flat(plain)}
    zeros = TensorDict.from_schema(schema, batch_size=kind.batch_size)
    assert_matches(zeros, {name: torch.zeros_like(leaf) for name, leaf in flat(plain)}, kind.batch_size)
    if kind.batch_size:
        listed = TensorDict.from_list(dense.unbind(0))
        assert_matches(listed, plain, kind.batch_size)
    fields = [(name, torch.Tensor) for name, _ in flat(plain)]
    record = dataclasses.make_dataclass("Record", fields)(**dict(flat(plain)))
    assert_matches(TensorDict.from_dataclass(record, batch_size=kind.batch_size), dict(flat(plain)), kind.batch_size)
    assert_matches(TensorDict.from_tuple((plain["a"], plain["z"])), {"0": plain["a"], "1": plain["z"]})
    struct = np.zeros((), dtype=[("a", np.int64)])
    assert TensorDict.from_struct_array(struct)["a"].shape == ()


def flat(plain: Plain) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries of the first level that are tensors."""
    return ((name, leaf) for name, leaf in plain.items() if isinstance(leaf, torch.Tensor))


def test_saves_that_are_read_into_a_container(td: Any, plain: Plain, kind: Kind, tmp_path: pathlib.Path) -> None:
    td.densify().to_tensordict().memmap(tmp_path / "folder")
    for name in ("load_memmap_", "load_"):
        target = TensorDict({"other": torch.zeros(kind.batch_size)}, kind.batch_size, device=td.device, names=td.names)
        assert getattr(target, name)(tmp_path / "folder") is target
        assert_matches(target, plain, kind.batch_size, kind.extra)
    td.densify().consolidate(tmp_path / "file")
    assert_matches(TensorDict.from_consolidated(tmp_path / "file"), plain, kind.batch_size, kind.extra)


def test_entries_of_a_folder(td: Any, plain: Plain, kind: Kind, tmp_path: pathlib.Path) -> None:
    saved = td.densify().memmap(tmp_path / "folder", copy_existing=True)
    saved.make_memmap("new", kind.batch_size, dtype=torch.float32)
    saved.make_memmap_from_tensor("newer", torch.ones(kind.batch_size))
    file = pathlib.Path(saved["newer"].filename).with_name("top.memmap")
    storage = MemoryMappedTensor.from_tensor(torch.full(kind.batch_size, 2.0), filename=file).untyped_storage()
    saved.make_memmap_from_storage("top", storage, kind.batch_size, dtype=torch.float32)
    added = {"new": 0.0, "newer": 1.0, "top": 2.0}
    expected = {**plain, **{name: torch.full(kind.batch_size, value) for name, value in added.items()}}
    assert_matches(saved, expected, kind.batch_size, kind.extra)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ragged_entries_of_a_folder(td: Any, kind: Kind, tmp_path: pathlib.Path) -> None:
    saved = td.densify().memmap(tmp_path / "folder", copy_existing=True)
    rest = kind.batch_size[1:] if kind.batch_size else torch.Size()
    count = kind.batch_size[0] if kind.batch_size else 2
    table = torch.tensor([[*rest, n + 1, 2] for n in range(count)])
    made = [saved.make_memmap(("new2", "deep"), table, dtype=torch.int32)]
    rows = [torch.full(shape, float(n)) for n, shape in enumerate(table.tolist())]
    made.append(saved.make_memmap_from_tensor("new0", torch.nested.nested_tensor(rows)))
    storage = torch.cat([row.flatten() for row in rows]).untyped_storage()
    made.append(saved.make_memmap_from_storage("new1", storage, table, dtype=torch.float32))
    table.zero_()
    for found in (saved, TensorDict.load_memmap(tmp_path / "folder")):
        for key, leaf in zip([("new2", "deep"), "new0", "new1"], made, strict=True):
            assert type(found.get(key)) is MemoryMappedTensor and found.get(key).filename == leaf.filename
            for row, expected in zip(found.get(key).unbind(), rows, strict=True):
                assert torch.equal(row, expected.int() * 0 if key == ("new2", "deep") else expected)
    saved["new2", "deep"].unbind()[-1].fill_(7)
    assert all(row.eq(7).all() for row in TensorDict.load_memmap(tmp_path / "folder")["new2", "deep"].unbind()[-1:])


def test_modules(td: Any) -> None:
    layer = nn.Linear(2, 3)
    held = TensorDict.from_module(layer)
    assert set(held.keys()) == {"weight", "bias"}
    with held.data.mul(0).to_module(layer):
        assert not layer(torch.ones(2)).any()
    assert layer(torch.ones(2)).any()
    several = TensorDict.from_modules(layer, nn.Linear(2, 3))
    assert several.batch_size == (2,) and isinstance(TensorDict.from_modules(layer, as_module=True), TensorDictParams)
    assert isinstance(TensorDict.from_modules(layer, nn.Linear(2, 3), lazy_stack=True), LazyStackedTensorDict)


def wait(chunk: Any) -> None:
    time.sleep(600)


def test_map_with_a_timeout(td: Any, kind: Kind) -> None:
    if not kind.batch_size:
        with pytest.raises(IndexError):
            td.map(wait, timeout=0.1)
        return
    for call in (td.map, lambda *args, **options: list(td.map_iter(*args, **options))):
        with pytest.raises(WorkerTimeoutError, match=r"chunk 0 \(elements 0 to .*timeout=0.1 seconds"):
            call(wait, num_workers=1, mp_start_method="fork", timeout=0.1)


def test_map_iter(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        with pytest.raises(IndexError):
            next(td.map_iter(torch.clone, num_workers=1))
        return
    # Forked, since a file that is open for writing is opened by no other process.
    pieces = list(td.map_iter(torch.clone, num_workers=1, chunksize=1, mp_start_method="fork", timeout=600))
    assert len(pieces) == kind.batch_size[0]
    assert_matches(torch.cat([piece.densify() for piece in pieces]), plain, kind.batch_size, kind.extra)


def test_the_suite_names_every_public_method() -> None:
    text = "\n".join(path.read_text() for path in pathlib.Path(__file__).parent.glob("*.py"))
    words = set(re.findall(r"\w+", text))
    # Names that are written in `cases` and tested here.
    words |= {*OF_ONE, *TESTS}
    words |= {f"{name}_" for name in (*OF_ONE, *OF_TWO, *OF_THREE)}
    public = {name for name in dir(TensorDict) if not name.startswith("_")}
    assert sorted(public - words) == []


# --- the names of arguments -------------------------------------------------------------------------------------------


def test_an_index_has_two_names(writable: Any, plain: Plain, kind: Kind) -> None:
    """The reference calls the index `idx` in some containers, and `index` in others."""
    if not kind.batch_size or kind.is_module:
        pytest.skip("needs elements that can be written to")
    value = changed(plain["z"][0])
    part = {"z": value}
    for write in (
        lambda td: td.set_at_("z", value, 0, False),
        lambda td: td.set_at_("z", value, index=0, non_blocking=False),
        lambda td: td.set_at_("z", value, idx=0),
        lambda td: td.update_at_(part, 0, False),
        lambda td: td.update_at_(part, idx=0),
        lambda td: td.update_at_(part, index=0),
    ):
        target = writable.clone()
        assert write(target) is target
        assert_leaf(target["z"][0], value, "z")
    for found in (writable.get_at("z", 0), writable.get_at("z", index=0), writable.get_at("z", idx=0)):
        assert_leaf(found, plain["z"][0], "z")
    assert writable.get_at("none", 0, None) is writable.get_at("none", idx=0, default=None) is None
    with pytest.raises(TypeError, match="get_at.. takes one of the arguments index, idx, got none"):
        writable.get_at("z")
    with pytest.raises(TypeError, match="set_at_.. takes one of the arguments index, idx, got index, idx"):
        writable.set_at_("z", value, 0, idx=0)


def test_arguments_by_position_and_by_keyword(writable: Any, plain: Plain, kind: Kind) -> None:
    same = writable.clone()
    for source in (writable.copy_(same), writable.copy_(src=same), writable.copy_(tensordict=same)):
        assert source is writable
    with pytest.raises(TypeError, match="copy_"):
        writable.copy_()
    if not kind.is_module:
        assert_matches(writable.set("z", plain["z"], False, True), plain, kind.batch_size, kind.extra)
    stack = type(writable).maybe_dense_stack
    for result in (stack(items=[same, same]), stack([same, same], 0, None), stack([same, same], 0, None, False)):
        assert result.batch_size == (2, *kind.batch_size)
    assert len(writable.empty(names=None).names) == writable.ndim
    assert not any(writable.empty(names=None).names) and writable.empty().names == writable.names


def test_expand_in_place(writable: Any, plain: Plain, kind: Kind) -> None:
    if kind.is_module or not kind.in_memory or (not kind.resizes and not kind.stack_dims):
        pytest.skip("needs leaves that can be exchanged")
    size = (2, *kind.batch_size)
    if kind.stacked_at:
        with pytest.raises(NotImplementedError, match="lazy stack"):
            writable.expand(size, inplace=True)
        return
    expected = writable.expand(size)
    target = writable.clone()
    assert target.expand(*size, inplace=True) is target and target.batch_size == size
    for path, leaf in leaves(plain).items():
        assert_leaf(target[path], leaf.expand(2, *leaf.shape), path)
    assert target.names == expected.names and type(target) is type(writable.clone())
    with pytest.raises(RuntimeError, match="locked"):
        target.lock_().expand(3, *size, inplace=True)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_choosing_rows(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        for call in (td.head, lambda: td.sample(0), lambda: td.filter(len), lambda: td.sort_by("z")):
            with pytest.raises(RuntimeError, match="no batch dims"):
                call()
        return
    rows, *rest = kind.batch_size

    def assert_rows(result: Any, at: Any) -> None:
        expected = mapped(lambda leaf: leaf[at], plain)
        assert_matches(result, expected, (len(torch.arange(rows)[at]), *rest), kind.extra)
        assert isinstance(result, type(td)) is isinstance(td[[0]], type(td)) or not kind.gives_own_class

    def measure(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.double().flatten(1).sum(1) if leaf.ndim > 1 else leaf.double()

    sums = measure(plain["a"])
    assert_rows(td.head(2), slice(0, 2))
    assert_rows(td.filter(lambda part: measure(part.get("a")) > sums.median()), sums > sums.median())
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
    assert_rows(td.sample(2, generator=torch.Generator().manual_seed(3)), order[:2])
    flat = [path for path, leaf in leaves(plain).items() if leaf.numel() == rows and not leaf.is_complex()]
    for path in flat:
        leaf = leaves(plain)[path].reshape(rows)
        assert_rows(td.sort_by(path), leaf.argsort(stable=True))
        assert_rows(td.sort_by(path, descending=True), leaf.argsort(stable=True, descending=True))


def test_closeness_and_values(td: Any, writable: Any, plain: Plain, kind: Kind) -> None:
    assert td.allclose(td.clone()) is True and torch.allclose(td, td.clone())
    far = td.clone()
    far.set_("a", far["a"] + 5)
    assert td.allclose(far) is False and td.allclose(far, atol=6) is True
    with pytest.raises(KeyError, match="mask"):
        td.allclose(td.exclude("mask"))
    with pytest.raises(TypeError, match="where_value compares values"):
        td.where_value("a", "x")
    if kind.holds_values and kind.any_names:
        writable["text"] = "x"
        assert torch.equal(writable.where_value("text", "x"), torch.ones(kind.batch_size, dtype=torch.bool))
        assert not writable.where_value("text", "y").any()
