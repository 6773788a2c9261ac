"""`save` and `load` by the suffix of a name, as the command `tensordict convert` does."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensordict
from tensordict import PersistentTensorDict, TensorClass, TensorDict, lazy_stack, load, save
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.formats.detect import detect_format
from tensordict.io.formats.opening import FORMATS, SUFFIXES, TABLES, format_of_name
from tensordict.io.remote.urls import Remote
from tensordict_cli import commands
from tensordict_cli.runners import main

NAMES = sorted(SUFFIXES) if sys.version_info >= (3, 11) else sorted({*SUFFIXES} - {".zarr"})
FILES = [suffix for suffix in NAMES if suffix not in ("", ".tdz")]


class Point(TensorClass):
    """A tensorclass that is saved."""

    x: torch.Tensor


def make(value: int = 0) -> TensorDict:
    return TensorDict({"a": torch.arange(3) + value, "word": ["x", "y", "z"]}, [3])


def close(container: object) -> None:
    if isinstance(container, PersistentTensorDict):
        container.close()


def content(path: Any, **options: Any) -> list[Any]:
    loaded = load(path, **options)
    found = loaded.to_tensordict()
    close(loaded)
    return [found["a"].tolist(), list(found["word"])]


@pytest.mark.parametrize("suffix", NAMES)
def test_the_suffix_says_the_format(tmp_path: pathlib.Path, suffix: str) -> None:
    calls: list[Callable[[str], object]] = [
        lambda path: make().save(path),
        lambda path: make().dumps(path),
        lambda path: save(make(), path),
        lambda path: tensordict.save(make(), pathlib.Path(path)),
        lambda path: make().save(path, return_early=True).result(),
    ]
    for number, call in enumerate(calls):
        path = f"{tmp_path}/{number}{suffix.upper()}"
        close(call(path))
        assert (tmp_path / f"{number}{suffix.upper()}").is_dir() == (suffix in ("", ".zarr"))
        if suffix not in TABLES:
            assert detect_format(path) == SUFFIXES[suffix]
        assert content(path) == [[0, 1, 2], ["x", "y", "z"]]
        assert type(TensorDict.load(path)).__name__ in ("TensorDict", "PersistentTensorDict")


@pytest.mark.parametrize("suffix", NAMES)
def test_the_command_writes_the_same(tmp_path: pathlib.Path, suffix: str) -> None:
    make().save(tmp_path / "source")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / f"x{suffix}")]) == 0
    assert content(tmp_path / f"x{suffix}") == content(tmp_path / "source")
    if suffix in TABLES:
        assert main(["convert", str(tmp_path / f"x{suffix}"), str(tmp_path / "dataset")]) == 0
        assert load(tmp_path / "dataset")["a"].tolist() == [0, 1, 2]
    assert set(commands.FORMATS) == set(FORMATS)


@pytest.mark.parametrize("suffix", NAMES)
def test_at_urls(suffix: str) -> None:
    url = f"memory://suffixes/{suffix or 'none'}/x{suffix}"
    close(make().save(url))
    assert content(url) == content(url, device="cpu") == [[0, 1, 2], ["x", "y", "z"]]
    with pytest.raises(SaveError, match="overwrite=True"):
        make(7).save(url)
    close(make(7).save(url, overwrite=True))
    assert content(url)[0] == [7, 8, 9]
    Remote("memory://suffixes").delete([file.name for file in Remote("memory://suffixes").files()])


@pytest.mark.parametrize("suffix", FILES)
def test_nothing_else_is_replaced(tmp_path: pathlib.Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"notes of mine")
    with pytest.raises((SaveError, OSError), match="overwrite=True|which is a file"):
        make().save(path)
    assert path.read_bytes() == b"notes of mine"
    if suffix != ".zarr":
        close(make().save(path, overwrite=True))
        assert content(path)[0] == [0, 1, 2]


@pytest.mark.parametrize("suffix", FILES)
def test_a_folder_of_such_a_name_is_still_a_folder(tmp_path: pathlib.Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    for write in (
        lambda: make().memmap(path),
        lambda: make().save(path, archive=False),
        lambda: make().save(f"{path}/"),
    ):
        write()
        assert detect_format(path) == "directory" and content(path)[0] == [0, 1, 2]
    with pytest.raises((OSError, RuntimeError)):
        make(7).save(path)
    assert content(path)[0] == [0, 1, 2]
    if suffix in TABLES:
        assert main(["convert", str(path), str(tmp_path / "y")]) == 0


@pytest.mark.parametrize("suffix", [".csv", ".h5"])
def test_a_folder_of_such_a_name_at_a_url(suffix: str) -> None:
    url = f"memory://suffixes/folder{suffix}"
    make().memmap(url)
    assert content(url)[0] == [0, 1, 2]
    Remote("memory://suffixes").delete([file.name for file in Remote("memory://suffixes").files()])


def test_other_suffixes_are_names_of_folders(tmp_path: pathlib.Path) -> None:
    for name in ("run.1", "v0.5", "x.ckpt", "with.h5.dots", ".hidden"):
        make().save(tmp_path / name)
        assert detect_format(tmp_path / name) == "directory"
    assert main(["convert", str(tmp_path / "run.1"), str(tmp_path / "y.ckpt")]) == 2


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".PT"])
def test_files_of_torch(tmp_path: pathlib.Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"x{suffix}"
    with pytest.raises(UnsupportedEntryError, match=r"torch\.save.*torch\.load"):
        make().save(path)
    assert not path.exists()
    torch.save(make(), path)
    with pytest.raises(SaveError, match=r"torch\.load"):
        load(path)
    path.write_bytes(b"an older form")
    with pytest.raises(SaveError, match=r"torch\.load"):
        load(path)
    make().save(tmp_path / "source")
    assert main(["convert", str(tmp_path / "source"), str(path), "--force"]) == 2
    assert "torch.save" in capsys.readouterr().err
    # Asked for, it is a name like any other.
    assert detect_format(make().save(tmp_path / f"y{suffix}", archive=False).saved_path) == "directory"


OPTIONS: dict[str, Any] = {
    "num_threads": 2, "compression": "gzip", "checksum": True, "durable": True, "allow_pickle": True,
    "share_non_tensor": True, "robust_key": False,
}  # fmt: skip
TAKEN = {
    ".consolidated": {"num_threads", "checksum", "durable"},
    ".safetensors": {"num_threads", "checksum", "durable"},
    ".h5": {"compression", "durable"},
    ".hdf5": {"compression", "durable"},
    ".zarr": {"compression", "durable", "allow_pickle"},
    ".parquet": {"compression", "durable"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("suffix", FILES)
def test_options_that_a_format_does_not_have(tmp_path: pathlib.Path, suffix: str, option: str) -> None:
    path = tmp_path / f"x{suffix}"
    if option in TAKEN.get(suffix, ()):
        close(make().save(path, **{option: OPTIONS[option]}))
        assert content(path)[0] == [0, 1, 2]
        return
    for early in (False, True):
        with pytest.raises(ValueError, match=f"{SUFFIXES[suffix]!r} do not take {option}=") as error:
            make().save(path, return_early=early, **{option: OPTIONS[option]})
        assert "'directory'" in str(error.value) or option == "compression"
    assert not path.exists()


def test_bad_values_of_options_are_told_as_such(tmp_path: pathlib.Path) -> None:
    for suffix, options in ((".safetensors", {"checksum": "sha999"}), (".h5", {"compression": "zip"})):
        with pytest.raises(ValueError, match="sha999|zip") as error:
            make().save(tmp_path / f"x{suffix}", **options)  # type: ignore[arg-type]
        assert "cannot hold" not in str(error.value)


UNFIT: dict[str, tuple[Any, list[str]]] = {
    "ragged": (
        TensorDict({"r": torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=torch.jagged)}, [2]),
        [".h5", ".csv"],
    ),
    "uneven": (lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2))]), [".h5", ".zarr", ".csv"]),
    "values": (TensorDict({"a": torch.ones(2), "odd": {1, 2}}), [".h5", ".zarr", ".safetensors", ".consolidated"]),
    "no rows": (TensorDict(a=torch.ones(())), [".parquet", ".csv", ".json", ".jsonl"]),
    "nested": (TensorDict({"a": {"b": torch.ones(2)}}, [2]), [".csv"]),
    "more dims": (TensorDict({"a": torch.ones(2, 3)}, [2]), [".csv"]),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_a_format_cannot_hold(tmp_path: pathlib.Path, what: str) -> None:
    container, suffixes = UNFIT[what]
    for suffix in filter(NAMES.__contains__, suffixes):
        for path in (f"{tmp_path}/x{suffix}", f"memory://suffixes/unfit/x{suffix}"):
            close(make().save(path, overwrite=True))
            for overwrite in (True,) if path.startswith("memory") else (False, True):
                with pytest.raises(UnsupportedEntryError, match=r"cannot hold.*'\.tdz'") as error:
                    container.save(path, overwrite=overwrite)
                assert repr(SUFFIXES[suffix]) in str(error.value)
            assert content(path)[0] == [0, 1, 2]
    Remote("memory://suffixes").delete([file.name for file in Remote("memory://suffixes").files()])


def test_classes_come_back(tmp_path: pathlib.Path) -> None:
    point = Point(x=torch.arange(3), batch_size=[3])
    for suffix in (".h5", ".safetensors", ".consolidated"):
        saved = point.save(tmp_path / f"x{suffix}")
        assert isinstance(saved, Point)
        close(saved._tensordict)
        loaded = Point.load(tmp_path / f"x{suffix}")
        assert isinstance(loaded, Point) and loaded.x.tolist() == [0, 1, 2]


def test_tables_of_several_files(tmp_path: pathlib.Path) -> None:
    make().save(tmp_path / "1.csv")
    make(3).save(tmp_path / "2.csv")
    assert load(tmp_path / "*.csv")["a"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(FileNotFoundError, match="none.csv"):
        load(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="keys"):
        load(tmp_path / "1.csv", keys=["a"])
    # The content of a save says what it is.
    make().to_safetensors(tmp_path / "x.csv")
    assert content(tmp_path / "x.csv")[0] == [0, 1, 2]


def test_one_table_of_suffixes() -> None:
    assert format_of_name("s3://bucket/x.ZARR") == "zarr" and format_of_name("x.zarr/") == "directory"
    assert format_of_name("x.unknown") is None and format_of_name(pathlib.Path("a.b/x")) == "directory"
