"""The text and the HTML that stand for a container."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from textwrap import dedent

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tensordict import TensorDict
from tensordict.printing import get_printoptions, set_printoptions


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
    root = ElementTree.fromstring(text.replace("<details open>", '<details open="">'))
    cells = ["".join(cell.itertext()) for cell in root.iter("td")]
    assert cells[:2] == ["<script>", "Tensor"]
    assert {"c&d", "<script>", "[3, 4]", "float32", "int64", "cpu", "Tensor"} <= set(cells)
    assert len(list(root.iter("table"))) == 2
    assert "TensorDict batch_size=[3], device=None (empty)" in cells
