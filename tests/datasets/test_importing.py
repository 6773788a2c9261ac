"""`import_dataset`, on samples that the writers of the formats have made (`tests/data/foreign/make_*.py`)."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensordict import DatasetWriter, open_dataset
from tensordict.convert import records
from tensordict.convert.tfrecord import iterate_records, parse_example
from tensordict.datasets import decode_images, import_dataset
from tensordict.errors import SaveError, SchemaError, UnsupportedEntryError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

SAMPLES = Path(__file__).parents[1] / "data" / "foreign"
SOURCES = {
    "webdataset": SAMPLES / "webdataset",
    "rlds": SAMPLES / "rlds",
    "minari": SAMPLES / "minari" / "walk" / "tiny-v0",
    "lerobot": SAMPLES / "lerobot",
}
NEEDS = {"webdataset": "PIL", "rlds": "google_crc32c", "minari": "h5py", "lerobot": "pyarrow"}


def read(format: str, folder: Path, **options: Any) -> Any:
    pytest.importorskip(NEEDS[format])
    return import_dataset(options.pop("source", SOURCES[format]), folder / "data", format, **options)


# --- each format ------------------------------------------------------------------------------------------------------


def test_webdataset(tmp_path: Path) -> None:
    data = read("webdataset", tmp_path)
    assert len(data) == 5 and data["__key__"] == [f"part/{number:04}" for number in range(5)]
    assert data["cls"].tolist() == [0, 1, 0, 1, 0] and data["txt"][4] == "digit 4"
    assert data[3]["json"] == {"size": [3, 1], "name": "é"} and data["box.npy"][2].tolist() == [2.0, 3.0, 4.0, 5.0]
    pixels = decode_images(data[:], "png", "mask.png")
    assert pixels["png"].shape == (5, 3, 4, 6) and pixels["png"][:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40]
    assert pixels["mask.png"].shape == (5, 1, 4, 6) and pixels["mask.png"][4].unique().tolist() == [41]
    decoded = read("webdataset", tmp_path / "other", source=f"{SOURCES['webdataset']}/*-001.tar", decode=True)
    assert decoded["png"].equal(pixels["png"][3:]) and decoded["cls"].tolist() == [1, 0]


def test_rlds(tmp_path: Path) -> None:
    data = read("rlds", tmp_path)
    assert data["episode_index"].tolist() == [0, 0, 0, 1, 1]
    assert data["is_first"].tolist() == [True, False, False, True, False] and data["reward"].dtype == torch.float32
    assert data["action"].dtype == torch.float64 and data["action"][:, 0].tolist() == [0, 1, 2, 0, 1]
    seen = data["observation"]
    assert seen["state"][1].tolist() == [1.0, -1.0, 0.5] and seen["bytes"].dtype == torch.uint8
    assert seen["packed"].dtype == torch.int16 and seen["packed"][2].tolist() == [[-2, -2], [-2, -2]]
    assert seen["squeezed"].tolist() == [[0, 0.25], [1, 0.25], [2, 0.25], [0, 0.25], [1, 0.25]]
    assert [row.tolist() for row in data["boxes"].unbind()] == [[], [[0, 0]], [[0, 0]] * 2, [], [[1, 1]]]
    assert data["words"] == [[], ["w"], ["w", "w"], [], ["w"]]
    assert data["language_instruction"] == ["go to 0"] * 3 + ["go to 1"] * 2
    assert data["episode_metadata", "file_path"][3] == "1.h5" and data["episode_metadata", "score"][4] == 1
    pixels = decode_images(data[:], ("observation", "image"))["observation", "image"]
    assert pixels.shape == (5, 3, 4, 6) and pixels[:, 0, 0, 0].tolist() == [0, 1, 2, 10, 11]
    assert read("rlds", tmp_path / "other", decode=True)["observation", "image"].equal(pixels)


def test_other_data_sets_of_tensorflow(tmp_path: Path) -> None:
    data = read("rlds", tmp_path, source=SAMPLES / "tfds")
    order = data["name"]
    assert sorted(order) == ["n0", "n1", "n2"] and data["label"].dtype == torch.int64
    for row, name in enumerate(order):
        number = int(name[1:])
        assert data["box"][row].tolist() == [[number, number]] * number and data["words"][row] == ["w"] * number
        assert data["points"][row].shape == (1 + number, 3) and data["points"][row].dtype == torch.float32
        assert decode_images(data[row], "image")["image"].shape == (3, 2 + number, 3)
    ragged = read("rlds", tmp_path / "other", source=f"{SAMPLES}/tfds/pictures-train.tfrecord*", decode=True)["image"]
    assert sorted(len(image[0]) for image in ragged.unbind()) == [2, 3, 4]


def test_minari(tmp_path: Path) -> None:
    data = read("minari", tmp_path)
    assert data["episode"].tolist() == [0] * 5 + [1] * 3 and data["action"].tolist() == [1, 1, 0, 1, 1, 1, 0, 1]
    assert data["observation", "place"][:, 0].tolist() == [0, 1, 2, 2, 3, 0, 1, 1]
    assert data["next", "observation", "place"][:, 0].tolist() == [1, 2, 2, 3, 4, 1, 1, 2]
    assert data["observation", "words"][1] == "at 1" and data["observation", "camera"].dtype == torch.uint8
    assert data["next", "reward"].tolist() == [1, 1, 0, 1, 1, 1, 0, 1]
    assert data["next", "terminated"].tolist() == [False] * 4 + [True] + [False] * 3
    assert data["next", "truncated"].tolist() == [False] * 7 + [True]
    assert data["info", "left"].flatten().tolist() == [4, 3, 2, 2, 1, 4, 3, 3] and ("next", "info") in data.keys(True)
    file = SOURCES["minari"] / "data" / "main_data.hdf5"
    assert len(read("minari", tmp_path / "other", source=file)) == 8


def test_lerobot(tmp_path: Path) -> None:
    data = read("lerobot", tmp_path)
    assert len(data) == 10 and data["episode_index"].tolist() == [0] * 6 + [1] * 4
    assert data["observation", "state"][7].tolist() == [1.0, 1.0, 0.5] and data["action"][3].tolist() == [3.0, -3.0]
    assert data["task"] == ["task 0"] * 6 + ["task 1"] * 4 and data["next", "done"].sum() == 2
    wrist = decode_images(data[:], ("observation", "images", "wrist"))["observation", "images", "wrist"]
    assert wrist[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]
    top = data["observation", "images", "top"]
    assert top["path"] == ["videos/observation.images.top/chunk-000/file-000.mp4"] * 10
    assert (
        torch.allclose(top["timestamp"], torch.arange(10).double() / 10, atol=1e-6)
        and top["timestamp"].dtype == torch.float64
    )
    assert (SOURCES["lerobot"] / top["path"][0]).is_file()


def test_videos_of_lerobot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    data = read("lerobot", tmp_path, decode=True)
    top = data["observation", "images", "top"]
    assert top.shape == (10, 3, 64, 96) and top.dtype == torch.uint8
    expected = torch.tensor([100 * (row > 5) + 10 * (row % 6) for row in range(10)])
    assert (top.float().mean((1, 2, 3)) - expected).abs().max() < 2  # compressed with losses
    assert data["observation", "images", "wrist"].shape == (10, 3, 16, 24)
    # One frame in memory at a time gives the same.
    monkeypatch.setattr("tensordict.convert.lerobot.NBYTES", 1)
    assert read("lerobot", tmp_path / "other", decode=True)["observation", "images", "top"].equal(top)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ModuleNotFoundError, match=r"tensordict\[video\]"):
        read("lerobot", tmp_path / "third", decode=True)


def test_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    images = [np.full((2, 2), number, np.uint8) for number in range(5)]
    content = {"image": images, "pair": [[n, n] for n in range(5)], "text": list("abcde"), "label": [0, 1, 0, 1, 0]}
    features = datasets.Features(
        {
            "image": datasets.Image(), "pair": datasets.List(datasets.Value("int64")),
            "text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"]),
        }
    )  # fmt: skip
    made = datasets.Dataset.from_dict(content, features=features)
    data = import_dataset(made, tmp_path / "data", "hf")
    assert data["pair"].tolist() == content["pair"] and data["label"].tolist() == content["label"]
    assert data["text"] == list("abcde") and "label_categories" not in data.keys()
    assert decode_images(data[:], "image")["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    stream = import_dataset(made.to_iterable_dataset(), tmp_path / "stream", "hf", decode=True)
    assert stream["image"].shape == (5, 1, 2, 2) and stream["pair"].is_nested
    with pytest.raises(TypeError, match="IterableDataset with features, got list"):
        import_dataset([1, 2], tmp_path / "none", "hf")


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", SOURCES)
def test_small_pieces_give_the_same_rows(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(format, tmp_path)
    for module in ("records", "minari", "lerobot"):
        monkeypatch.setattr(f"tensordict.convert.{module}.ROWS", 2)
    pieces = read(format, tmp_path / "pieces", rows_per_shard=3)
    assert len(list(pieces.shards())) > 1 and len(pieces) == len(whole)
    for row in range(len(whole)):
        assert (pieces[row] == whole[row]).all()


@pytest.mark.parametrize("format", SOURCES)
def test_a_failed_import_leaves_nothing(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extend, calls = DatasetWriter.extend, []

    def fail(self: DatasetWriter, batch: Any) -> None:
        calls.append(len(list(tmp_path.iterdir())))
        if len(calls) > 1:
            raise OSError("the disk is gone")
        extend(self, batch)

    monkeypatch.setattr(DatasetWriter, "extend", fail)
    monkeypatch.setattr(records, "ROWS", 2)
    monkeypatch.setattr(f"tensordict.convert.{format}.ROWS", 2, raising=False)
    with pytest.raises(OSError, match="disk is gone"):
        read(format, tmp_path)
    assert calls == [0, 1] and not list(tmp_path.iterdir())


def test_what_is_there_stays(tmp_path: Path) -> None:
    data = read("webdataset", tmp_path)
    with pytest.raises(SaveError, match="exists already"):
        read("webdataset", tmp_path)
    assert open_dataset(tmp_path / "data")["cls"].equal(data["cls"])
    with pytest.raises(ValueError, match="'lerobot', 'rlds'"):
        import_dataset(SOURCES["rlds"], tmp_path / "x", "tar")  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["data"]


def test_to_a_url() -> None:
    pytest.importorskip("fsspec")
    data = import_dataset(SOURCES["webdataset"], "memory://importing/data", "webdataset")
    assert data["cls"].tolist() == [0, 1, 0, 1, 0]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """200 MB of samples take less than 80 MB of memory beside what the process needs."""
    with tarfile.open(tmp_path / "big.tar", "w") as archive:
        for number in range(100):
            add(archive, f"{number:03}.bin", bytes(2_000_000))
    program = """
import resource, sys
from tensordict.datasets import import_dataset
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = import_dataset(sys.argv[1] + "/big.tar", sys.argv[1] + "/data", "webdataset", rows_per_shard=5)
print(len(data), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 100 and grown < 80_000


# --- files that are broken or hostile ---------------------------------------------------------------------------------


def add(archive: tarfile.TarFile, name: str, content: bytes = b"1", **attributes: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    archive.addfile(member, io.BytesIO(content))


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


HUGE = npy(np.zeros(2)).replace(b"(2,)", b"(99999999999,)").replace(b" " * 10 + b"\n", b"\n")


@pytest.mark.parametrize(
    ("name", "content", "attributes", "error", "why"),
    [
        ("a.pyd", b"cos\nsystem\n", {}, SaveError, "'a.pyd' is pickled"),
        ("a.pickle", b"x", {}, SaveError, "'a.pickle' is pickled"),
        ("a.seg.PTH", b"x", {}, SaveError, "'a.seg.PTH' is pickled"),
        ("a.npy", npy(np.array([{}], dtype=object)), {}, SaveError, "'a.npy' is broken.*object"),
        ("a.npy", HUGE, {}, SaveError, "'a.npy' is broken"),
        ("a.npy", b"\x93NUMPY", {}, SaveError, "'a.npy' is broken"),
        ("a.cls", b"9" * 30, {}, SaveError, "'a.cls' is broken"),
        ("a.cls", b"x", {}, SaveError, "'a.cls' is broken"),
        ("a.json", b"{", {}, SaveError, "'a.json' is broken"),
        ("a.txt", b"\xff", {}, SaveError, "'a.txt' is broken"),
        ("a", b"x", {}, SaveError, "'a' is no file with an ending"),
        ("a.jpg", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, SaveError, "'a.jpg' is no file"),
        ("a.txt", b"", {"type": tarfile.CHRTYPE}, SaveError, "'a.txt' is no file"),
    ],
)
def test_hostile_members(name: str, content: bytes, attributes: Any, error: Any, why: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        add(archive, name, content, **attributes)
    with pytest.raises(error, match=why) as raised:
        import_dataset(tmp_path / "x.tar", tmp_path / "data", "webdataset")
    assert "x.tar" in str(raised.value) and os.listdir(tmp_path) == ["x.tar"]


def test_members_are_never_written_to_their_paths(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    with tarfile.open(tmp_path / "inner" / "x.tar", "w") as archive:
        add(archive, "../../evil.txt", b"evil")
        add(archive, f"{tmp_path}/absolute.txt", b"evil")
    data = import_dataset(tmp_path / "inner", tmp_path / "data", "webdataset")
    assert data["__key__"] == ["../../evil", f"{tmp_path}/absolute"] and data["txt"] == ["evil", "evil"]
    assert sorted(os.listdir(tmp_path)) == ["data", "inner"]


def test_other_tar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        add(archive, "a.cls", b"1")
        add(archive, "b.txt", b"t")
    with pytest.raises(SaveError, match=r"sample 'b' has the members \['__key__', 'txt'\].*'cls'"):
        import_dataset(tmp_path / "x.tar.gz", tmp_path / "data", "webdataset")
    (tmp_path / "cut.tar").write_bytes((SOURCES["webdataset"] / "digits-000.tar").read_bytes()[:3000])
    (tmp_path / "none.tar").write_bytes(b"no tar" * 200)
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    for name in ("cut.tar", "none.tar", "empty.tar"):
        with pytest.raises(SaveError, match=name):
            import_dataset(tmp_path / name, tmp_path / "data", "webdataset")
    monkeypatch.setattr("tensordict.convert.webdataset._LARGEST", 70)
    with pytest.raises(SaveError, match="'part/0000.box.npy' has 144 bytes"):
        import_dataset(SOURCES["webdataset"], tmp_path / "data", "webdataset")
    with pytest.raises(FileNotFoundError):
        import_dataset(tmp_path / "missing.tar", tmp_path / "data", "webdataset")


def test_rows_of_other_shapes_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for number in range(records.ROWS + 1):
            add(archive, f"{number:05}.npy", npy(np.zeros(2 + number // records.ROWS)))
    with pytest.raises(SchemaError, match="'npy'") as raised:
        import_dataset(tmp_path / "x.tar", tmp_path / "data", "webdataset")
    assert "ragged=" in "".join(raised.value.__notes__)
    data = import_dataset(tmp_path / "x.tar", tmp_path / "data", "webdataset", ragged=["npy"])
    assert [len(data[row]["npy"]) for row in (0, -1)] == [2, 3]


def test_every_damaged_byte_of_a_record_is_found(tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    [file] = (SAMPLES / "tfds").glob("*.tfrecord*")
    content = file.read_bytes()
    path = str(tmp_path / "x")
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(SaveError, match=f"{path}.*record"):
            list(iterate_records(path))
    for end in (1, 11, 12, 20, len(content) - 1):
        (tmp_path / "x").write_bytes(content[:end])
        with pytest.raises(SaveError, match="ends within record"):
            list(iterate_records(path))


def test_examples_that_are_broken() -> None:
    pytest.importorskip("google_crc32c")
    [file] = (SAMPLES / "tfds").glob("*.tfrecord*")
    record = next(iterate_records(str(file)))
    whole = parse_example(record)
    generator = np.random.default_rng(0)
    for _ in range(2000):
        broken = bytearray(record)
        for place in generator.integers(0, len(record), 3):
            broken[place] = generator.integers(0, 256)
        try:
            found = parse_example(bytes(broken[: generator.integers(1, len(record) + 1)]))
        except ValueError:
            continue
        assert isinstance(found, dict)
    assert parse_example(record).keys() == whole.keys()


def test_integers_and_numbers_that_are_not_packed() -> None:
    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    def example(feature: bytes) -> bytes:
        return field(1, field(1, field(1, b"a") + field(2, feature)))

    minus = b"\xff" * 9 + b"\x01"
    assert parse_example(example(field(3, b"\x08\x05\x08" + minus)))["a"].tolist() == [5, -1]
    assert parse_example(example(field(3, field(1, b"\x05\x80\x01" + minus))))["a"].tolist() == [5, 128, -1]
    assert parse_example(example(field(2, b"\x0d" + struct.pack("<f", 0.5))))["a"].tolist() == [0.5]
    assert parse_example(example(b""))["a"] is None
    with pytest.raises(ValueError, match="no end"):
        parse_example(example(field(3, field(1, b"\x80" * 3))))


def test_features_of_tensorflow_that_are_not_read(tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    source = tmp_path / "source"
    shutil.copytree(SAMPLES / "tfds", source)
    features = json.loads((source / "features.json").read_text())

    def write(name: str, feature: Any) -> None:
        changed = {**features["featuresDict"]["features"], name: feature}
        (source / "features.json").write_text(json.dumps({"featuresDict": {"features": changed}}))

    write("sound", {"pythonClassName": "x.Audio", "audio": {}})
    with pytest.raises(UnsupportedEntryError, match="'sound' is a Audio"):
        import_dataset(source, tmp_path / "data", "rlds")
    write("more", {"tensor": {"dtype": "float32", "shape": {"dimensions": ["2"]}, "encoding": "none"}})
    with pytest.raises(SaveError, match=r"record 0 is broken: 'more' has 0 numbers, not 2"):
        import_dataset(source, tmp_path / "data", "rlds")
    write("label", {"text": {}})
    with pytest.raises(SaveError, match="'label'"):
        import_dataset(source, tmp_path / "data", "rlds")
    (source / "features.json").write_text("[]")
    with pytest.raises(SaveError, match="does not describe features"):
        import_dataset(source, tmp_path / "data", "rlds")
    [file] = source.glob("*.tfrecord*")
    file.rename(source / "pictures-train.tfrecord-00000-of-00002")
    with pytest.raises(SaveError, match="1 of 2 files"):
        import_dataset(source, tmp_path / "data", "rlds")
    shutil.copy(source / "pictures-train.tfrecord-00000-of-00002", source / "pictures-test.tfrecord-00000-of-00001")
    with pytest.raises(SaveError, match=r"choose a split, as the pattern 'pictures-test.tfrecord\*'"):
        import_dataset(source, tmp_path / "data", "rlds")


def test_hdf5_that_leads_elsewhere(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "secret.hdf5", "w") as file:
        file["rewards"] = np.zeros(2)

    def write(change: Any) -> None:
        shutil.copy(SOURCES["minari"] / "data" / "main_data.hdf5", tmp_path / "x.hdf5")
        with h5py.File(tmp_path / "x.hdf5", "r+") as file:
            change(file)

    def link(file: Any) -> None:
        del file["episode_0/rewards"]
        file["episode_0/rewards"] = h5py.ExternalLink("secret.hdf5", "/rewards")

    def link_episode(file: Any) -> None:
        del file["episode_1"]
        file["episode_1"] = h5py.SoftLink("/episode_0")

    def lie_elsewhere(file: Any) -> None:
        del file["episode_0/rewards"]
        file["episode_0"].create_dataset("rewards", (5,), "f8", external=[(str(tmp_path / "secret.hdf5"), 0, 40)])

    def shorten(file: Any) -> None:
        del file["episode_0/actions"]
        file["episode_0/actions"] = np.zeros(4)

    def name(file: Any) -> None:
        file["episode_0/other"] = np.zeros(5)

    for change, why in (
        (link, "'episode_0/rewards' is a link"), (link_episode, "'episode_1' is a link"),
        (lie_elsewhere, "'episode_0/rewards' has no rows of its own"), (shorten, "'actions' has 4 items"),
        (name, "'other', which is not one of Minari"),
    ):  # fmt: skip
        write(change)
        with pytest.raises((SaveError, UnsupportedEntryError), match=why):
            import_dataset(tmp_path / "x.hdf5", tmp_path / "data", "minari")
    (tmp_path / "x.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(SaveError, match="x.hdf5"):
        import_dataset(tmp_path / "x.hdf5", tmp_path / "data", "minari")
    with pytest.raises(FileNotFoundError, match="no data set of Minari"):
        import_dataset(tmp_path, tmp_path / "data", "minari")


def test_other_versions_and_broken_data_sets_of_lerobot(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source = tmp_path / "source"
    shutil.copytree(SOURCES["lerobot"], source)
    info = json.loads((source / "meta" / "info.json").read_text())

    def write(**changes: Any) -> None:
        (source / "meta" / "info.json").write_text(json.dumps({**info, **changes}))

    def fails(why: str, decode: bool = False) -> None:
        with pytest.raises((SaveError, ValueError), match=why):
            import_dataset(source, tmp_path / "data", "lerobot", decode=decode)

    write(codebase_version="v2.1")
    fails("version 'v2.1'.*convert_dataset")
    write(features={"../../x": {"dtype": "video", "shape": [1, 1, 3]}})
    fails("features of the names")
    write(features={**info["features"], "action": {"dtype": "float32", "shape": [3]}})
    fails(r"10 rows of shape \[3\]")
    write(features={name: each for name, each in info["features"].items() if name != "action"})
    fails("'action'.*no features")
    write(fps="many")
    fails("does not describe a data set")
    write()
    if "av" in sys.modules or pytest.importorskip("av"):
        [video] = source.glob("videos/*/*/*.mp4")
        video.write_bytes(video.read_bytes()[:600])
        fails("file-000.mp4", decode=True)
        video.write_bytes(b"#EXTM3U\n/etc/passwd\n")
        fails("file-000.mp4", decode=True)
    [episodes] = source.glob("meta/episodes/*/*.parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(episodes)
    parquet.write_table(table.slice(1), episodes)
    fails(r"does not describe the episodes \[0\]")
    shutil.rmtree(source / "data")
    fails("no files data/")
    assert not (tmp_path / "data").exists()
