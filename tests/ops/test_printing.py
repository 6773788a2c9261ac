"""The text and the HTML that stand for a container."""

from __future__ import annotations

import pathlib
import re
import xml.etree.ElementTree as ElementTree
from textwrap import dedent

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tensordict import TensorClass, TensorDict, UnbatchedTensor, lazy_stack
from tensordict.ops.printing import get_printoptions, set_printoptions


def expect(value: object, text: str) -> None:
    assert repr(value) == dedent(text).strip()


def test_nested() -> None:
    td = TensorDict({"z": torch.zeros(3, 4), "b": {"c": torch.arange(3), "A": {"deep": torch.zeros(3)}}}, [3])
    expect(
        td,
        """
        TensorDict(
            fields={
                b: TensorDict(
                    fields={
                        A: TensorDict(
                            fields={
                                deep: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False)},
                            batch_size=torch.Size([3]),
                            device=None,
                            is_shared=False),
                        c: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.int64, is_shared=False)},
                    batch_size=torch.Size([3]),
                    device=None,
                    is_shared=False),
                z: Tensor(shape=torch.Size([3, 4]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([3]),
            device=None,
            is_shared=False)
        """,
    )
    assert str(td) == repr(td)


def test_empty() -> None:
    expect(
        TensorDict({"a": {}}, [2]),
        """
        TensorDict(
            fields={
                a: TensorDict(
                    fields={
                    },
                    batch_size=torch.Size([2]),
                    device=None,
                    is_shared=False)},
            batch_size=torch.Size([2]),
            device=None,
            is_shared=False)
        """,
    )


def test_the_memory_mapped_container_of_the_tutorial() -> None:
    """As in seeds/002."""
    td = TensorDict({"a": torch.rand(10), "b": {"c": torch.rand(10)}}, [10])
    td.memmap_()
    leaf = "MemoryMappedTensor(shape=torch.Size([10]), device=cpu, dtype=torch.float32, is_shared=False)"
    expect(
        td,
        f"""
        TensorDict(
            fields={{
                a: {leaf},
                b: TensorDict(
                    fields={{
                        c: {leaf}}},
                    batch_size=torch.Size([10]),
                    device=cpu,
                    is_shared=False)}},
            batch_size=torch.Size([10]),
            device=cpu,
            is_shared=False)
        """,
    )


@pytest.mark.gpu
def test_the_cuda_container_of_the_tutorial() -> None:
    """As in seeds/002: shared on a CUDA device, and no longer called so without one."""
    td = TensorDict({"a": torch.rand(10)}, [10], device="cuda:0")
    expect(
        td,
        """
        TensorDict(
            fields={
                a: Tensor(shape=torch.Size([10]), device=cuda:0, dtype=torch.float32, is_shared=True)},
            batch_size=torch.Size([10]),
            device=cuda:0,
            is_shared=True)
        """,
    )
    assert repr(td.clear_device_()).endswith("device=None,\n    is_shared=False)")


def test_class_names_of_leaves() -> None:
    with FakeTensorMode():
        fake = torch.zeros(2)
    td = TensorDict(
        parameter=torch.nn.Parameter(torch.zeros(1)), fake=fake, shared=torch.zeros(2).share_memory_(), number=3
    )
    text = repr(td)
    assert "parameter: Parameter(shape=torch.Size([1]), device=cpu, dtype=torch.float32, is_shared=False)" in text
    assert "fake: FakeTensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False)" in text
    assert "shared: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=True)" in text
    assert "number: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False)" in text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_leaves_without_a_plain_shape_or_storage() -> None:
    ragged = [torch.zeros(2, 5), torch.zeros(3, 5)]
    td = TensorDict()
    td._entries["sparse"] = torch.eye(3).to_sparse()
    td._entries["strided"] = torch.nested.nested_tensor(ragged)
    td._entries["jagged"] = torch.nested.nested_tensor(ragged, layout=torch.jagged)
    text = repr(td)
    assert "sparse: Tensor(shape=torch.Size([3, 3]), device=cpu, dtype=torch.float32, is_shared=False)" in text
    assert "strided: Tensor(shape=torch.Size([2, -1, 5])" in text
    assert re.search(r"jagged: NestedTensor\(shape=torch.Size\(\[2, j\d+, 5\]\)", text)


def test_within_vmap() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(repr(TensorDict(a=x)))
        return x

    torch.vmap(look)(torch.zeros(3, 2))
    assert "a: Tensor(shape=torch.Size([2])" in seen[0]


def test_keys_are_sorted_by_their_line() -> None:
    td = TensorDict({"B": 0, "a": 0, "a.b": 0, "10": 0, "9": 0})
    assert re.findall(r"^        (\S+): ", repr(td), re.MULTILINE) == ["10", "9", "B", "a.b", "a"]
    with set_printoptions(sort_keys="insertion"):
        assert re.findall(r"^        (\S+): ", repr(td), re.MULTILINE) == ["B", "a", "a.b", "10", "9"]


def test_options() -> None:
    before = get_printoptions()
    td = TensorDict(a=torch.arange(6.0).view(2, 3)[:, ::2], i=torch.arange(3))
    with set_printoptions(verbose=False, show_device=True):
        expect(
            td,
            """
            TensorDict(
                fields={
                    a: Tensor(shape=torch.Size([2, 2])),
                    i: Tensor(shape=torch.Size([3]))},
                batch_size=torch.Size([]),
                device=None)
            """,
        )
        with set_printoptions(show_shape=False, show_batch_size=False, show_device=False):
            expect(
                td,
                """
                TensorDict(
                    fields={
                        a: Tensor(),
                        i: Tensor()})
                """,
            )
        everything = dict.fromkeys(
            ("show_grad", "show_is_contiguous", "show_is_view", "show_storage_size", "plain"), True
        )
        with set_printoptions(**everything):
            text = repr(td)
        facts = "requires_grad=False, is_contiguous=False, is_view=True, storage_size=24, mean=2.5, std=2.082"
        assert f"a: Tensor(shape=torch.Size([2, 2]), {facts})" in text
        assert "storage_size=24, min=0, max=2)" in text
    assert get_printoptions() == before


def test_statistics() -> None:
    expected = {
        "float": (torch.tensor([1.0, 2.0]), "mean=1.5, std=0.7071"),
        "half": (torch.tensor([1.0, 2.0], dtype=torch.float16), "mean=1.5, std=0.7071"),
        "grad": (torch.tensor([2.0, 2.0], requires_grad=True), "mean=2, std=0"),
        "one": (torch.tensor(3.0), "mean=3, std=nan"),
        "complex": (torch.tensor([1 + 1j, 1 - 1j]), "mean=1+0j, std=1.414"),
        "int": (torch.tensor([-3, 1_000_000_007]), "min=-3, max=1000000007"),
        "unsigned": (torch.tensor([3, 4], dtype=torch.uint64), "min=3, max=4"),
        "bool": (torch.tensor([True, False]), "min=False, max=True"),
    }
    with set_printoptions(plain=True, verbose=False, show_shape=False):
        for leaf, text in expected.values():
            assert f"a: Tensor({text})" in repr(TensorDict(a=leaf))
        for leaf in (torch.zeros(0), torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), torch.zeros(0) > 0):
            assert "a: Tensor()" in repr(TensorDict(a=leaf))


def test_verbose_hides_what_was_not_asked_for() -> None:
    with set_printoptions(verbose=False, show_dtype=True):
        assert "a: Tensor(shape=torch.Size([2]), dtype=torch.int64)" in repr(TensorDict(a=torch.arange(2)))
        with set_printoptions(verbose=True):
            assert not get_printoptions()["show_device"]


def test_options_are_restored_by_an_error() -> None:
    before = get_printoptions()
    with pytest.raises(KeyError), set_printoptions(show_dtype=False), set_printoptions(verbose=False, plain=True):
        raise KeyError
    assert get_printoptions() == before


def test_the_options_given_out_are_a_copy() -> None:
    get_printoptions()["show_dtype"] = False
    assert get_printoptions()["show_dtype"]


@pytest.mark.parametrize("kind", ["sparse", "jagged"])
def test_no_option_makes_repr_fail(kind: str) -> None:
    td = TensorDict()
    leaf = (
        torch.eye(3).to_sparse()
        if kind == "sparse"
        else torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)
    )
    td._entries["a"] = leaf
    with set_printoptions(**{name: True for name in get_printoptions() if name != "sort_keys"}):
        assert "a: " in repr(td)


def test_options_as_a_decorator_and_for_good() -> None:
    before = get_printoptions()

    @set_printoptions(show_dtype=False)
    def show() -> str:
        return repr(TensorDict(a=0))

    assert "dtype" not in show()
    assert "dtype" not in show()
    assert "dtype" in repr(TensorDict(a=0))
    set_printoptions(show_dtype=False).set()
    try:
        assert "dtype" not in repr(TensorDict(a=0))
    finally:
        set_printoptions(**before).set()
    assert get_printoptions() == before


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match="show_everything"):
        set_printoptions(show_everything=True)
    with pytest.raises(ValueError, match="'random'"):
        set_printoptions(sort_keys="random")


def test_html_is_well_formed_and_escaped() -> None:
    td = TensorDict({"<script>": torch.zeros(3, 4), "b": {"c&d": torch.arange(3), "empty": {}}}, [3])
    text = td._repr_html_()
    assert "<script>" not in text
    root = ElementTree.fromstring(text)
    rows = shown_rows(root)
    assert rows["<script>"] == ["float32", "[3, 4]", "cpu", "48 B", "Tensor"]
    assert rows["c&d"] == ["int64", "[3]", "cpu", "24 B", "Tensor"]
    nodes = ["".join(node[0].itertext()) for node in root.iter("details") if node.get("class") == "td-node"]
    assert nodes == [
        "TensorDict batch_size=[3], device=None 72 B",
        "b TensorDict batch_size=[3], device=None 24 B",
        "empty TensorDict batch_size=[3], device=None (empty) 0 B",
    ]


def shown_rows(root: ElementTree.Element) -> dict[str, list[str]]:
    """The lines of the leaves and values: what is told of each key."""
    lines = [leaf[0] for leaf in root.iter("details") if leaf.get("class") == "td-leaf"]
    return {str(cells[0].text): [cell.text or "" for cell in cells[1:]] for cells in lines}


# --- what differed from the reference ---------------------------------------------------------------------------------


def test_html_of_a_ragged_lazy_stack() -> None:
    rows = [TensorDict(t=torch.zeros(n), n={"m": torch.zeros(n, 2)}) for n in (1, 3)]
    rows[1]["only"] = torch.tensor(1)
    rows[0]["s"] = "a"
    root = ElementTree.fromstring(lazy_stack(rows)._repr_html_())
    shown = shown_rows(root)
    assert set(shown) == {"m", "t", "0 -> s", "1 -> only"}
    assert shown["m"][1] == "[2, -1, 2]"
    assert shown["t"] == ["float32", "[2, -1]", "cpu", "16 B", "Tensor"]
    assert shown["0 -> s"] == ["str", "[]", "'a'"]
    assert [key.text for key in root.iter("span") if key.get("class") == "td-key"].count("n") == 1


def test_html_of_an_hdf5_container_reads_no_tensor(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py = pytest.importorskip("h5py")
    stored = TensorDict(a=torch.zeros(3), b={"c": torch.ones(3, 2)}, batch_size=[3]).to_h5(tmp_path / "x.h5")

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(h5py.Dataset, "__getitem__", refuse)
    monkeypatch.setattr(h5py.Dataset, "read_direct", refuse)
    assert "[3, 2]" in stored._repr_html_() and "Size([3, 2])" in repr(stored)


def test_keys_sorted_by_a_function_of_their_lines() -> None:
    td = TensorDict({"b": 0, "c": {"x": 0, "y": 0}, "a": 0})
    with set_printoptions(sort_keys=lambda line: -ord(line[0])):
        assert re.findall(r"^ *(\w): ", repr(td), re.MULTILINE) == ["c", "y", "x", "b", "a"]
        html = td._repr_html_()
    assert re.findall(r'"td-key">(\w)<', html) == ["c", "y", "x", "b", "a"]
    with pytest.raises(ValueError, match="'random'"):
        set_printoptions(sort_keys="random")


def test_what_a_stack_gives_is_in_memory_of_its_own(tmp_path: pathlib.Path) -> None:
    """A stack of mapped containers makes its entries on reading, and a ragged stack gives them one by one."""
    even = lazy_stack([TensorDict(a=torch.zeros(2)) for _ in range(2)]).memmap(tmp_path / "even")
    assert "a: Tensor(shape=torch.Size([2, 2]), device=cpu, dtype=torch.float32, is_shared=False)" in repr(even)
    mixed = lazy_stack([TensorDict(a=torch.zeros(2, dtype=torch.int32)), TensorDict(a=torch.zeros(2))])
    assert "a: Tensor(shape=torch.Size([2, 2]), device=cpu, dtype=torch.float32, is_shared=False)" in repr(mixed)
    with set_printoptions(plain=True, show_storage_size=True):
        assert "storage_size=16, mean=0.5, std=0.5774)" in repr(lazy_stack([TensorDict(a=v) for v in torch.eye(2)]))


def test_fields_of_a_tensorclass_in_the_order_of_insertion() -> None:
    with set_printoptions(sort_keys="insertion", verbose=False, show_shape=False):
        assert (
            repr(Pair(z=torch.zeros(2), a=torch.ones(2), batch_size=[2]))
            == dedent(
                """
            Pair(
                z=Tensor(),
                a=Tensor(),
                batch_size=torch.Size([2]))
            """
            ).strip()
        )


class Pair(TensorClass):
    z: torch.Tensor
    a: torch.Tensor


def test_an_unbatched_tensor_is_shown_as_a_leaf_and_formatted_as_a_tensor() -> None:
    scale, one = UnbatchedTensor(torch.ones(2)), UnbatchedTensor(torch.tensor(2.5))
    facts = "UnbatchedTensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False)"
    assert f"z={facts}" in repr(Pair(z=scale, a=torch.ones(3), batch_size=[3]))
    assert f"z: {facts}" in repr(TensorDict(z=scale, batch_size=[3]))
    assert repr(scale) == "UnbatchedTensor(tensor([1., 1.]))"
    assert str(scale) == f"{scale}" == "tensor([1., 1.])" and f"{one:.3f} {one} {one:>6}" == "2.500 2.5    2.5"
    assert scale.tolist() == [1.0, 1.0] and one.item() == float(one) == 2.5 and scale.numpy().tolist() == [1.0, 1.0]
