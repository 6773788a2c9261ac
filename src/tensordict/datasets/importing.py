"""Importing rows from the data sets of other libraries, some at a time, to a data set (`import_dataset`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any, Literal

from tensordict.core.exceptions import SaveError, SchemaError, add_note
from tensordict.datasets.dataset import Dataset
from tensordict.datasets.writer import DatasetWriter
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import is_url
from tensordict.memory import files
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import local_path

Format = Literal["lerobot", "rlds", "webdataset", "minari", "hf"]


def import_dataset(
    source: Any, path: PathLike, format: Format, *, decode: bool | str = False, **options: Any
) -> Dataset:
    """Import the rows of a data set of another library, some at a time, to a data set of this package.

    Example:
        >>> import tempfile, datasets, tensordict.datasets
        >>> rows = datasets.Dataset.from_dict({"x": [[1, 2], [3, 4]], "text": ["a", "b"]})
        >>> folder = tempfile.TemporaryDirectory()
        >>> tensordict.datasets.import_dataset(rows, folder.name + "/data", "hf")["x"].tolist()
        [[1, 2], [3, 4]]

    Memory holds at most 1,024 rows or about 16 MiB of the source at a time (of RLDS, one episode). A local folder
    appears when it is complete. At a URL, rows that were written before an error stay.

    Args:
        source: the data set, by format:

            - "lerobot": the folder of a data set of LeRobot v3.0. Rows are steps; "observation.state" becomes the
              nested key `("observation", "state")`, and `"task"` the text of the task.
            - "rlds": the folder of one split of a data set of TensorFlow Datasets with its `features.json`, or a
              pattern of its TFRecord files. Rows are the steps of RLDS, with `"episode_index"` and the other entries of
              their episode, or the examples of other data sets.
            - "webdataset": tar files: one, a folder, a pattern, or the URL of one of these. Rows are samples, with the
              endings of the members as keys, and `"__key__"`.
            - "minari": the folder of a data set of Minari in HDF5. Rows are transitions with `"observation"`,
              `"action"`, `("next", "observation")`, `("next", "reward")`, ..., and `"episode"`.
            - "hf": a `datasets.Dataset` or `IterableDataset` of Hugging Face. Labels are codes.
        path: the folder of the new data set, or its URL.
        format: the format of the source.
        decode: decode images, and the videos of LeRobot, to uint8 leaves of shape (channels, height, width) in each
            row. `True` keeps the channels of images, a mode of Pillow such as "RGB" converts. By default, images are
            ragged uint8 leaves with the bytes of their files, which :func:`decode_images` decodes when they are used.
            Videos are containers of `"path"`, the file in the source, and `"timestamp"`, the seconds in it, of a frame.
        options: of :class:`DatasetWriter`.

    Returns:
        the new data set.

    Raises:
        ModuleNotFoundError: a library is missing; the error names the extra.
        SaveError: the source is broken, pickled, or another format; or `path` exists already.
        SchemaError: rows have other shapes than the first ones; the error names the entry.
        UnsupportedEntryError: an entry has no form in a data set; the error names it.
    """
    access = Access.of(options.get("storage_options"))
    # Each module is imported when it is needed: `import tensordict` imports none of them.
    if format == "lerobot":
        from tensordict.convert.lerobot import read_lerobot

        parts = read_lerobot(source, decode)
    elif format == "rlds":
        from tensordict.convert.rlds import read_rlds

        parts = read_rlds(source, decode)
    elif format == "webdataset":
        from tensordict.convert.webdataset import read_webdataset

        parts = read_webdataset(source, decode, access)
    elif format == "minari":
        from tensordict.convert.minari import read_minari

        parts = read_minari(source)
    elif format == "hf":
        from tensordict.convert.huggingface import iterate_dataset

        parts = iterate_dataset(source, decode)
    else:
        raise ValueError(f"the format is 'lerobot', 'rlds', 'webdataset', 'minari' or 'hf', got {format!r}")
    try:
        count = write_parts(parts, path, **options)
    except SchemaError as error:
        add_note(
            error,
            "pass ragged=[key] if rows of an entry differ in their first dim; images of different sizes are best "
            "imported without decode=",
        )
        raise
    if not count:
        raise SaveError(f"{source!r} has no rows, so there is nothing to import")
    return Dataset(path, access=access)


def write_parts(parts: Iterable[Any], path: PathLike, **options: Any) -> int:
    """Write containers of rows to a new data set and return the number of rows.

    A local folder appears only when it is complete. Without rows there is none.

    Raises:
        SaveError: the folder exists already.
    """
    target = path if is_url(path) else local_path(path)
    if not is_url(target) and os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise SaveError(f"{target!r} exists already: choose another folder, or remove it first")
    made = target if is_url(target) else files.temporary_name(os.path.dirname(target))
    try:
        with DatasetWriter(made, **options) as writer:
            for part in parts:
                writer.extend(part)
        if made != target and writer.rows:
            os.rename(made, target)
    except BaseException:
        if made != target:
            shutil.rmtree(made, ignore_errors=True)
        raise
    return writer.rows
