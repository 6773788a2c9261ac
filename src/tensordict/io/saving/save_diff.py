"""Comparing what is at two paths or URLs."""

from __future__ import annotations

from tensordict.io.formats.opening import describe_save
from tensordict.io.remote.remote_saves import CacheDir
from tensordict.io.remote.urls import StorageOptions
from tensordict.io.saving.comparing import Difference, Tolerance, differences
from tensordict.io.saving.progress import progress_bar, quiet
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
    """Where two saves differ, which may be of different formats, or data sets; read piece by piece.

    Keys, kinds of containers, batch sizes, names of dims, dtypes, shapes, values, and then the elements are compared;
    not how a data set is cut into shards.

    Args:
        a, b: folders, files, or URLs.
        rtol, atol: elements are the same when `abs(a - b) <= atol + rtol * abs(b)`.
        equal_nan: take NaN for equal to NaN.
        progress: show a bar (needs tqdm); by default on terminals and in notebooks, after a second.
        storage_options, cache_dir: of URLs, as in :meth:`TensorDict.load`.

    Returns:
        the differences, in the order of `a`; none when they are the same. Each has the `key`, `what` differs
        ("missing" in `b`, "additional", "kind", "batch size", "names", "stack dim", "dtype", "shape", "value" or
        "elements"), what it is in `one` and the `other`, and for elements how many are `differing`, of what `count`,
        and by how much at most, `max_abs`.

    Raises:
        FileNotFoundError: there is nothing at a path.
        SaveError: a save is of no format that is known, or broken.

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
    """
    with quiet(progress):
        one, other = (describe_save(path, storage_options=storage_options, cache_dir=cache_dir)[1] for path in (a, b))
    total = sum(node.nbytes for _, node in walk(one) if isinstance(node, LeafSpec))
    with progress_bar(progress, "comparing", total) as shown:
        return list(differences(one, other, Tolerance(rtol, atol, equal_nan), progress=shown))
