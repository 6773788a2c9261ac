"""The tree that notebooks show: its content, how little it reads, and its look in a browser."""

from __future__ import annotations

import base64
import ctypes
import io
import mmap
import os
import pathlib
import re
import time
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from tensordict import (
    DatasetWriter,
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorStack,
    TensorClass,
    TensorDict,
    lazy_stack,
    load,
    open_dataset,
    set_kernel_memory_info,
)
from tensordict.looking import images
from tensordict.memory import kernel, system

# Torch says of its strided nested tensors, to whoever makes the first, that they are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

PAGE = 4096


def opened(td: Any) -> dict[str, str]:
    """Return the text of each opened leaf, by key."""
    root = ElementTree.fromstring(td._repr_html_())
    leaves = [item for item in root.iter("details") if item.get("class") == "td-leaf"]
    return {str(leaf[0][0].text): "\n".join("".join(part.itertext()) for part in leaf[1]) for leaf in leaves}


def pictures(td: Any) -> list[np.ndarray[Any, Any]]:
    """The thumbnails, as another program reads them."""
    found = re.findall(r'src="data:image/png;base64,([^"]*)"', td._repr_html_())
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))) for content in found]


# --- what is in the leaves --------------------------------------------------------------------------------------------


def test_figures_of_leaves() -> None:
    td = TensorDict(
        {
            "floats": torch.tensor([1.0, float("nan"), float("inf"), 3.0]),
            "bools": torch.tensor([True, False, False, False]),
            "large": torch.tensor([2**63 - 1, -(2**63), 0, 0]),
            "unsigned": torch.tensor([2**64 - 1, 0, 1, 2], dtype=torch.uint64),
            "half": torch.tensor([0.5, 1.5, 0.0, 0.0], dtype=torch.bfloat16),
            "complex": torch.tensor([1 + 1j, 3 - 1j, 0, 0]),
            "one": torch.full((4, 1), 7.0)[:1].expand(4, 1),
            "none": torch.zeros(4, 0),
        },
        batch_size=[4],
    )
    seen = opened(td)
    assert seen["floats"] == "min1 mean2 max3 NaN1 infinite1\nfirst 1, nan, inf, 3"
    assert seen["bools"] == "true25.0%\nfirst True, False, False, False"
    assert seen["large"].startswith("min-9223372036854775808 mean")
    assert "max9223372036854775807" in seen["large"]
    assert "max18446744073709551615" in seen["unsigned"]
    assert seen["half"] == "min0 mean0.5 max1.5\nfirst 0.5, 1.5, 0, 0"
    assert seen["complex"] == "mean1+0j\nfirst 1+1j, 3-1j, 0+0j, 0+0j"
    assert seen["none"] == "elementsnone"
    assert opened(TensorDict(a=torch.tensor(2.5))) == {"a": "value2.5"}


def test_first_values_are_in_the_order_of_the_elements() -> None:
    leaf = torch.arange(60).reshape(10, 3, 2)
    assert "first 0, 1, 2, 3, 4, 5, 6, 7, …" in opened(TensorDict(a=leaf, batch_size=[10]))["a"]
    assert "first 0, 2, 4, 1, 3, 5, 6, 8, …" in opened(TensorDict(a=leaf.mT, batch_size=[10]))["a"]
    assert "first 0, 6, 12, 18, 24, 30, 36, 42, …" in opened(TensorDict(a=leaf[:, :1, :1]))["a"]


def test_values_are_rows_of_a_table() -> None:
    td = TensorDict(
        {"names": NonTensorStack(*[f"row {row}" for row in range(20)]), "note": "two\nlines", "n": {"x": "deep"}},
        batch_size=[20],
    )
    seen = opened(td)
    assert "".join(seen["names"].split("\n")[0]) == "rowvalue" + "".join(f"{row}row {row}" for row in range(8))
    assert seen["names"].endswith("… 12 more rows")
    assert seen["note"] == "two\nlines"
    long = opened(TensorDict(a="x" * 10_000))["a"]
    assert len(long) < 2100 and long.endswith("(8,000 more characters)")


def test_values_are_seen_without_opening_them() -> None:
    labels = NonTensorStack(*(["dog"] + ["cat"] * 3))
    td = TensorDict({"task": "walk\nslowly", "label": labels, "n": NonTensorStack(*[{"q": 1}] * 4)}, batch_size=[4])
    assert previews(td) == {"label": "'cat': 3, 'dog': 1", "n": "{'q': 1}, {'q': 1}, …", "task": "'walk\\nslowly'"}
    many = NonTensorStack(*[f"{'long ' * 20}{number}" for number in range(9)])
    text = previews(TensorDict(a=many, batch_size=[9]))["a"]
    assert text.endswith("…: 1, … 4 more") and len(text) < 300
    assert previews(TensorDict(a="x" * 1000, batch_size=[10**12]))["a"] == f"'{'x' * 39}…"


def previews(td: Any) -> dict[str, str]:
    """What the line of each value shows of it, by its key."""
    tree = ElementTree.fromstring(td._repr_html_())
    found = {}
    for line in tree.iter("summary"):
        spans = {item.get("class"): item.text or "" for item in line.iter("span")}
        if "td-preview" in spans:
            found[spans["td-key"]] = spans["td-preview"]
    return found


def test_no_text_is_markup() -> None:
    text = "<img src=x onerror=alert(1)>&\x00\x1b[31m"
    td = TensorDict({text: torch.zeros(2), "v": text, "rows": NonTensorStack(text, text), "o": Odd()}, batch_size=[2])
    html = td._repr_html_()
    ElementTree.fromstring(html)
    assert "<img" not in html and "<b>" not in html and "\x00" not in html and "\x1b" not in html
    assert html.count("&lt;img src=x") == 6 and "&lt;b&gt;odd" in html


class Odd:
    def __repr__(self) -> str:
        return "<b>odd</b>"


def test_levels_are_seen_without_the_style() -> None:
    """JupyterLab removes it from notebooks of others; `test_jupyterlab.py` tests that."""
    html = re.sub("<style>.*?</style>", "", TensorDict(a={"b": torch.zeros(2)})._repr_html_())
    assert html.count('style="padding-left: 1em"') == 2


def test_long_containers_are_cut() -> None:
    td = TensorDict({f"k{i:04}": torch.zeros(3) for i in range(1000)})
    html = td._repr_html_()
    assert html.count('class="td-leaf"') == 60 and "… 940 more entries" in html and "11.7 KiB" in html
    deep = TensorDict({f"n{i:02}": {f"k{j}": torch.zeros(1) for j in range(50)} for i in range(50)})
    html = deep._repr_html_()
    assert html.count('class="td-leaf"') + html.count('class="td-node"') == 501 and "9.8 KiB" in html


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (lambda: torch.zeros(3, device="meta"), "it has a shape and no elements"),
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged), "first 0, 1, 0"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]), "first 1, 1, 0, 0, 0"),
    ],
    ids=["meta", "sparse", "jagged", "nested"],
)
def test_leaves_that_are_no_plain_tensors(leaf: Any, said: str) -> None:
    td = TensorDict()
    td._entries["a"] = leaf()
    assert said in opened(td)["a"]


def test_leaves_that_have_no_elements_here() -> None:
    with FakeTensorMode():
        td = TensorDict(a=torch.zeros(3))
        assert "it has a shape and no elements" in opened(td)["a"]
    seen: list[str] = []

    def look(row: TensorDict) -> torch.Tensor:
        seen.append(opened(row)["a"])
        return row["a"]

    torch.vmap(look)(TensorDict(a=torch.zeros(3, 2), batch_size=[3]))
    assert "torch.func" in seen[0]
    lazy = opened(TensorDict.from_module(torch.nn.LazyLinear(2)))
    assert lazy == dict.fromkeys(("weight", "bias"), "it has not been initialized")


def test_lazy_stacks_are_seen_member_by_member() -> None:
    rows = [TensorDict(a=torch.full((2,), float(i)), batch_size=[]) for i in range(5)]
    assert opened(lazy_stack(rows))["a"] == "min0 mean2 max4\nfirst 0, 0, 1, 1, 2, 2, 3, 3, …"
    ragged = lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 3)])
    assert opened(ragged)["a"] == "all1\nfirst 1, 1, 1, 1"
    many = LazyStackedTensorDict(*[TensorDict(a=torch.zeros(1)) for _ in range(20_000)])
    start = time.perf_counter()
    assert "are not all read" in opened(many)["a"]
    assert time.perf_counter() - start < 5


class Frame(TensorClass):
    pixels: torch.Tensor
    label: str = "cat"


def test_tensorclasses() -> None:
    frame = Frame(pixels=torch.zeros(2, 8, 8, dtype=torch.uint8), batch_size=[2])
    html = frame._repr_html_()
    assert '<span class="td-kind">Frame</span>' in html and opened(frame)["label"] == "cat"
    assert len(pictures(frame)) == 2


# --- thumbnails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 3, 10, 12), lambda leaf: leaf.movedim(1, -1)),
        ((4, 10, 12, 3), lambda leaf: leaf),
        ((4, 10, 12, 4), lambda leaf: leaf),
        ((4, 10, 12), lambda leaf: leaf),
        ((4, 1, 10, 12), lambda leaf: leaf[:, 0]),
        ((2, 2, 10, 12, 3), lambda leaf: leaf.flatten(0, 1)),
        ((4, 200, 100, 3), lambda leaf: leaf[:, ::3, ::3]),
    ],
    ids=["CHW", "HWC", "RGBA", "grey", "one channel", "two dims", "large"],
)
def test_thumbnails_are_the_pixels(shape: tuple[int, ...], expected: Any) -> None:
    leaf = torch.randint(256, shape, dtype=torch.uint8)
    found = pictures(TensorDict(a=leaf, batch_size=shape[:1]))
    assert len(found) == 4
    for picture, pixels in zip(found, expected(leaf)):
        assert np.array_equal(picture, pixels.numpy())


def test_thumbnails_of_stacks_and_cut() -> None:
    frames = torch.randint(256, (20, 3, 16, 16), dtype=torch.uint8)
    found = pictures(lazy_stack([TensorDict(a=frame) for frame in frames]))
    assert len(found) == 6 and np.array_equal(found[5], frames[5].movedim(0, -1).numpy())
    assert "… 14 more images" in TensorDict(a=frames, batch_size=[20])._repr_html_()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 16, 16), torch.float32), ((16, 4), torch.uint8), ((500,), torch.uint8), ((8, 400), torch.uint8)],
)
def test_what_is_no_image(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert images.find_image_form(shape, dtype) == "" and not pictures(TensorDict(a=torch.zeros(shape, dtype=dtype)))


# --- what is read -----------------------------------------------------------------------------------------------------


def pages_in_memory(leaf: torch.Tensor) -> int:
    first = leaf.data_ptr() // PAGE * PAGE
    return sum(kernel.are_in_memory([at]) for at in range(first, leaf.data_ptr() + leaf.nbytes, PAGE))


def forget(path: pathlib.Path, *leaves: torch.Tensor) -> None:
    """Have what is read of a file from now on read from the disk, page by page and none ahead."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for leaf in leaves:
        first = leaf.data_ptr() // PAGE * PAGE
        nbytes = leaf.data_ptr() + leaf.nbytes - first
        assert not system.libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_RANDOM)
    assert pages_in_memory(leaves[0]) == 0


@pytest.mark.parametrize("told", [True, False], ids=["kernel", "kernel off"])
@pytest.mark.parametrize("format", ["folder", "safetensors", "consolidated", "np.memmap"])
def test_a_mapped_file_is_read_no_further_than_it_is_shown(format: str, told: bool, tmp_path: pathlib.Path) -> None:
    td = TensorDict(big=torch.arange(8 << 20, dtype=torch.int32), small=torch.arange(9), batch_size=[])
    path = tmp_path / "saved"
    if format == "folder":
        td.save(path)
        file, td = path / "big.memmap", load(path)
    elif format == "safetensors":
        td.to_safetensors(path)
        file, td = path, load(path)
    elif format == "consolidated":
        td.consolidate(path)
        file, td = path, load(path)
    else:
        td["big"].numpy().tofile(path)
        file, td = path, TensorDict(big=torch.from_numpy(np.memmap(path, np.int32, "r+")), small=torch.arange(9))
    forget(file, td["big"], td["small"])
    with set_kernel_memory_info(told):
        seen = opened(td)
    # Of 8,192.
    assert pages_in_memory(td["big"]) == 1
    assert "in a file, which is read no further" in seen["big"] and "first 0, 1, 2, 3, 4, 5, 6, 7, …" in seen["big"]
    assert seen["small"].startswith("min0 mean4 max8")


def test_thumbnails_of_a_mapped_file_read_these_images(tmp_path: pathlib.Path) -> None:
    TensorDict(a=torch.full((512, 3, 128, 128), 7, dtype=torch.uint8), batch_size=[512]).save(tmp_path)
    td = load(tmp_path)
    forget(tmp_path / "a.memmap", td["a"])
    assert len(pictures(td)) == 6
    # Those of six images, of 6,144.
    assert pages_in_memory(td["a"]) == 6 * 3 * 128 * 128 // PAGE


def test_many_mapped_leaves_are_not_all_read(tmp_path: pathlib.Path) -> None:
    leaves = {
        f"{i:03}": MemoryMappedTensor.from_tensor(torch.ones(4096), filename=tmp_path / str(i)) for i in range(80)
    }
    seen = opened(TensorDict({"a": dict(list(leaves.items())[:40]), "b": dict(list(leaves.items())[40:])}))
    read = [text.startswith("all1") for text in seen.values()]
    assert read == [True] * 64 + [False] * 16


def test_tensors_of_a_data_set_are_not_read(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path / "data", rows_per_shard=4) as writer:
        writer.extend(TensorDict({"x": torch.arange(10), "s": NonTensorStack(*"abcdefghij")}, [10]))
    data = open_dataset(tmp_path / "data")
    html = data._repr_html_()
    assert len(data._shards._recent) == 1  # the first shard, for the values
    assert "to_tensordict()" in html and "80 B" in html
    assert "first 0, 1, 2" in opened(data[:3].to_tensordict())["x"]


def test_it_is_quick_where_there_is_much() -> None:
    td = TensorDict({f"k{i}": torch.zeros(1 << 20) for i in range(40)})
    td._repr_html_()
    start = time.perf_counter()
    td._repr_html_()
    assert time.perf_counter() - start < 2
    assert sum("describe()" in text for text in opened(td).values()) == 36


# --- in a browser -----------------------------------------------------------------------------------------------------


def sample() -> TensorDict:
    """Something of everything."""
    grid = torch.linspace(0, 255, 64).to(torch.uint8)
    colours = torch.stack([grid.expand(64, 64), grid.expand(64, 64).T, torch.full((64, 64), 128, dtype=torch.uint8)])
    ragged = torch.nested.nested_tensor([torch.arange(i % 5 + 1) for i in range(32)], layout=torch.jagged)
    return TensorDict(
        {
            "image": torch.stack([colours.roll(3 * i, 1) for i in range(32)]),
            "obs": torch.linspace(-2, 2, 32 * 4).reshape(32, 4),
            "reward": torch.linspace(0, 1, 32).index_fill(0, torch.tensor([3, 5]), float("nan")),
            "done": torch.arange(32) % 4 == 0,
            "tokens": ragged,
            "prompt": NonTensorStack(*[f"What is {i} + {i}? <Say only the number.>" for i in range(32)]),
            "agent": {"params": {"weight": torch.zeros(32, 1000, 100), "bias": torch.zeros(32, 100)}, "name": "walker"},
        },
        batch_size=[32],
        names=["time"],
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("shape", ["closed", "open"])
def test_it_is_seen_in_light_and_dark(shape: str, dark: bool, picture: Any) -> None:
    html = sample()._repr_html_()
    if shape == "open":
        html = html.replace('class="td-leaf"', 'class="td-leaf" open="open"')
    page = f'<!doctype html><meta charset="utf-8"><title>tree</title>{html}'
    pixels = picture(page, f"tree-{shape}", dark, (900, 420 if shape == "closed" else 1150)).astype(int)
    # Within the tree, not the page around it, which is the notebook's.
    tree = pixels[12:300, 12:780].mean(-1)
    ground = np.median(tree)
    assert ground < 40 if dark else ground > 230
    written = abs(tree - ground) > 120
    assert 0.005 < written.mean() < 0.3


def test_the_theme_of_jupyterlab_goes_first(picture: Any) -> None:
    """A dark theme of JupyterLab on a system that asks for light pages."""
    theme = "--jp-content-font-color1: #ffffffde; --jp-content-font-color2: #ffffffb3; --jp-layout-color0: #111111"
    page = (
        f'<!doctype html><meta charset="utf-8"><style>:root {{ {theme}; --jp-layout-color2: #424242 }}</style>'
        f'<body data-jp-theme-light="false" style="background: #111">{sample()._repr_html_()}'
    )
    pixels = picture(page, "tree-jupyterlab", False, (900, 420)).astype(int)
    assert np.median(pixels) < 30
    assert (pixels.mean(-1) > 150).mean() > 0.003


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("light_mark", "dark_mark"),
    [
        ('class="vscode-light"', 'class="vscode-dark"'),
        ('class="vscode-high-contrast vscode-high-contrast-light"', 'class="vscode-high-contrast"'),
        ('data-theme="light"', 'data-theme="dark"'),
    ],
    ids=["vscode", "vscode-contrast", "sphinx"],
)
def test_the_theme_of_the_page_goes_first(light_mark: str, dark_mark: str, dark: bool, picture: Any) -> None:
    """The system asks for the other one."""
    page = f'<!doctype html><meta charset="utf-8"><body {dark_mark if dark else light_mark}>{sample()._repr_html_()}'
    tree = picture(page, "tree-theme", not dark, (900, 420)).astype(int)[12:300, 12:780]
    ground = np.median(tree.mean(-1))
    assert ground < 40 if dark else ground > 230
    # Data types are in blue: a light one on dark, a dark one on light.
    blue = tree[tree[..., 2] - tree[..., 0] > 80]
    assert len(blue) > 30 and (blue.max() > 230 if dark else blue.min() < 60)
