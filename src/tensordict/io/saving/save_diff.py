"""`tensordict.diff`, which compares the saves at two paths or URLs."""

from __future__ import annotations

from tensordict.io.formats.opening import describe_save
from tensordict.io.remote.remote_saves import CacheDir
from tensordict.io.remote.urls import StorageOptions
from tensordict.io.saving.comparing import Difference, Tolerance, find_differences
from tensordict.io.saving.progress import hide_bars, progress_bar
from tensordict.io.specification import LeafSpec, walk
from tensordict.memory.mapped import PathLike


def diff(
    a: PathLike,
    b: PathLike,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    equal_nan: bool = False,
    progress: bool | None = None,
    storage_options: StorageOptions | None = None,
    cache_dir: CacheDir | None = None,
) -> list[Difference]:
    """Compare two saves or data sets, which may have different formats, without loading them whole.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, diff
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict(x=torch.arange(3), y=torch.ones(2)).save(folder + "/a")
        ...     _ = TensorDict(x=torch.tensor([0, 1, 5]), y=torch.ones(2)).save(folder + "/b.tdz")
        ...     [found] = diff(folder + "/a", folder + "/b.tdz")
        >>> found.key, found.what, found.differing, found.max_abs
        (('x',), 'elements', 1, 3)

    The keys are compared, and for each key the kind of container, batch size, names of dims, dtype, shape, value, and
    then the elements, piece by piece. The division of a data set into shards is not compared.

    Args:
        a, b: folders, files, or URLs.
        rtol, atol: elements count as equal if `abs(a - b) <= atol + rtol * abs(b)`.
        equal_nan: count NaN as equal to NaN.
        progress: show a bar (needs tqdm); by default on terminals and in notebooks, after a second.
        storage_options, cache_dir: for URLs, as in :meth:`TensorDict.load`.

    Returns:
        the differences, in the order of `a`; an empty list for equal saves. Each has the `key`; `what` differs
        ("missing" in `b`, "additional", "kind", "batch size", "names", "stack dim", "dtype", "shape", "value" or
        "elements"); the kind, shape, ... in `one` and the `other`; and for elements the number that are `differing`,
        their `count`, and the largest absolute difference `max_abs`.

    Raises:
        FileNotFoundError: a path does not exist.
        SaveError: a save has an unknown format, or is broken.
    """
    with hide_bars(progress):
        one, other = (describe_save(path, storage_options=storage_options, cache_dir=cache_dir)[1] for path in (a, b))
    total = sum(node.nbytes for _, node in walk(one) if isinstance(node, LeafSpec))
    with progress_bar(progress, "comparing", total) as shown:
        return list(find_differences(one, other, Tolerance(rtol, atol, equal_nan), progress=shown))
