"""How Zarr arrays are cut into chunks, and the search for missing and broken chunks, for `Store.find_damage`.

Zarr reads a missing chunk as the fill value, which may be intended. An attribute of the array records the shape that a
save wrote. Its chunks must exist.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, joined, path_of
from tensordict.io.stores.zarr_raw import is_plain
from tensordict.memory import files

if TYPE_CHECKING:
    from tensordict.io.stores.zarr_nodes import Nodes

# The position of a chunk in the grid.
_Place = tuple[int, ...]
# These codecs keep the number of bytes; the compressors can add a few.
_SAME_LENGTH = ("bytes", "transpose", "endian", "None")
_COMPRESSORS = ("gzip", "zstd", "blosc", "zlib", "lz4", "bz2", "lzma", "shuffle")
_HEAD = 64 << 10
# The number of chunks that a problem names.
_SHOWN = 3
# The size of a chunk with `chunks="rows"`, in bytes.
_ROWS = 1 << 20


def find_damaged_chunks(
    nodes: Nodes, at: str, document: Mapping[str, Any], array: Any, written: Sequence[int] | None, num_threads: int
) -> Iterator[str]:
    """Look for chunks that are missing or broken.

    Args:
        nodes: the store.
        at: the path of the array in it.
        document: its `zarr.json`.
        array: the array of zarr over it.
        written: the shape that a save has written; `None` if nothing is known, and any chunk may be missing.
        num_threads: the number of threads that decode.

    Returns:
        a sentence for missing chunks, and one for broken ones.

    Raises:
        SaveError: `written` does not have the dims of the array.
    """
    if written is not None and (len(written) != array.ndim or min(written, default=0) < 0):
        raise SaveError(f"the shape {list(written)} that was written does not fit its shape {list(array.shape)}")
    # A shard is one object of the store.
    lengths = array.shards or array.chunks
    grid = _count_chunks(array.shape, lengths)
    needed = None if written is None else _count_chunks(map(min, written, array.shape), lengths)
    present = _find_present(nodes, at, array, grid)
    if needed is not None:
        found = sum(all(map(int.__lt__, place, needed)) for place in present)
        if count := math.prod(needed) - found:
            # The grid may be larger than any memory.
            every = (_place_of(number, needed) for number in range(math.prod(needed)))
            places = (place for place in every if place not in present)
            keys = map(array.metadata.encode_chunk_key, itertools.islice(places, _SHOWN))
            yield (
                f"{count:,} of the {math.prod(needed):,} chunks that were written are missing, and read as "
                f"{array.fill_value}: {_shorten([repr(key) for key in keys], count)}"
            )
    broken: list[str] = []
    nbytes = math.prod(lengths) * array.dtype.itemsize if is_plain(document) else None

    def check(place: _Place, key: str) -> None:
        try:
            if array.shards and not nodes.content.size_of(f"{at}/{key}"):
                # Zarr takes it for one of the fill value.
                raise ValueError("it is empty")
            if nbytes is None:
                array[tuple([slice(i * length, (i + 1) * length) for i, length in zip(place, lengths, strict=True)])]
            elif (size := nodes.content.size_of(f"{at}/{key}")) != nbytes:
                raise ValueError(f"it has {size} bytes, and not {nbytes}")
        except Exception as error:
            # Codecs raise what they like.
            broken.append(f"{key!r} ({error})")

    jobs: list[Callable[[], None]] = [partial(check, place, key) for place, key in sorted(present.items())]
    files.run_all(jobs, num_threads)
    if broken:
        yield f"{len(broken):,} of its chunks cannot be decoded: {_shorten(sorted(broken)[:_SHOWN], len(broken))}"


def find_longest_chunk(document: Mapping[str, Any], array: Any) -> int | None:
    """Return how many bytes a chunk of an array, or a shard, can have; `None` if its elements have any length.

    Args:
        document: its `zarr.json`, or `.zarray`.
        array: the array of zarr over it.
    """
    if array.dtype.kind not in "biufcmMSUV":
        return None
    codecs = document.get("codecs") or [*(document.get("filters") or ()), document.get("compressor")]
    return _grow_by(codecs, array.shards or array.chunks, array.dtype.itemsize)


def _grow_by(codecs: Collection[Any], shape: Sequence[int], itemsize: int) -> int:
    """Return the most bytes that codecs make of so many elements."""
    nbytes = math.prod(shape) * itemsize
    for codec in codecs:
        found = codec if isinstance(codec, dict) else {"name": codec}
        name = str(found.get("name") or found.get("id")).removeprefix("numcodecs.")
        if name == "sharding_indexed":
            inner = found["configuration"]
            chunks = _count_chunks(shape, inner["chunk_shape"])
            # The index has two numbers of 8 bytes for each chunk.
            index = _grow_by(inner.get("index_codecs") or (), (*chunks, 2), 8)
            nbytes = math.prod(chunks) * _grow_by(inner["codecs"], inner["chunk_shape"], itemsize) + index
        elif name == "crc32c":
            nbytes += 4
        elif name in _COMPRESSORS:
            # Random bytes get a little longer.
            nbytes = 2 * nbytes + _HEAD
        elif name not in _SAME_LENGTH:
            # Filters can make each byte an element of 16.
            nbytes = 16 * nbytes + _HEAD
    return nbytes


def _count_chunks(shape: Sequence[int] | Iterator[int], lengths: Sequence[int]) -> list[int]:
    """How many chunks there are along each dim."""
    return [-(-n // length) for n, length in zip(shape, lengths, strict=True)]


def _place_of(number: int, grid: Sequence[int]) -> _Place:
    """The position of the chunk of this number, in C order."""
    place = []
    for count in reversed(grid):
        number, rest = divmod(number, count)
        place.append(rest)
    return tuple(reversed(place))


def _find_present(nodes: Nodes, at: str, array: Any, grid: Sequence[int]) -> dict[_Place, str]:
    """The chunks that are there, with their keys below the array."""
    keys = nodes.content.list_keys(at) if nodes.store.supports_listing else None
    encode: Callable[[_Place], str] = array.metadata.encode_chunk_key
    if keys is None:
        named = {place: encode(place) for place in itertools.product(*map(range, grid))}
        return {place: key for place, key in named.items() if nodes.content.size_of(f"{at}/{key}") is not None}
    found: dict[_Place, str] = {}
    for key in keys:
        place = tuple(map(int, re.findall(r"\d+", key))) if grid else ()
        if len(place) == len(grid) and all(map(int.__lt__, place, grid)) and encode(place) == key:
            found[place] = key
    return found


def _shorten(names: Collection[str], count: int) -> str:
    more = f", and {count - len(names):,} more" if count > len(names) else ""
    return ", ".join(names) + more


# --- how an array is cut ----------------------------------------------------------------------------------------------


def make_layout(options: Mapping[str, Any], key: Path, shape: tuple[int, ...], itemsize: int) -> dict[str, Any]:
    """Return the arguments of `zarr.create_array` for an entry; by default one uncompressed chunk."""
    whole = tuple(map(max, shape, itertools.repeat(1)))
    if not options:
        return {"chunks": whole, "compressors": None}
    found = {name: _pick_option(value, key) for name, value in options.items()}
    found = {name: value for name, value in found.items() if value is not None}
    chunks, shards = found.pop("chunks", whole), found.pop("shards", None)
    if chunks == "rows":
        chunks = max(_ROWS // max(math.prod(whole[1:]) * itemsize, 1), 1)
    found["chunks"] = _fit_sizes(chunks, whole, key, "chunks")
    if shards is not None and shape:
        # A shard of Zarr consists of whole chunks.
        sizes = zip(_fit_sizes(shards, whole, key, "shards"), found["chunks"], strict=True)
        found["shards"] = tuple([-(-size // chunk) * chunk for size, chunk in sizes])
    found.setdefault("compressors", None)
    return found


def _pick_option(value: Any, key: Path) -> Any:
    """Return the option for an entry. A dict has options by key; the key of a container applies to its entries."""
    if not isinstance(value, dict) or "name" in value:
        return value
    paths = {path_of(name): option for name, option in value.items()}
    return next((paths[key[:length]] for length in range(len(key), 0, -1) if key[:length] in paths), None)


def _fit_sizes(given: Any, shape: tuple[int, ...], key: Path, what: str) -> tuple[int, ...]:
    """Complete the sizes of chunks or shards, given for the leading dims or as a number of rows, by whole dims."""
    try:
        sizes = (given,) if type(given) is int else tuple(given)
        fits = all(type(n) is int and n >= 1 for n in sizes) and not isinstance(given, str)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(
            f"entry {joined(key)!r}: {what}={given!r} is no size of {what}: give an int, the number of rows, a row of "
            f"sizes, one for each leading dim, {'the word rows, ' if what == 'chunks' else ''}or a dict of these by key"
        )
    sizes = (*sizes, *shape[len(sizes) :])
    return tuple([min(n, size) for n, size in zip(sizes, shape)])
