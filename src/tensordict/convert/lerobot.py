"""Reading data sets of LeRobot, version 3.0, as rows of steps; see https://huggingface.co/docs/lerobot/lerobot-dataset-v3.

Parquet files have the steps, other Parquet files tell where an episode begins in the videos, and `meta/info.json` has
the features.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensordict.convert import huggingface
from tensordict.convert.columns import TableOptions
from tensordict.convert.images import ROWS, Decode
from tensordict.convert.input_files import SourceFile
from tensordict.convert.parquet import iterate_batches
from tensordict.convert.records import NBYTES, make_values
from tensordict.core import makers
from tensordict.core.exceptions import SaveError
from tensordict.core.extras import require
from tensordict.core.json_text import parse_json
from tensordict.io import checks
from tensordict.io.remote.remote_saves import Access

_VERSION = "v3."
_SEPARATOR = "."


@dataclass(frozen=True)
class _Feature:
    """A feature of steps. It has the attributes that a feature of Hugging Face has."""

    dtype: str
    shape: tuple[int, ...]


def read_lerobot(source: Any, decode: Decode) -> Iterator[Any]:
    """Yield the steps of all episodes, some at a time.

    Args:
        source: the folder of the data set.
        decode: decode images and videos. Otherwise a video is a container of the path of its file in the data set and
            the time of the frame in it.
    """
    root = os.fspath(source)
    features, fps = _read_info(os.path.join(root, "meta", "info.json"))
    images = {
        name: _Feature("PIL.Image.Image", ()) if each.dtype == "image" else each for name, each in features.items()
    }
    shapes = {name: each.shape for name, each in features.items() if each.dtype not in ("image", "video", "string")}
    shapes = {name: shape for name, shape in shapes.items() if shape not in ((), (1,))}
    videos = [name for name, each in features.items() if each.dtype == "video"]
    tasks = _read_tasks(os.path.join(root, "meta", "tasks.parquet"))
    episodes = _read_episodes(root, videos)
    frames = {name: _Frames(root, name, features[name].shape, 0.5 / fps) for name in videos}
    pixels = sum(math.prod(each.shape) for each in features.values() if each.dtype in ("image", "video"))
    step = max(1, min(ROWS, NBYTES // pixels)) if decode and pixels else ROWS
    options = TableOptions(separator=_SEPARATOR, metadata=False)
    pa = require("pyarrow", "tabular")
    for _, batch in iterate_batches(_find_files(root, "data"), step, options):
        table = pa.Table.from_batches([batch])
        if missing := [name for name in table.column_names if name not in features]:
            raise SaveError(f"{root!r}: the columns {missing} are no features in meta/info.json")
        rows = huggingface.container_of_rows(table, images, shapes, options, decode)
        if tasks:
            texts = [tasks.get(index) for index in rows.get("task_index").tolist()]
            rows.set("task", make_values(texts))
        for name, video in frames.items():
            numbers = rows.get("episode_index").tolist()
            if missing := sorted(set(numbers) - episodes.keys()):
                raise SaveError(f"{root!r}: meta/episodes does not describe the episodes {missing[:5]} of its rows")
            places = [episodes[number][name] for number in numbers]
            starts = torch.tensor([start for _, start in places], dtype=torch.float64)
            paths, times = [path for path, _ in places], starts + rows.get("timestamp").double()
            if decode:
                entry = video.read(paths, times.tolist())
            else:
                entries = {"path": make_values(paths), "timestamp": times}
                entry = makers.dense(entries, rows.batch_size, None, None)
            rows.set(tuple(name.split(_SEPARATOR)), entry)
        yield rows


def _read_info(path: str) -> tuple[dict[str, _Feature], float]:
    """Return the features, and the frames of a second of video."""
    with open(path, "rb") as file:
        try:
            info = parse_json(file.read())
            if not str(info["codebase_version"]).startswith(_VERSION):
                raise SaveError(
                    f"{path!r} is of the version {info['codebase_version']!r}, and v3.0 is read: convert the data set "
                    "with python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
                )
            features = {
                name: _Feature(str(each["dtype"]), tuple(checks.sizes(each["shape"], f"the shape of {name!r}")))
                for name, each in info["features"].items()
            }
            if bad := [name for name in features if not all(name.split(_SEPARATOR)) or "/" in name]:
                raise SaveError(f"{path!r} has features of the names {bad}")
            return features, float(info["fps"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SaveError(f"{path!r} does not describe a data set: {type(error).__name__}: {error}") from error


def _find_files(root: str, folder: str) -> list[SourceFile]:
    """Return the Parquet files of a folder in the order of their rows."""
    found = sorted(glob.glob(os.path.join(glob.escape(root), folder, "chunk-*", "file-*.parquet")))
    if not found:
        raise SaveError(f"{root!r} has no files {folder}/chunk-000/file-000.parquet")
    return [SourceFile(path, Access.of(None)) for path in found]


def _read_tasks(path: str) -> dict[int, str]:
    """Return the texts of the tasks by their numbers. The column of texts is the index of the data frame."""
    if not os.path.exists(path):
        return {}
    tasks: dict[int, str] = {}
    for _, batch in iterate_batches([SourceFile(path, Access.of(None))], ROWS, TableOptions()):
        columns = batch.to_pydict()
        numbers = columns.pop("task_index", [])
        for texts in columns.values():
            tasks.update(zip(numbers, map(str, texts)))
    return tasks


def _read_episodes(root: str, videos: list[str]) -> dict[int, dict[str, tuple[str, float]]]:
    """Return for each episode and video the path of the file in the data set, and the time at which it begins there."""
    if not videos:
        return {}
    names = [f"videos/{name}/{part}" for name in videos for part in ("chunk_index", "file_index", "from_timestamp")]
    episodes: dict[int, dict[str, tuple[str, float]]] = {}
    options = TableOptions(columns=["episode_index", *names])
    for _, batch in iterate_batches(_find_files(root, "meta/episodes"), ROWS, options):
        for row in batch.to_pylist():
            episodes[row["episode_index"]] = {
                name: (
                    f"videos/{name}/chunk-{row[f'videos/{name}/chunk_index']:03d}"
                    f"/file-{row[f'videos/{name}/file_index']:03d}.mp4",
                    row[f"videos/{name}/from_timestamp"],
                )
                for name in videos
            }
    return episodes


class _Frames:
    """Decodes frames of videos, one file at a time; best in the order of their times.

    Args:
        root: the folder of the data set.
        name: the feature, for errors.
        shape: the height, the width and the number of channels of a frame.
        tolerance: how far the time of a frame may be from the time that is asked for, in seconds.
    """

    def __init__(self, root: str, name: str, shape: tuple[int, ...], tolerance: float) -> None:
        self._root, self._name, self._shape, self._tolerance = root, name, shape, tolerance
        self._path = ""
        self._file: Any = None
        self._frames: Iterator[Any] = iter(())
        self._time, self._pixels = -math.inf, torch.empty(0)

    def read(self, paths: list[str], times: list[float]) -> Tensor:
        """Return the frames at some times as a leaf of uint8 of shape (rows, channels, height, width)."""
        return torch.stack([self._read_frame(path, time) for path, time in zip(paths, times, strict=True)])

    def _read_frame(self, path: str, time: float) -> Tensor:
        library = require("av", "video")
        where = f"{os.path.join(self._root, path)!r}"
        try:
            if path != self._path or time < self._time - self._tolerance:
                self._open(library, path)
            while not self._time >= time - self._tolerance:
                frame = next(self._frames, None)
                if frame is None:
                    break
                self._time = frame.time
                if self._time >= time - self._tolerance:
                    self._pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1).contiguous()
        except (OSError, ValueError, library.FFmpegError) as error:
            raise SaveError(f"{where} cannot be decoded: {error}") from error
        if not abs(self._time - time) <= self._tolerance:
            raise SaveError(f"{where} has no frame at {time:.3f} s of {self._name!r}")
        height, width, channels = self._pixels.shape[1], self._pixels.shape[2], self._pixels.shape[0]
        if (height, width, channels) != self._shape:
            raise SaveError(
                f"{where} has frames of {height} x {width} x {channels}, and {list(self._shape)} is declared"
            )
        return self._pixels

    def _open(self, library: Any, path: str) -> None:
        if self._file is not None:
            self._file.close()
        # Only this format: others of FFmpeg may open further files.
        self._file = library.open(os.path.join(self._root, path), format="mp4")
        self._path, self._frames, self._time = path, self._file.decode(video=0), -math.inf
