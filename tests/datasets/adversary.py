"""Attacks on data sets: each file is cut, flipped, swapped, linked, doubled or deleted, and all rows are read again.

Run as a program (test_adversary.py does):

    adversary.py sweep FOLDER SCENE...                  every attack on these scenes
    adversary.py sample FOLDER COUNT SEED SCENE...      so many attacks on each, of every kind

A scene is STATE/FORMAT, such as `kept/folder`, or `all`. The last line that is printed is the tally, as JSON. A round
attacks a fresh copy of the data set, opens it, reads every row, verifies, compacts, tidies, reads and verifies again.
These rules hold in every round:

1. Only errors of the family of `OSError` are raised, and each names a path of the data set.
2. Rows are readable unless the attack hit the shard that holds them, or the manifest that alone lists them.
3. A row that cannot be read is told of by an error or a warning, and `verify` says that something is wrong. Where the
   last lines of a manifest are lost without a trace, `verify` alone says so.
4. A row is never read wrong, twice or out of order without `verify` saying so.
5. Compaction and tidying leave every row readable that was readable before them.
6. Where a row cannot be read, every file that may hold it stays as the attack left it.
7. Nothing outside the data set changes, and files that somebody else has put into it stay.

**Which files are attacked, and at which bytes.** A file has a *role*: what it is (the schema, a manifest, or a path
inside a shard of a format), who wrote it (a writer, a compaction, or a writer that was killed), and whether rows are
read from it. In Zarr, all arrays with the same number of dimensions have one role, since their documents have the same
form. One file of each role is attacked in every way and stands for the others, which are deleted, and attacked at three
bytes:

- The schema is cut and flipped at each byte in one scene. Every reader of it is the same. What follows from a damaged
  schema depends on the shards, and chosen bytes in every other scene show that.
- Manifests are cut and flipped at each byte in the six states of one format. The format shows in the names of their
  lines only. A checksum covers each line, so it only matters which line is hit: in the other formats, the ends of lines
  and chosen bytes are attacked.
- Shards are cut and flipped at each byte where no other shard has their rows: those of writers in the fresh data set,
  merged ones in the compacted one. Elsewhere the bytes are read by the same code, and what differs is what happens to a
  shard that is damaged: chosen bytes show that.
- Of a Zarr shard, each byte is flipped in the document of the group, which has the label, of one array of numbers, and
  of the names. The documents of the other arrays have the same form; and JSON that is cut is none, wherever it is cut.
- Elements of tensors have no structure. Any cut changes their length, and any flip a number. Few bytes are chosen.

At a URL, shards are other objects and are read by other code: archives and folders are attacked there as above.

**Which files are swapped, copied over one another and linked to one another.** All shards, and all manifests. Of files
inside shards, one pair of each pair of roles, of one writer and of two. Files of somebody else are put into one folder
of each role.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import pathlib
import random
import shutil
import sys
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tensordict import DatasetWriter, TensorDict, load, open_dataset, verify
from tensordict.datasets import compact, maintenance, manifest, tidy
from tensordict.io.remote.urls import Remote

STATES = ("fresh", "compacted", "kept", "twice", "killed", "unlisted")
FORMATS = ("folder", "archive", "zarr", "mixed")
SCENES = [f"{state}/{format}" for state in STATES for format in FORMATS]
# So many bytes are chosen of the first file of a role, and so many of the others.
_CHOSEN, _CHOSEN_ELEMENTS, _FEW = {".jsonl": 20, ".tdz": 20, ".json": 10}, 6, 3
# So many pairs of files of different roles are swapped.
_PAIRS = 10
# Each byte of these files of Zarr is flipped.
_SWEPT_IN_ZARR = (".zarr/zarr.json", ".zarr/one/zarr.json", ".zarr/name/zarr.json")
# The arrays of Zarr of one and of two dimensions, but for the names, which are strings of any length.
_ARRAYS = {"number": "one", "tokens/values": "one", "content": "two", "tokens/sizes": "two"}
# A round that takes longer than this many seconds ends the program with the place where it stands.
_PATIENCE = 120
Files = dict[str, bytes]
# No writer is at work, whom a check or a reader would wait for.
maintenance._MOMENT = 0.0
manifest._PAUSE = 0.0


# --- rows that show what is wrong with them ---------------------------------------------------------------------------


def make_rows(first: int, count: int) -> TensorDict:
    """Rows that say which they are; all entries of a row follow from its number."""
    number = torch.arange(first, first + count)
    tokens = torch.nested.nested_tensor([torch.arange(int(n) % 4) + int(n) for n in number], layout=torch.jagged)
    td = TensorDict({"number": number, "content": _make_content(number), "tokens": tokens}, [count])
    td["name"] = [f"row {n}" for n in number.tolist()]
    return td


def _make_content(number: torch.Tensor) -> torch.Tensor:
    return number.unsqueeze(-1) * 1_000_003 + torch.arange(3)


def read_number(row: Any) -> int | None:
    """The number of a row; `None` where its entries do not belong together."""
    number = row["number"]
    n = int(number)
    whole = torch.equal(row["content"], _make_content(number)) and row["name"] == f"row {n}"
    return n if whole and row["tokens"].tolist() == [n + i for i in range(n % 4)] else None


# --- where a data set is ----------------------------------------------------------------------------------------------


class Place(ABC):
    """A data set that is restored before each attack.

    Attributes:
        path: of the data set, or its URL.
        options: the `storage_options` of a URL.
    """

    path: str
    options: dict[str, Any] | None = None
    # The formats whose shards are attacked at each byte; manifests and the schema are, in those of the first one.
    formats: tuple[str, ...]

    @abstractmethod
    def files(self) -> Files:
        """The contents of all files below the data set; no link is followed, and a link is `b"link to ..."`."""

    @abstractmethod
    def restore(self, files: Files) -> None:
        """Make these the files of the data set, and no others."""

    @abstractmethod
    def put(self, name: str, content: bytes) -> None:
        """Write a file, as a new one."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, or all files below a folder."""

    def outside(self) -> Files:
        """Return the contents of the files beside the data set."""
        return {}


class LocalPlace(Place):
    """A folder `data`, beside a folder `precious` of somebody else and a folder `elsewhere` for what links lead to."""

    formats = ("folder", "archive", "zarr")

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.path = str(root / "data")
        self._known: Files | None = None

    def files(self) -> Files:
        return _files_below(self.path)

    def restore(self, files: Files) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for name, content in files.items():
            self.put(name, content)
        for folder in ("precious", "elsewhere"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
        precious = self.root / "precious"
        # The precious files look like parts of a data set.
        for name in ("thesis.txt", "00000000/meta.json", "00000000/number.memmap", "00000001.tdz", "x.jsonl"):
            (precious / name).parent.mkdir(parents=True, exist_ok=True)
            (precious / name).write_text("{}")
        (self.root / "elsewhere").mkdir()

    def put(self, name: str, content: bytes) -> None:
        path = f"{self.path}/{name}"
        try:
            file = open(path, "xb")  # noqa: SIM115
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path))
            file = open(path, "xb")  # noqa: SIM115
        with file:
            file.write(content)

    def delete(self, name: str) -> None:
        path = f"{self.path}/{name}"
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def outside(self) -> Files:
        return {
            f"{folder}/{name}": content
            for folder in ("precious", "elsewhere")
            for name, content in _files_below(str(self.root / folder)).items()
        }


def _files_below(root: str) -> Files:
    found: Files = {}
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = f"{folder}/{name}"
            if os.path.islink(path):
                found[path[len(root) + 1 :]] = f"link to {os.readlink(path)}".encode()
            elif name in names:
                with open(path, "rb") as file:
                    found[path[len(root) + 1 :]] = file.read()
    return found


class RemotePlace(Place):
    """A URL."""

    formats = ("archive", "folder")

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.path, self.options = url, options
        self._store = Remote(url, options)

    def files(self) -> Files:
        return {file.name: self._store.read(file.name) for file in self._store.files()}

    def restore(self, files: Files) -> None:
        there = self.files()
        self._store.delete(there.keys() - files.keys())
        for name, content in files.items():
            if there.get(name) != content:
                self._store.put(name, content)

    def put(self, name: str, content: bytes) -> None:
        self._store.put(name, content)

    def delete(self, name: str) -> None:
        self._store.delete([name, *(file.name for file in self._store.files(name))])


# --- scenes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """The role of a file or folder.

    Args:
        what: "schema", "manifest", "shard", or "" for folders that hold several shards.
        path: inside the shard, with the suffix of the shard before it, and the array of Zarr replaced by its form; the
            name of an object of a manifest.
        writer: "writer", "compaction" or "killed".
        live: whether rows are read from the shard.
    """

    what: str
    path: str = ""
    writer: str = ""
    live: bool = False


@dataclass
class Scene:
    """A sound data set, and what is known of its rows.

    Attributes:
        name: STATE/FORMAT.
        files: of the data set.
        order: the numbers of the rows, in their order.
        origin: by number, the writer that added the row.
        shard: by number, the shard that the row is read from.
        holders: by number, all shards that have the row; those of shards that no manifest lists, too.
        merged: the numbers of rows that a compaction has moved.
        units: the paths of all shards.
        killed: the writer that was killed, if one was.
    """

    name: str
    files: Files
    order: list[int] = field(default_factory=list)
    origin: dict[int, str] = field(default_factory=dict)
    shard: dict[int, str] = field(default_factory=dict)
    holders: dict[int, set[str]] = field(default_factory=dict)
    merged: set[int] = field(default_factory=set)
    units: list[str] = field(default_factory=list)
    killed: str = ""

    def role_of(self, name: str) -> Role:
        """The role of a file, or of a folder in the data set."""
        kind, _, rest = name.partition("/")
        if kind == "schema.json":
            return Role("schema")
        writer, _, rest = rest.partition("/")
        who = writer.removesuffix(".jsonl")
        origin = "killed" if who == self.killed else "writer" if who in self.origin.values() else "compaction"
        if kind == "writers" or not rest:
            return Role("manifest" if kind == "writers" else kind, rest, origin)
        shard, _, inside = rest.partition("/")
        live = f"{kind}/{writer}/{shard}" in self.shard.values()
        for array, form in _ARRAYS.items() if shard.endswith(".zarr") else ():
            inside = form + inside[len(array) :] if inside.startswith(f"{array}/") else inside
        return Role("shard", f"{shard.lstrip('.')[8:]}/{inside}", origin, live)

    def writer_of(self, name: str) -> str:
        """The writer of a file in a shard or of a manifest."""
        return name.split("/")[1].removesuffix(".jsonl") if "/" in name else ""


def build_scene(place: Place, name: str) -> Scene:
    """Write a data set, and note which row is where."""
    state, format = name.split("/")
    formats = {"A": format, "B": format, "C": format}
    if format == "mixed":
        formats = {"A": "folder", "B": "archive", "C": "zarr"}
    place.restore({})
    origin: dict[int, str] = {}
    for writer, first, count in (("A", 0, 5), ("B", 10, 5)):
        origin |= dict.fromkeys(range(first, first + count), _write(place, formats[writer], first, count))
    if state in ("compacted", "kept", "twice"):
        compact(place.path, keep=state != "compacted", storage_options=place.options)
        origin |= dict.fromkeys(range(20, 23), _write(place, formats["C"], 20, 3))
    if state == "twice":
        compact(place.path, keep=True, storage_options=place.options)
    killed = _leave(place, formats["B"], state) if state in ("killed", "unlisted") else ""
    scene = Scene(name, place.files(), origin=origin, killed=killed)
    _look(place, scene)
    return scene


def _write(place: Place, format: str, first: int, count: int) -> str:
    checksum = format == "folder"
    with DatasetWriter(
        place.path, rows_per_shard=3, format=format, checksum=checksum, storage_options=place.options
    ) as writer:
        writer.extend(make_rows(first, count))
    return writer.writer


def _leave(place: Place, format: str, state: str) -> str:
    """Leave what a killed writer leaves: a complete shard that no line lists (`unlisted`), or a part of one.

    Returns:
        the writer.
    """
    before = place.files()
    writer = _write(place, format, 30, 2)
    made = sorted(place.files().keys() - before.keys())
    for name in [name for name in made if name.startswith(f"writers/{writer}") and "00000000-00000000" not in name]:
        content = place.files()[name]
        place.delete(name)
        if name == f"writers/{writer}.jsonl":
            place.put(name, content[: content.index(b"\n") + 1])
    for name in made if state == "killed" else ():
        folder, _, last = name.rpartition("/")
        if last in ("meta.json", "zarr.json") and name.count("/") == 3:
            place.delete(name)
        elif last.endswith(".tdz") and name.startswith("shards/"):
            content = place.files()[name]
            place.delete(name)
            if isinstance(place, LocalPlace):
                place.put(f"{folder}/.{last}.tensordict-new", content[: len(content) // 2])
    return writer


def _look(place: Place, scene: Scene) -> None:
    names = {"/".join(name.split("/")[:3]) for name in scene.files if name.startswith("shards/")}
    scene.units = sorted(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = open_dataset(place.path, storage_options=place.options)
    scene.order = [int(n) for n in data["number"]]
    start = 0
    for path, rows in data.shards():
        unit = path.removeprefix(f"{place.path}/")
        scene.shard |= dict.fromkeys(scene.order[start : start + rows], unit)
        start += rows
    for unit in scene.units:
        try:
            rows = load(f"{place.path}/{unit}", storage_options=place.options)
        except OSError:
            continue  # The rows of a killed writer do not count.
        for n in rows["number"].tolist():
            scene.holders.setdefault(n, set()).add(unit)
    scene.merged = {n for n, unit in scene.shard.items() if unit.split("/")[1] != scene.origin[n]}
    assert sorted(scene.order) == sorted(scene.origin), "the scene itself is not sound"


# --- attacks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """One thing that is done to a data set.

    Args:
        kind: what, in a word or two.
        what: where, for people.
        apply: does it.
        touches: the names of the files and folders that are changed by it.
        plants: the names of files that it adds, which belong to nobody here.
        without_trace: whether the last lines of a manifest are lost, and the rest is as a writer leaves it.
    """

    kind: str
    what: str
    apply: Callable[[], object]
    touches: tuple[str, ...] = ()
    plants: tuple[str, ...] = ()
    without_trace: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def list_attacks(place: Place, scene: Scene, seed: int = 0) -> Iterator[Attack]:
    """The attacks on a scene, as the text of this module says."""
    chance = random.Random(seed)
    seen: set[Role] = set()
    for name in sorted(scene.files):
        role = scene.role_of(name)
        is_first = role not in seen
        seen.add(role)
        yield from _attack_bytes(place, scene, name, is_first, chance)
        yield Attack("delete", name, partial(place.delete, name), (name,), (), _is_manifest(name))
        if is_first:
            yield from _attack_file(place, scene, name)
    yield from _attack_pairs(place, scene, chance)
    yield from _attack_shards(place, scene)
    yield from _plant_files(place, scene)
    if isinstance(place, LocalPlace):
        yield from _attack_links(place, scene)


def _rewrite(place: Place, name: str, content: bytes) -> None:
    place.delete(name)
    place.put(name, content)


def _is_swept(place: Place, scene: Scene, name: str) -> bool:
    """Return whether this scene attacks each byte of files with this role."""
    role, (state, format) = scene.role_of(name), scene.name.split("/")
    if role.what != "shard":
        return format == place.formats[0] and (role.what == "manifest" or state == "fresh")
    if format not in place.formats or not role.live or (format == "zarr" and role.path not in _SWEPT_IN_ZARR):
        return False
    if role.writer == "compaction":
        return state == "compacted" and (format != "zarr" or role.path == _SWEPT_IN_ZARR[0])
    return state == "fresh"


def _attack_bytes(place: Place, scene: Scene, name: str, is_first: bool, chance: random.Random) -> Iterator[Attack]:
    """Cut a file, and flip a byte of it, at each byte or at chosen ones."""
    content, lists = scene.files[name], name.startswith("writers/")
    everywhere = range(len(content))
    count = _CHOSEN.get(pathlib.Path(name).suffix, _CHOSEN_ELEMENTS) if is_first else _FEW
    some = chance.sample(everywhere, min(len(content), count - 2))
    # A manifest that is cut at the end of a line looks like one that was never longer.
    ends = [at + 1 for at in everywhere if lists and content[at : at + 1] == b"\n"]
    chosen = {*everywhere[:1], *everywhere[-1:], *some, *ends[:-1]}
    is_swept = is_first and _is_swept(place, scene, name)
    for at in everywhere if is_swept else sorted(chosen):
        cut, flip = content[:at], chance.randrange(1, 256)
        flipped = cut + bytes([content[at] ^ flip]) + content[at + 1 :]
        apply = lambda cut=cut: _rewrite(place, name, cut)  # noqa: E731
        if at in chosen or ".zarr/" not in name:
            yield Attack("cut", f"{name} at {at}", apply, (name,), (), lists and cut.endswith(b"\n"))
        yield Attack("flip", f"{name} at {at} by {flip}", lambda new=flipped: _rewrite(place, name, new), (name,))


def _is_manifest(name: str) -> bool:
    """Return whether a file has lines of a manifest at a URL. Nothing else records them."""
    return name.startswith("writers/") and name.count("/") == 2


def _attack_file(place: Place, scene: Scene, name: str) -> Iterator[Attack]:
    content = scene.files[name]
    grown = content + content[-40:]
    yield Attack("grow", name, lambda: _rewrite(place, name, grown), (name,))
    folder, _, last = name.rpartition("/")
    for other in (f"copy-{last}", _next_name(last)):
        new = f"{folder}/{other}" if folder else other
        # A chunk of Zarr cannot be told from another one by its name.
        if new not in scene.files and ".zarr/" not in new:
            yield Attack("double", f"{name} as {new}", lambda new=new: place.put(new, content), (), (new,))


def _next_name(name: str) -> str:
    """A name that this package could have given to another file of the kind."""
    if name[:8].isdigit():
        return f"{int(name[:8]) + 7:08}{name[8:]}"
    return name.replace("-", "-0", 1) if "-" in name else f"a{name}"


def _attack_pairs(place: Place, scene: Scene, chance: random.Random) -> Iterator[Attack]:
    def swap(one: str, other: str) -> None:
        first, second = scene.files[one], scene.files[other]
        _rewrite(place, one, second)
        _rewrite(place, other, first)

    pairs = [
        (a, b)
        for a, b in itertools.combinations(sorted(scene.files), 2)
        if scene.files[a] != scene.files[b] and "schema.json" not in (a, b)
    ]
    # Files of one name in two shards, two manifests; and others, of which there are many.
    alike = {(a, b) for a, b in pairs if _place_of(a) == _place_of(b)}
    others = [pair for pair in pairs if pair not in alike]
    chosen = _list_unlike(scene, [pair for pair in pairs if pair in alike])
    for a, b in [*chosen, *chance.sample(others, min(len(others), _PAIRS))]:
        yield Attack("swap", f"{a} and {b}", lambda a=a, b=b: swap(a, b), (a, b))
        yield Attack("copy over", f"{a} over {b}", lambda a=a, b=b: _rewrite(place, b, scene.files[a]), (b,))
        yield Attack("copy over", f"{b} over {a}", lambda a=a, b=b: _rewrite(place, a, scene.files[b]), (a,))


def _place_of(name: str) -> str:
    """The path of a file in its shard, or "writers"."""
    parts = name.split("/")
    return "writers" if parts[0] == "writers" else "/".join(parts[3:])


def _list_unlike(scene: Scene, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return all pairs of manifests; of files in shards, one of each pair of roles, of one writer and of two."""
    found: dict[Any, tuple[str, str]] = {}
    for a, b in pairs:
        one, other = scene.role_of(a), scene.role_of(b)
        kind: Any = (one, other, scene.writer_of(a) == scene.writer_of(b)) if one.what == "shard" else (a, b)
        found.setdefault(kind, (a, b))
    return list(found.values())


def _move_files(files: Files, source: str, target: str) -> Files:
    return {
        target + name[len(source) :]: content
        for name, content in files.items()
        if name == source or name.startswith(f"{source}/")
    }


def _attack_shards(place: Place, scene: Scene) -> Iterator[Attack]:
    """Whole shards, and whole folders of them: swapped, copied over one another, deleted, doubled."""

    def replace(*changes: tuple[str, str]) -> None:
        new = [_move_files(scene.files, source, target) for source, target in changes]
        for _, target in changes:
            if _move_files(scene.files, target, target):
                place.delete(target)
        for files in new:
            for name, content in files.items():
                place.put(name, content)

    folders = sorted({unit.rpartition("/")[0] for unit in scene.units})
    for a, b in itertools.combinations(scene.units, 2):
        yield Attack("swap", f"shards {a} and {b}", lambda a=a, b=b: replace((a, b), (b, a)), (a, b))
        yield Attack("copy over", f"shard {a} over {b}", lambda a=a, b=b: replace((a, b)), (b,))
        yield Attack("copy over", f"shard {b} over {a}", lambda a=a, b=b: replace((b, a)), (a,))
    for a, b in itertools.combinations(folders, 2):
        yield Attack("swap", f"folders {a} and {b}", lambda a=a, b=b: replace((a, b), (b, a)), (a, b))
        yield Attack("copy over", f"folder {a} over {b}", lambda a=a, b=b: replace((a, b)), (b,))
    for name in (*scene.units, *folders, "shards", "writers"):
        if name not in scene.files:
            yield Attack("delete", f"all of {name}", lambda name=name: place.delete(name), (name,))
    for a in scene.units:
        folder, _, last = a.rpartition("/")
        for new in (f"{folder}/{_next_name(last)}", f"shards/19990101T000000.000000-copy-1-00000000/{last}"):
            # A part of a shard cannot be told from what a killed writer leaves.
            whole = any(a in holders for holders in scene.holders.values()) or "-copy-" in new
            names = tuple(_move_files(scene.files, a, new)) if whole else ()
            yield Attack("double", f"shard {a} as {new}", lambda a=a, new=new: replace((a, new)), (), names)
    for a in folders:
        new = a.replace("shards/2", "shards/1")
        names = tuple(_move_files(scene.files, a, new))
        yield Attack("double", f"folder {a} as {new}", lambda a=a, new=new: replace((a, new)), (), names)


def _plant_files(place: Place, scene: Scene) -> Iterator[Attack]:
    """Files of somebody else, in every folder."""
    folders = {"", "writers", "shards/.hidden", "shards/evil", "shards/evil/00000000"}
    for name in scene.files:
        parts = name.split("/")
        folders |= {"/".join(parts[:count]) for count in range(1, len(parts))}
    by_role = {scene.role_of(folder): folder for folder in sorted(folders, reverse=True)}
    # Unknown folders have an empty role.
    hidden = {folder for folder in folders if "evil" in folder or "hidden" in folder}
    for folder in sorted({*by_role.values(), *hidden}):
        names = ["notes.txt", "notes.memmap", ".00000000.gone"]
        # In a shard, these are the names of the journal of a killed save, of a chunk of Zarr, and of nothing.
        names += ["00000099", "00000099.tdz", "00000099.jsonl", "%save"] if folder.count("/") < 2 else []
        for last in names:
            name = f"{folder}/{last}" if folder else last
            if folder or last[0] in ".%":
                yield Attack("plant", name, lambda name=name: place.put(name, b"mine"), (), (name,))


def _attack_links(place: LocalPlace, scene: Scene) -> Iterator[Attack]:
    """Links replace files and folders. They lead to foreign files, to the old content, or to another item."""
    precious, elsewhere = place.root / "precious", place.root / "elsewhere"

    def link(name: str, target: object) -> None:
        place.delete(name)
        os.symlink(str(target), f"{place.path}/{name}")

    def link_to_itself(name: str) -> None:
        shutil.move(f"{place.path}/{name}", elsewhere / "moved")
        os.symlink(str(elsewhere / "moved"), f"{place.path}/{name}")

    def hard_link(name: str, target: object) -> None:
        place.delete(name)
        os.link(str(target), f"{place.path}/{name}")

    def plant(name: str, target: object) -> None:
        os.makedirs(os.path.dirname(f"{place.path}/{name}"), exist_ok=True)
        os.symlink(str(target), f"{place.path}/{name}")

    pairs = itertools.permutations(sorted(scene.files), 2)
    for a, b in _list_unlike(scene, ((a, b) for a, b in pairs if _place_of(a) == _place_of(b))):
        yield Attack("link", f"{a} to {b}", lambda a=a, b=b: link(a, f"{place.path}/{b}"), (a,))
        yield Attack("hard link", f"{a} to {b}", lambda a=a, b=b: hard_link(a, f"{place.path}/{b}"), (a,))
    by_role = {scene.role_of(name): name for name in sorted(scene.files, reverse=True)}
    for name in sorted(by_role.values()):
        yield Attack("link", f"{name} to a file outside", lambda n=name: link(n, precious / "x.jsonl"), (name,))
        yield Attack("link", f"{name} to a folder outside", lambda n=name: link(n, precious), (name,))
        yield Attack("link", f"{name} to itself, moved", lambda n=name: link_to_itself(n), (name,))
        yield Attack("link", f"{name} to nothing", lambda n=name: link(n, precious / "none"), (name,))
        yield Attack(
            "hard link", f"{name} to a file outside", lambda n=name: hard_link(n, precious / "x.jsonl"), (name,)
        )
    folders = {"/".join(name.split("/")[:count]) for name in scene.files for count in range(1, name.count("/") + 1)}
    by_role = {scene.role_of(folder): folder for folder in sorted(folders, reverse=True)}
    for name in sorted(by_role.values()):
        for target in (precious, precious / "00000000", precious / "none"):
            yield Attack("link", f"the folder {name} to {target.name}", lambda n=name, t=target: link(n, t), (name,))
        yield Attack("link", f"the folder {name} to itself, moved", lambda n=name: link_to_itself(n), (name,))
    for a, b in itertools.permutations(scene.units, 2):
        yield Attack("link", f"shard {a} to {b}", lambda a=a, b=b: link(a, f"{place.path}/{b}"), (a,))
    some = scene.units[0].rpartition("/")[0]
    for name in (
        "shards/evil",
        f"{some}/00000099",
        f"{some}/.00000000.gone",
        f"{some}/evil",
        "writers/evil.jsonl",
        "shards/19990101T000000.000000-evil-1-00000000",
        "writers/19990101T000000.000000-evil-1-00000000.jsonl",
    ):
        for target in (precious, precious / "x.jsonl", precious / "none"):
            yield Attack("plant", f"{name}, a link to {target.name}", lambda n=name, t=target: plant(n, t), (), (name,))


# --- a round ----------------------------------------------------------------------------------------------------------


@dataclass
class Reading:
    """The rows that one way of reading returned.

    Attributes:
        right: the numbers of rows that were read, whole and once, in their order.
        wrong: what was read that is not right.
        told: errors and warnings.
        bad: errors that no reader may see.
    """

    right: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def read_all(place: Place, order: list[int]) -> Reading:
    """Open a data set and read its rows, one by one."""
    reading = Reading()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            data = open_dataset(place.path, storage_options=place.options)
        except Exception as error:
            _note(place, reading.told, reading.bad, "opening", error)
            return reading
        count = len(data)
        for row in range(count):
            try:
                n = read_number(data[row])
            except Exception as error:
                _note(place, reading.told, reading.bad, f"row {row}", error)
                continue
            if n is None or n not in order:
                reading.wrong.append(f"row {row} has not what was written")
            elif n in reading.right:
                reading.wrong.append(f"row {row} is there twice")
            else:
                reading.right.append(n)
    places = [order.index(n) for n in reading.right]
    if places != sorted(places):
        reading.wrong.append(f"the rows are out of order: {reading.right}")
    reading.told += [str(warning.message) for warning in caught]
    return reading


def _note(place: Place, told: list[str], bad: list[str], doing: str, error: Exception) -> None:
    text = f"{doing}: {type(error).__name__}: {error}"
    told.append(text)
    if not isinstance(error, OSError):
        bad.append(f"{text[:400]} (no OSError)")
    elif place.path not in str(error):
        bad.append(f"{text[:400]} (names no path)")


@dataclass
class Round:
    """One attack, and what came of it.

    Attributes:
        outcome: "unharmed", "told" (rows are missing, and an error or a warning says so), or "found by verify" (rows
            are wrong, or missing without a trace).
        broken: the rules that do not hold.
    """

    outcome: str
    broken: list[str]


def attack_once(place: Place, scene: Scene, attack: Attack) -> Round:
    """Attack a fresh copy of the data set, and do what its owner would."""
    place.restore(scene.files)
    attack.apply()
    after, outside = place.files(), place.outside()
    first = read_all(place, scene.order)
    broken, sound = _check_all(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for doing, call in (("compact", compact), ("tidy", lambda *a, **k: tidy(*a, older_than=0, **k))):
            try:
                call(place.path, storage_options=place.options)
            except Exception as error:
                _note(place, [], broken, doing, error)
    second = read_all(place, scene.order)
    more, sound_then = _check_all(place)
    broken += more
    last = place.files()
    careless = _is_inside_zarr(attack)
    for when, reading, ok in (("first", first, sound), ("then", second, sound_then)):
        broken += [f"{when}: {text}" for text in reading.bad]
        missing = [n for n in scene.order if n not in reading.right]
        if missing and not careless and ok:
            broken.append(f"{when}: {missing} cannot be read, and verify says that all is well")
        if missing and not careless and not (reading.told or reading.wrong or attack.without_trace):
            broken.append(f"{when}: {missing} are gone without a word")
        if reading.wrong and not careless and ok:
            broken.append(f"{when}: {reading.wrong[0]}, and verify says that all is well")
    unreadable = [n for n in list_safe_rows(scene, attack) if n not in first.right]
    if unreadable:
        broken.append(f"first: the attack does not concern {unreadable}, which cannot be read: {first.told[:2]}")
    if lost := [n for n in first.right if n not in second.right]:
        broken.append(f"compact and tidy have lost {lost}: {second.told[:2]}")
    broken += _find_lost_files(scene, after, last, second, attack)
    broken += [f"{name} of somebody else is gone" for name in attack.plants if last.get(name) != after[name]]
    if place.outside() != outside:
        broken.append("something outside of the data set has changed")
    whole = first.right == scene.order and not first.wrong
    told = first.told and not first.wrong
    return Round("unharmed" if whole else "told" if told else "found by verify", broken)


def _check_all(place: Place) -> tuple[list[str], bool]:
    """Return the faults of a check, and whether the check found no problem."""
    bad: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bad, verify(place.path, raises=False, storage_options=place.options).ok
        except Exception as error:
            _note(place, [], bad, "verify", error)
            return bad, False


def _is_inside_zarr(attack: Attack) -> bool:
    """Return whether the attack changes single files of a Zarr shard, which has no checksums."""
    return any(".zarr/" in name for name in attack.touches)


def _overlap(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}/") or other.startswith(f"{name}/")


def list_safe_rows(scene: Scene, attack: Attack) -> list[int]:
    """The numbers of the rows that an attack does not concern: neither their shard, nor what alone lists it."""

    def is_hit(n: int) -> bool:
        manifest = f"writers/{scene.origin[n]}"
        listed = any(name.startswith(manifest) or name == "writers" for name in attack.touches)
        return any(_overlap(name, scene.shard[n]) for name in attack.touches) or (listed and n not in scene.merged)

    return [n for n in scene.order if not is_hit(n)]


def _find_lost_files(scene: Scene, after: Files, last: Files, reading: Reading, attack: Attack) -> Iterator[str]:
    """The files that were removed or changed, though they may hold rows that cannot be read.

    Zarr keeps no checksums: a compaction copies the changed rows of a shard, and removes it. All other shards with
    these rows stay. A shard that never counted is, without its description, a part of one.
    """
    for n, units in scene.holders.items():
        hit = {unit for unit in units if any(_overlap(unit, name) for name in attack.touches)}
        if n not in scene.shard and hit:
            continue
        units = units - hit if _is_inside_zarr(attack) else units
        for unit in units if n not in reading.right else ():
            for name in after:
                if _overlap(name, unit) and last.get(name) != after[name]:
                    yield f"{name} is gone, and the row {n} cannot be read"
                    return


# --- many rounds ------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts of attacks, by kind and outcome.

    Attributes:
        counts: by kind of attack and outcome.
        broken: rules that did not hold, by scene and attack.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """One line."""
        table: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self.counts.items()):
            table.setdefault(kind, {})[outcome] = count
        return json.dumps({"attacks": sum(self.counts.values()), "kinds": table, "broken": self.broken})


def choose(attacks: list[Attack], count: int, seed: str) -> list[Attack]:
    """So many attacks, with as many of each kind as there can be."""
    chance = random.Random(seed)
    by_kind: dict[str, list[Attack]] = {}
    for attack in attacks:
        by_kind.setdefault(attack.kind, []).append(attack)
    kinds = list(by_kind.values())
    chance.shuffle(kinds)
    for kind in kinds:
        chance.shuffle(kind)
    turns = itertools.zip_longest(*kinds)
    return [attack for turn in turns for attack in turn if attack is not None][:count]


def sweep(
    place: Place, name: str, tally: Tally, count: int = 0, seed: int = 0, note: Callable[[str], object] = str
) -> None:
    """Attack a scene, in every way or `count` times; `note` is told of each attack before it is made."""
    scene = build_scene(place, name)
    attacks = list(list_attacks(place, scene, seed))
    attacks = choose(attacks, count, f"{seed} {name}") if count else attacks
    nothing = Attack("nothing", "", lambda: None)
    try:
        for attack in (nothing, *attacks):
            note(f"{name}: {attack}")
            faulthandler.dump_traceback_later(_PATIENCE, exit=True)
            found = attack_once(place, scene, attack)
            tally.counts[attack.kind, found.outcome] += 1
            tally.broken += [f"{name}: {attack}: {text}" for text in found.broken]
    finally:
        # A test calls this in a process that goes on.
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    what, folder, *others = sys.argv[1:]
    count, seed = 0, 0
    if what == "sample":
        count, seed = int(others.pop(0)), int(others.pop(0))
    root = pathlib.Path(folder)
    tally = Tally()
    with open(root / "attack.txt", "w") as file:

        def note(text: str) -> None:
            # The file tells what a process was doing when it ended.
            file.seek(0)
            file.write(f"{text}\n")
            file.flush()

        for name in SCENES if others == ["all"] else others:
            sweep(LocalPlace(root), name, tally, count, seed, note)
    print(tally.to_json())


if __name__ == "__main__":
    main()
