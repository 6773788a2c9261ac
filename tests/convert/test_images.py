"""Decoding images: `decode_images`, and `from_hf(decode=)`."""

from __future__ import annotations

import io
import pathlib
import sys

import numpy as np
import pytest
import torch

from tensordict import DatasetWriter, TensorDict, open_dataset
from tensordict.convert.images import join_bytes
from tensordict.datasets import DatasetLoader, decode_images
from tensordict.errors import SaveError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

Image = pytest.importorskip("PIL.Image")


def encode(mode: str, height: int, width: int, value: int = 7, kind: str = "png", **options: object) -> bytes:
    file = io.BytesIO()
    bands = len(Image.new(mode, (1, 1)).getbands())
    Image.new(mode, (width, height), value if bands == 1 else (value,) * bands).save(file, kind, **options)
    return file.getvalue()


def rows_of(*contents: bytes) -> TensorDict:
    return TensorDict({"a": {"image": join_bytes(contents)}}, batch_size=[len(contents)])


def test_channels_sizes_and_modes() -> None:
    key = ("a", "image")
    rows = rows_of(*[encode("RGB", 2, 3, number) for number in range(3)])
    found = decode_images(rows, key)
    assert found[key].shape == (3, 3, 2, 3) and found[key].dtype == torch.uint8
    assert found[key][:, 0, 0, 0].tolist() == [0, 1, 2] and rows[key].is_nested
    assert decode_images(rows, key, mode="L")[key].shape == (3, 1, 2, 3)
    assert decode_images(rows_of(encode("L", 4, 5)), key)[key].shape == (1, 1, 4, 5)
    assert decode_images(rows_of(encode("RGBA", 4, 5)), key, mode="RGB")[key].shape == (1, 3, 4, 5)
    assert decode_images(rows_of(encode("P", 4, 5)), key)[key].shape == (1, 3, 4, 5)
    mixed = decode_images(rows_of(encode("RGB", 2, 3), encode("RGB", 4, 5)), key)[key]
    assert [row.shape for row in mixed.unbind()] == [(3, 2, 3), (3, 4, 5)] and mixed[1].unique().tolist() == [7]
    one = decode_images(rows[1], key)
    assert one.batch_size == () and one[key].shape == (3, 2, 3)
    dense = TensorDict({"image": torch.tensor([list(encode("L", 1, 1))] * 2, dtype=torch.uint8)}, [2])
    assert decode_images(dense, "image")["image"].tolist() == [[[[7]]]] * 2
    assert decode_images(rows[:0], key)[key].shape[0] == 0


def test_a_turned_image_is_turned_back() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encode("L", 2, 3, kind="jpeg", exif=exif)
    assert decode_images(rows_of(content), ("a", "image"))["a", "image"].shape == (1, 1, 3, 2)


def test_bad_images_name_key_and_row(monkeypatch: pytest.MonkeyPatch) -> None:
    good = encode("RGB", 2, 3)
    deep = encode("I;16", 2, 2)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n"
    for bad, why in ((b"", ""), (good[: len(good) // 2], ""), (b"no image", ""), (deep, "I;16"), (postscript, "")):
        with pytest.raises(SaveError, match=rf"'a', 'image'.*row 1.*{why}"):
            decode_images(rows_of(good, bad), ("a", "image"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2)
    with pytest.raises(SaveError, match="row 0.*6 pixels"):
        decode_images(rows_of(good), ("a", "image"))
    with pytest.raises(TypeError, match="'x'.*float32"):
        decode_images(TensorDict(x=torch.zeros(2, 3), batch_size=[2]), "x")
    with pytest.raises(TypeError, match="'x'.*uint8.*4"):
        decode_images(TensorDict(x=torch.zeros(2, 3, 4, 4, dtype=torch.uint8), batch_size=[2]), "x")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match=r"tensordict\[images\]"):
        decode_images(rows_of(good), ("a", "image"))


def test_a_loader_decodes_the_images_of_a_data_set(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path / "data") as writer:
        writer.extend(rows_of(*[encode("L", 2, 2, number) for number in range(6)]))
    data = open_dataset(tmp_path / "data")
    assert data["a", "image"].is_nested  # the files, not their pixels
    loader = DatasetLoader(data, 4, shuffle=False, transform=lambda rows: decode_images(rows, ("a", "image")))
    assert [rows["a", "image"][:, 0, 0, 0].tolist() for rows in loader] == [[0, 1, 2, 3], [4, 5]]


def test_images_of_hugging_face(tmp_path: pathlib.Path) -> None:
    datasets = pytest.importorskip("datasets")
    pixels = [np.full((2, 3, 3), number, np.uint8) for number in range(4)]
    made = datasets.Dataset.from_dict({"image": [Image.fromarray(each) for each in pixels], "n": range(4)})
    made = made.cast_column("image", datasets.Image())
    td = TensorDict.from_hf(made, decode=True)
    assert td["image"].equal(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2))
    kept = TensorDict.from_hf(made)
    assert kept["image"].is_nested and kept["image"].dtype == torch.uint8
    assert decode_images(kept, "image")["image"].equal(td["image"])
    some = TensorDict.from_hf(made.select([3, 1]), decode="L")
    assert some["image"][:, 0, 0, 0].tolist() == [3, 1] and some["image"].shape == (2, 1, 2, 3)
    # Rows that were sliced share the memory of the table.
    assert TensorDict.from_hf(made.select(range(2, 4)), decode=True)["image"].equal(td["image"][2:])
    # A folder of images has their paths instead of their contents.
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(4)]
    folder = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    assert TensorDict.from_hf(folder, decode=True)["image"].equal(td["image"])
    lacking = datasets.Dataset.from_dict({"image": [paths[0], None]}).cast_column("image", datasets.Image())
    with pytest.raises(ValueError, match="image"):
        TensorDict.from_hf(lacking)
    assert TensorDict.from_hf(lacking, nulls="mask")["image_mask"].tolist() == [True, False]


def test_lists_of_one_length_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {
            "pair": [[1, 2], [3, 4], [5, 6]], "deep": [[[1.0], [2.0]]] * 3, "ragged": [[1], [2, 3], []],
            "empty": [[], [], []], "words": [["a"], ["b"], ["c"]], "inner": [[[1], [2, 3]]] * 3,
        }
    )  # fmt: skip
    td = TensorDict.from_hf(made)
    assert td["pair"].tolist() == [[1, 2], [3, 4], [5, 6]] and td["deep"].shape == (3, 2, 1)
    assert td["ragged"].is_nested and td["words"] == [["a"], ["b"], ["c"]] and not torch.is_tensor(td["inner"])
    assert TensorDict.from_hf(made.select([2, 0]))["pair"].tolist() == [[5, 6], [1, 2]]
    assert td.select("pair").to_hf()[0] == {"pair": [1, 2]}
