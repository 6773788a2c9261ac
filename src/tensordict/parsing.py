"""`parse_tensor_dict_string`: the text that `repr` gives of a container, read back into a container like it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tensordict import registry
from tensordict.memmap import MemoryMappedTensor
from tensordict.settings import set_lazy_legacy
from tensordict.tensordict import TensorDict
from tensordict.unbatched import UnbatchedTensor

if TYPE_CHECKING:
    from tensordict.collection import TensorCollection


def parse_tensor_dict_string(s: str, *, seed: int | None = None, device: Any = None) -> TensorCollection:
    """A container of the structure that a `repr` shows: made to take up a printed container in a debugger.

    Args:
        s: what `repr` gave of a `TensorDict`, a lazy stack or a lazy view. Line breaks and indentation may have been
            lost. Dim names, which `repr` does not show, can be added to a container as `names=['time', None]`.
        seed: fill the tensors with random numbers from this seed: normally distributed ones, integers from 0 to 99, or
            bools; by default all are zero.
        device: put everything there, instead of on the devices that the text names.

    Returns:
        a new container with the keys, batch sizes, devices and classes of the text, its leaves with their shapes and
        dtypes, shared where the text says so. What the text leaves open: a dtype that was not printed is torch's
        default; the rows of ragged leaves have one and two elements in turn, and so have the members of a lazy stack
        where a shape shows -1; a value that is no tensor, and not a literal of Python's either, is its text, and `None`
        in a list that was cut.

    Raises:
        ValueError: the text is malformed, does not add up, or names a class or device that cannot be made here; the
            line, the column and what was expected are named.
        TypeError: `s` is not a string.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, parse_tensor_dict_string
        >>> td = TensorDict({"a": torch.ones(3, 4), "b": {"c": torch.ones(3, dtype=torch.int64)}}, batch_size=[3])
        >>> again = parse_tensor_dict_string(repr(td))
        >>> repr(again) == repr(td), again["b", "c"]
        (True, tensor([0, 0, 0]))
    """
    if not isinstance(s, str):
        raise TypeError(f"parse_tensor_dict_string reads a string, got {type(s).__name__}")
    reader = _Reader(s)
    maker = _Maker(s, seed, device)
    try:
        value = reader.value()
        reader.end()
        if value.is_leaf:
            _fail(s, value.at, "a container, such as TensorDict(fields={...}, ...)")
        return maker.container(value)  # type: ignore[no-any-return]
    except RecursionError:
        raise ValueError("the containers in the text are nested more deeply than Python's recursion limit") from None


class ParseError(ValueError):
    """A text that is no `repr` of a container, or says what cannot be."""

    def __init__(self, text: str, at: int, what: str) -> None:
        line = text.count("\n", 0, at) + 1
        super().__init__(f"line {line}, column {at - text.rfind(chr(10), 0, at)}: {what}")


@dataclass
class _Value:
    """`Class(name=..., ...)` as it was read; `at` is its position in the text."""

    cls: str
    at: int
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_leaf(self) -> bool:
        return self.cls in _LEAVES


# --- reading ----------------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"\s*")
_CLASS = re.compile(r"([A-Za-z_]\w*)\(")
_NAME = re.compile(r"([A-Za-z_]\w*)=")
_SIZE = re.compile(r"torch\.Size\(\s*\[([^\]()]*)\]\s*\)")
_DIM = re.compile(r"-1|\d+|[a-z]\w*")
_INT = re.compile(r"-?\d+")
_BOOLEAN = re.compile("True|False")
_REAL = r"(?:nan|inf|\d+(?:\.\d*)?(?:e[+-]?\d+)?)"
_NUMBER = re.compile(rf"True|False|-?{_REAL}(?:[+-]{_REAL}j)?")
_WORD = re.compile(r"[\w:]+")
_DTYPE = re.compile(r"torch\.(\w+)")
_OPERATION = re.compile(r"(view|permute|transpose|squeeze|unsqueeze)\(\s*(\([-\d\s,]*\)|[-\d\s,]*)\s*\)")
_GROUP = re.compile(r"(\d+) ->\s")
_NEXT_GROUP = re.compile(r"\s*\d+ ->\s")
_KEY = re.compile(r"([^\n]*?):\s(?=\s*[A-Za-z_]\w*\()")
_NO_KEY = re.compile(r"\w\((?:shape|fields|source|device)=")
_CLOSED = re.compile(r"\}\s*(?:\)|,\s*[a-z_]+=)")
_HELD = re.compile(r"(.*?)(?=,\s*batch_size=torch\.Size\()", re.DOTALL)
_QUOTED = re.compile(r"None|'([^'\\\n]*)'|\"([^\"\\\n]*)\"")


class _Reader:
    """Reads the text from front to back; every failure says where."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, expected: str) -> NoReturn:
        _fail(self.text, self.at, expected)

    def space(self) -> None:
        if self.text[self.at : self.at + 1].isspace():
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()

    def find(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        """What matches here, behind which reading goes on."""
        self.space()
        found = pattern.match(self.text, self.at)
        if found is None:
            self.fail(expected)
        self.at = found.end()
        return found

    def taken(self, character: str) -> bool:
        """Whether this character comes next; if so, reading goes on behind it."""
        self.space()
        if not self.text.startswith(character, self.at):
            return False
        self.at += len(character)
        return True

    def take(self, character: str, expected: str | None = None) -> None:
        if not self.taken(character):
            self.fail(repr(character) if expected is None else expected)

    def end(self) -> None:
        self.space()
        if self.at < len(self.text):
            self.fail("the end of the text")

    def value(self) -> _Value:
        """`Class(name=..., ...)`, a leaf or a container."""
        self.space()
        start = self.at
        name = self.find(_CLASS, "a class and its content, such as TensorDict(...)").group(1)
        if name not in _LEAVES and name not in _CONTAINERS:
            self.at = start
            known = _LEAVES | _CONTAINERS.keys()
            self.fail(f"one of the classes that can be made from text, {', '.join(sorted(known))}")
        value = _Value(name, start)
        if name == "NonTensorStack":
            value.facts["data"] = self.held()
            self.take(",")
        if self.taken(")"):
            return value
        while True:
            self.fact(value)
            if self.taken(")"):
                return value
            self.take(",", "',' or ')'")

    def fact(self, value: _Value) -> None:
        """`name=...`, noted in `value`."""
        read = _LEAF_FACTS if value.is_leaf else _CONTAINER_FACTS[value.cls]
        self.space()
        match = _NAME.match(self.text, self.at)
        if match is None or match.group(1) not in read or match.group(1) in value.facts:
            missing = [f"{name}=" for name in read if name not in value.facts]
            self.fail(f"one of {', '.join(missing)}" if missing else "')'")
        self.at = match.end()
        name = match.group(1)
        value.facts[name] = read[name](self)

    # --- entries ------------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, _Value]:
        """`{key: Class(...), ...}`"""
        indent = self.indent()
        self.take("{")
        found: dict[str, _Value] = {}
        if self.closed():
            return found
        while True:
            self.entry(found, indent)
            if self.taken("}"):
                return found
            self.take(",", "',' or '}'")

    def groups(self) -> dict[int, dict[str, _Value]]:
        """`{0 -> key: Class(...), ..., 1 -> ...}`, the entries that only some members of a lazy stack have."""
        indent = self.indent() + 4
        self.take("{")
        found: dict[int, dict[str, _Value]] = {}
        if self.closed():
            return found
        member = self.group(found)
        while True:
            self.entry(found[member], indent)
            if self.taken("}"):
                return found
            self.take(",", "',' or '}'")
            if _NEXT_GROUP.match(self.text, self.at):
                member = self.group(found)

    def group(self, found: dict[int, dict[str, _Value]]) -> int:
        match = self.find(_GROUP, "the number of a member, such as '0 ->'")
        # The white space may be the indentation of a key.
        self.at -= 1
        member = int(match.group(1))
        found.setdefault(member, {})
        return member

    def entry(self, found: dict[str, _Value], indent: int) -> None:
        """`key: Class(...)`, at this indentation unless the text has lost it."""
        margin = "\n" + " " * indent
        if self.text.startswith(margin, self.at):
            self.at += len(margin)
        else:
            self.space()
        match = _KEY.match(self.text, self.at)
        if match is None or _NO_KEY.search(match.group(1)):
            self.fail("an entry, such as key: Tensor(shape=torch.Size([3]), ...)")
        key = match.group(1)
        if key in found:
            self.fail(f"a key that is not taken yet (there is an entry {key!r} before this one)")
        self.at = match.end()
        found[key] = self.value()

    def closed(self) -> bool:
        """Whether there are no entries; `}` may also begin a key."""
        start = self.at
        self.space()
        if _CLOSED.match(self.text, self.at):
            self.at += 1
            return True
        self.at = start
        return False

    def indent(self) -> int:
        """The indentation that the entries have if the text is as it was printed: four more than this line."""
        start = self.text.rfind("\n", 0, self.at) + 1
        found = re.compile(" *").match(self.text, start)
        assert found is not None
        return found.end() - start + 4

    # --- facts --------------------------------------------------------------------------------------------------

    def size(self) -> tuple[Any, ...]:
        """`torch.Size([2, -1, j1])`: ints, and names of ragged dims."""
        match = self.find(_SIZE, "a size, such as torch.Size([3, 4])")
        dims = _dims(match.group(1))
        if dims is None:
            self.at = match.start(1)
            self.fail("a size made of ints, -1 and names of ragged dims")
        return dims

    def ragged_size(self) -> tuple[int, ...]:
        """The batch size of a lazy stack, -1 where the members differ."""
        start = self.at
        size = self.size()
        if any(isinstance(dim, str) for dim in size):
            self.at = start
            self.fail("a batch size made of ints")
        return size

    def plain_size(self) -> tuple[int, ...]:
        start = self.at
        size = self.ragged_size()
        if -1 in size:
            self.at = start
            self.fail("a batch size without -1, which only lazy stacks have,")
        return size

    def device(self) -> torch.device | None:
        match = self.find(_WORD, "a device, such as cpu, cuda:0 or None")
        try:
            return None if match.group() == "None" else torch.device(match.group())
        except RuntimeError:
            self.at = match.start()
            self.fail("a device, such as cpu, cuda:0 or None")

    def dtype(self) -> torch.dtype:
        match = self.find(_DTYPE, "a dtype, such as torch.float32")
        dtype = getattr(torch, match.group(1), None)
        if not isinstance(dtype, torch.dtype):
            self.at = match.start()
            self.fail("a dtype, such as torch.float32")
        return dtype

    def held(self) -> str:
        """The text of a value, which may be anything."""
        return self.find(_HELD, "a value and its batch_size=").group(1)

    def boolean(self) -> bool:
        return self.find(_BOOLEAN, "True or False").group() == "True"

    def integer(self) -> int:
        return int(self.find(_INT, "an int").group())

    def number(self) -> str:
        return self.find(_NUMBER, "a number").group()

    def names(self) -> list[str | None]:
        self.take("[", "dim names, such as ['time', None]")
        names: list[str | None] = []
        while not self.taken("]"):
            if names:
                self.take(",", "',' or ']'")
            match = self.find(_QUOTED, "a name in quotes, or None")
            names.append(match.group(1) if match.group(2) is None else match.group(2))
        return names

    def operation(self) -> tuple[str, Any]:
        """The shape method of a lazy view and its arguments: ints, or one tuple of ints."""
        match = self.find(_OPERATION, "a shape method, such as view(6) or permute(1, 0)")
        dims = tuple(map(int, _INT.findall(match.group(2))))
        return match.group(1), (dims,) if "(" in match.group(2) else dims


@lru_cache(1024)
def _dims(text: str) -> tuple[Any, ...] | None:
    """The ints and the names of ragged dims in `2, -1, j1`; `None` when there is anything else."""
    dims: list[Any] = []
    for item in text.split(",") if text.strip() else ():
        dim = item.strip()
        if not _DIM.fullmatch(dim):
            return None
        dims.append(int(dim) if dim.lstrip("-").isdigit() else dim)
    return tuple(dims)


_Read = Callable[[_Reader], Any]

_LEAF_FACTS: dict[str, _Read] = {
    "shape": _Reader.size,
    "device": _Reader.device,
    "dtype": _Reader.dtype,
    "is_shared": _Reader.boolean,
    "requires_grad": _Reader.boolean,
    "is_contiguous": _Reader.boolean,
    "is_view": _Reader.boolean,
    "storage_size": _Reader.integer,
    "mean": _Reader.number,
    "std": _Reader.number,
    "min": _Reader.number,
    "max": _Reader.number,
}

_DENSE_FACTS: dict[str, _Read] = {
    "fields": _Reader.entries,
    "batch_size": _Reader.plain_size,
    "device": _Reader.device,
    "is_shared": _Reader.boolean,
    "names": _Reader.names,
}

_HOLDER_FACTS: dict[str, _Read] = {
    "data": _Reader.held,
    "batch_size": _Reader.plain_size,
    "device": _Reader.device,
}

_CONTAINER_FACTS: dict[str, dict[str, _Read]] = {
    "TensorDict": _DENSE_FACTS,
    "LazyStackedTensorDict": {
        **_DENSE_FACTS,
        "batch_size": _Reader.ragged_size,
        "exclusive_fields": _Reader.groups,
        "stack_dim": _Reader.integer,
    },
    "LazyView": {"source": _Reader.value, "op": _Reader.operation},
    "NonTensorData": _HOLDER_FACTS,
    "MetaData": _HOLDER_FACTS,
    "NonTensorStack": _HOLDER_FACTS,
}


def _fail(text: str, at: int, expected: str) -> NoReturn:
    rest = text[at:].split("\n", 1)[0]
    found = repr(rest if len(rest) <= 40 else rest[:37] + "...") if rest else "the end of the line"
    raise ParseError(text, at, f"expected {expected}, found {found if at < len(text) else 'the end of the text'}")


# --- making -----------------------------------------------------------------------------------------------------------


class _Maker:
    """Makes what was read."""

    def __init__(self, text: str, seed: int | None, device: Any) -> None:
        self.text = text
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.override = None if device is None else torch.device(device)
        self.fake: FakeTensorMode | None = None
        # Leaves that show the same ragged dim share its offsets, as they did where they were printed.
        self.offsets: dict[tuple[str, int, torch.device], Tensor] = {}

    def fact(self, value: _Value, name: str) -> Any:
        """A fact that cannot be done without."""
        if name not in value.facts:
            _fail(self.text, value.at, f"a {value.cls} with {name}=..., which cannot be made without it")
        return value.facts[name]

    def device(self, value: _Value) -> torch.device | None:
        named: torch.device | None = value.facts.get("device")
        return named if self.override is None or named is None else self.override

    # --- containers ---------------------------------------------------------------------------------------------

    def container(self, value: _Value) -> Any:
        try:
            made = _CONTAINERS[value.cls](self, value)
            if value.facts.get("is_shared") and (self.device(value) or torch.device("cpu")).type == "cpu":
                # The leaves are shared each by what the text says of it. A shared container is locked.
                made._is_shared = True
                made.lock_()
        except ParseError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise self.contradiction(value, error) from error
        return made

    def contradiction(self, value: _Value, error: Exception) -> ParseError:
        """The error of a text that can be read, but not made."""
        device = self.device(value)
        hint = "" if device is None or device.type in ("cpu", "meta") else "; device='cpu' would put everything there"
        return ParseError(self.text, value.at, f"this {value.cls} cannot be made: {error}{hint}")

    def tensordict(self, value: _Value) -> Any:
        entries = {key: (entry, self.entry(entry)) for key, entry in self.fact(value, "fields").items()}
        size = torch.Size(self.fact(value, "batch_size"))
        return self.filled(value, entries, size, value.facts.get("names"))

    def filled(self, value: _Value, entries: dict[str, tuple[_Value, Any]], size: torch.Size, names: Any) -> Any:
        """A `TensorDict` of the entries, each with what it was made from."""
        made = TensorDict(batch_size=size, device=self.device(value), names=names)
        for key, (read, entry) in entries.items():
            try:
                made.set(key, entry)
            except RuntimeError as error:
                raise self.contradiction(read, error) from error
        return made

    def entry(self, value: _Value) -> Any:
        return self.leaf(value) if value.is_leaf else self.container(value)

    def stack(self, value: _Value) -> Any:
        dim = self.fact(value, "stack_dim")
        make = registry.lookup("LazyStackedTensorDict")
        made = make(*self.members(value, dim), stack_dim=dim, names=value.facts.get("names"))
        # A stack of none has its entries from the one that it was cut from.
        return made if value.facts["batch_size"][dim] else made[tuple([slice(None)] * dim + [slice(0, 0)])]

    def members(self, value: _Value, dim: int) -> list[Any]:
        """The members of a lazy stack, one at least: the common entries without the stack dim, and those that only
        one has."""
        size, common = self.fact(value, "batch_size"), self.fact(value, "fields")
        if not 0 <= dim < len(size) or size[dim] < 0:
            _fail(self.text, value.at, f"a stack_dim among the dims of {list(size)}")
        count = max(1, size[dim])
        exclusive = value.facts.get("exclusive_fields", {})
        if any(member >= count for member in exclusive):
            _fail(self.text, value.at, f"exclusive_fields of the members 0 to {count - 1}")
        columns = {key: self.split(entry, dim, size[dim]) for key, entry in common.items()}
        made = []
        for member, rest in enumerate(self.shapes(value, size, dim)):
            entries = {key: (common[key], column[member]) for key, column in columns.items()}
            for key, entry in exclusive.get(member, {}).items():
                entries[key] = entry, self.entry(entry)
            made.append(self.filled(value, entries, torch.Size(rest), None))
        return made

    def split(self, value: _Value, dim: int, count: int) -> list[Any]:
        """What the members of a lazy stack have of an entry of the stack."""
        if value.is_leaf and value.cls != "NestedTensor":
            shape = self.fact(value, "shape")
            if len(shape) <= dim or shape[dim] != count:
                _fail(self.text, value.at, f"an entry whose dim {dim} is of size {count}, as that of the stack is")
            return [
                self.leaf(_Value(value.cls, value.at, value.facts | {"shape": rest}))
                for rest in self.shapes(value, shape, dim)
            ]
        if value.cls == "LazyStackedTensorDict" and value.facts.get("stack_dim") == dim:
            return self.members(value, dim)
        return list(self.entry(value).unbind(dim))

    def shapes(self, value: _Value, shape: tuple[int, ...], dim: int) -> list[tuple[int, ...]]:
        """What is left of a shape for each of the members along `dim`: 1 and 2 in turn in place of -1."""
        count, rest = max(1, shape[dim]), shape[:dim] + shape[dim + 1 :]
        if count == 1 and -1 in rest:
            _fail(self.text, value.at, f"a size for the dims that are -1, which the one member of dim {dim} has,")
        return [tuple([1 + i % 2 if n == -1 else n for n in rest]) for i in range(count)]

    def holder(self, value: _Value) -> Any:
        """The holder of what a text stands for, as far as it is a literal; else of the text."""
        text = self.fact(value, "data")
        held = _literal(text)
        size = torch.Size(self.fact(value, "batch_size"))
        return registry.lookup(value.cls)(
            text if str(held) != text else held, batch_size=size, device=self.device(value)
        )

    def values(self, value: _Value) -> Any:
        """A stack of the values of a printed list; of `None` where it is cut or made of other things than literals."""
        size = torch.Size(self.fact(value, "batch_size"))
        make = registry.lookup("NonTensorStack")
        try:
            return make._of_lists(_literal(self.fact(value, "data")), size, 0, self.device(value))
        except ValueError:
            unknown: Any = None
            for length in reversed(size):
                unknown = [unknown] * length
            return make._of_lists(unknown, size, 0, self.device(value))

    def view(self, value: _Value) -> Any:
        source = self.fact(value, "source")
        if source.is_leaf:
            _fail(self.text, source.at, "a container")
        method, arguments = self.fact(value, "op")
        with set_lazy_legacy(True):
            return getattr(self.container(source), method)(*arguments)

    # --- leaves -------------------------------------------------------------------------------------------------

    def leaf(self, value: _Value) -> Tensor:
        shape = self.fact(value, "shape")
        dtype = value.facts.get("dtype", torch.get_default_dtype())
        device = self.device(value) or torch.device("cpu")
        try:
            leaf = self.tensor(value, shape, dtype, device)
            if value.facts.get("is_shared") and device.type == "cpu":
                leaf.share_memory_()  # type: ignore[no-untyped-call]
            if value.facts.get("requires_grad"):
                leaf.requires_grad_()
        except (RuntimeError, AssertionError) as error:
            # A torch without CUDA says so in an AssertionError.
            raise self.contradiction(value, error) from error
        return leaf

    def tensor(self, value: _Value, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if any(isinstance(dim, str) for dim in shape) or value.cls == "NestedTensor":
            return self.jagged(value, shape, dtype, device)
        if -1 in shape:
            return self.strided(value, shape, dtype, device)
        if value.cls == "MemoryMappedTensor":
            return MemoryMappedTensor.from_tensor(self.numbers(shape, dtype, torch.device("cpu")))
        if value.cls == "FakeTensor":
            # Made when it is needed: it takes 0.5 ms.
            self.fake = self.fake or FakeTensorMode()
            with self.fake:
                return torch.zeros(shape, dtype=dtype, device=device)
        numbers = self.numbers(shape, dtype, device)
        if value.cls == "Parameter":
            differentiable = dtype.is_floating_point or dtype.is_complex
            return torch.nn.Parameter(numbers, requires_grad=value.facts.get("requires_grad", differentiable))
        if value.cls == "UnbatchedTensor":
            return UnbatchedTensor(numbers)
        return torch.nn.Buffer(numbers) if value.cls == "Buffer" else numbers

    def numbers(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, or random numbers that do not depend on the device."""
        if self.generator is None or device.type == "meta":
            return torch.zeros(shape, dtype=dtype, device=device)
        if dtype.is_complex:
            made = torch.randn(shape, dtype=torch.complex64, generator=self.generator)
        elif dtype.is_floating_point:
            made = torch.randn(shape, generator=self.generator)
        else:
            made = torch.randint(2 if dtype == torch.bool else 100, shape, generator=self.generator)
        return made.to(device, dtype)

    def jagged(self, value: _Value, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        ragged = [i for i, dim in enumerate(shape) if isinstance(dim, str)]
        if value.cls != "NestedTensor" or len(ragged) != 1 or not ragged[0] or -1 in shape:
            _fail(self.text, value.at, "a NestedTensor with one ragged dim behind the first, as torch.Size([2, j1])")
        at, rows = ragged[0], shape[0]
        key = (shape[at], rows, device)
        if key not in self.offsets:
            lengths = torch.tensor([0] + [1 + i % 2 for i in range(rows)])
            self.offsets[key] = lengths.cumsum(0).to(device)
        offsets = self.offsets[key]
        values = self.numbers((*shape[1:at], int(offsets[-1]), *shape[at + 1 :]), dtype, device)
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=at)

    def strided(self, value: _Value, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if value.cls != "Tensor" or shape[0] == -1:
            _fail(self.text, value.at, "a Tensor whose first dim is not ragged, as torch.Size([2, -1])")
        rows = [
            self.numbers(tuple([1 + i % 2 if dim == -1 else dim for dim in shape[1:]]), dtype, device)
            for i in range(shape[0])
        ]
        return torch.nested.nested_tensor(rows, dtype=dtype, device=device)


def _literal(text: str) -> Any:
    """What a text stands for in Python; `None` when it is no literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


_CONTAINERS: dict[str, Callable[[_Maker, _Value], Any]] = {
    "TensorDict": _Maker.tensordict,
    "LazyStackedTensorDict": _Maker.stack,
    "LazyView": _Maker.view,
    "NonTensorData": _Maker.holder,
    "MetaData": _Maker.holder,
    "NonTensorStack": _Maker.values,
}

_LEAVES = frozenset(
    ("Tensor", "Parameter", "Buffer", "MemoryMappedTensor", "FakeTensor", "NestedTensor", "UnbatchedTensor")
)
