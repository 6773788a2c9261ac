"""`parse_tensor_dict_string`, which makes a container from the `repr` of one, for use in a debugger."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy
import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.containers.unbatched import UnbatchedTensor
from tensordict.core import makers, registry
from tensordict.core import torch_internals as internals
from tensordict.core.settings import set_lazy_legacy
from tensordict.memory.mapped import MemoryMappedTensor

if TYPE_CHECKING:
    from tensordict.ops.collection import TensorCollection


def parse_tensor_dict_string(s: str, *, seed: int | None = None, device: object = None) -> TensorCollection:
    """Make a container of the structure that a `repr` shows, to reproduce a printed container in a debugger.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, parse_tensor_dict_string
        >>> td = TensorDict({"a": torch.ones(3, 4), "b": {"c": torch.ones(3, dtype=torch.int64)}}, batch_size=[3])
        >>> again = parse_tensor_dict_string(repr(td))
        >>> repr(again) == repr(td), again["b", "c"]
        (True, tensor([0, 0, 0]))

    Args:
        s: the `repr` of a `TensorDict`, a lazy stack or a lazy view, with or without its line breaks and indentation.
            To add dim names, which `repr` does not show, write `names=['time', None]` into the text.
        seed: fill the tensors with random numbers from this seed: normally distributed floats, integers from 0 to 99,
            or bools. By default all are zero.
        device: put all tensors there instead of on the devices in the text.

    Returns:
        a new container with the keys, batch sizes, devices and classes of the text. Leaves have the shapes and dtypes
        of the text and are shared if it says so. Details that the text leaves open are chosen as follows. A dtype
        that was not printed is torch's default. Rows of ragged leaves have one and two elements in turn, and so have
        the members of a lazy stack along dims shown as -1. A non-tensor value is parsed as a Python literal; anything
        else becomes its text, or `None` in a list that was cut.

    Raises:
        ValueError: the text is malformed or inconsistent, or names a class or device that cannot be made here. The
            error names the line, the column and the expected text.
        TypeError: `s` is not a string.
    """
    if not isinstance(s, str):
        raise TypeError(f"parse_tensor_dict_string reads a string, got {type(s).__name__}")
    try:
        return _PrintedParser(s, seed, device).parse()  # type: ignore[no-any-return]
    except RecursionError:
        raise ValueError("the containers in the text are nested more deeply than Python's recursion limit") from None


class ParseError(ValueError):
    """Raised for a text that is not the `repr` of a container, or is inconsistent."""


# --- the grammar ------------------------------------------------------------------------------------------------------

# Functions that make a leaf of each class from a tensor of its elements.
_LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "Tensor": lambda numbers: numbers,
    "Parameter": lambda numbers: torch.nn.Parameter(numbers, requires_grad=False),
    "Buffer": torch.nn.Buffer,
    "MemoryMappedTensor": lambda numbers: MemoryMappedTensor.from_tensor(numbers.cpu()),
    "FakeTensor": lambda numbers: internals.FakeTensorMode().from_tensor(numbers),
    "NestedTensor": lambda numbers: numbers,
    "UnbatchedTensor": UnbatchedTensor,
}
_HOLDERS = ("NonTensorData", "MetaData", "NonTensorStack")
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_FLAGS = ("is_shared", "requires_grad", "is_contiguous", "is_view")
# Keyword arguments that are ignored.
_STATISTICS = ("storage_size", "mean", "std", "min", "max")
_DENSE_FACTS = ("fields", "batch_size", "device", "is_shared", "names")
# The keyword arguments of each class. The argument `data` of holders is parsed separately.
_FACTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_LEAVES, ("shape", "device", "dtype", *_FLAGS, *_STATISTICS)),
    **dict.fromkeys(_HOLDERS, ("batch_size", "device")),
    "TensorDict": _DENSE_FACTS,
    "LazyStackedTensorDict": (*_DENSE_FACTS, "exclusive_fields", "stack_dim"),
    "LazyView": ("source", "op"),
}
_ENTRIES = "entries, such as {key: Tensor(shape=torch.Size([3]), ...)}"
_NO_ENTRIES = r"\}(?=\s*(?:\)|,\s*[a-z_]+=))"
_SPACE = re.compile(r"\s*")
_VALUE = r"([\s\S]*?),\s*(?=batch_size=torch\.Size\()"
_NAME = r"""None\b|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\""""
_MEMBER = re.compile(r"\s*(\d+) ->(?=\s)")
_KEY = re.compile(r"([^\n]*?):\s+(?=[A-Za-z_]\w*\()")
_NO_KEY = re.compile(r"\w\((?:shape|fields|source|device)=")


def _read_device(name: str) -> torch.device | None:
    return None if name == "None" else torch.device(name)


# For keyword arguments: a pattern of the text, a function that converts it, and the description for errors.
_FORMS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    **dict.fromkeys(_FLAGS, (r"(?:True|False)\b", "True".__eq__, "True or False")),
    **dict.fromkeys(_STATISTICS, (r"\([^()]*\)|[-+\w.]+", str, "a number")),
    "dtype": (r"torch\.\w+", _DTYPES.__getitem__, "a dtype, such as torch.float32"),
    "device": (r"\w[\w:]*", _read_device, "a device, such as cpu, cuda:0 or None"),
    "stack_dim": (r"\d+\b", int, "an int"),
    "op": (
        r"(?:view|permute|transpose|squeeze|unsqueeze)\((?:[^()]|\([^()]*\))*\)",
        lambda text: (text.partition("(")[0], ast.literal_eval(f"[{text.partition('(')[2][:-1]}]")),
        "a shape method, such as view(6) or permute(1, 0)",
    ),
}


@dataclass
class _ParsedCall:
    """A parsed `Class(name=..., ...)`. `at` is its position in the text, `facts` its keyword arguments."""

    cls: str
    at: int
    facts: dict[str, Any] = field(default_factory=dict)


class _PrintedParser:
    """Parses a text in one pass, and makes the container."""

    def __init__(self, text: str, seed: int | None, device: Any) -> None:
        self.text = text
        # The position of the next character.
        self.at = 0
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.override = None if device is None else torch.device(device)
        # Leaves with the same name of a ragged dim shared their offsets when they were printed, so they do here.
        self.offsets: dict[tuple[str, int, torch.device], Tensor] = {}

    def parse(self) -> Any:
        """Parse the whole text and make the container."""
        value = self.parse_call()
        self.expect(r"\Z", "the end of the text")
        if value.cls in _LEAVES:
            self.fail(value.at, "a container, such as TensorDict(fields={...}, ...)")
        return self.make(value)

    def make_error(self, at: int, what: str) -> ParseError:
        line = self.text.count("\n", 0, at) + 1
        return ParseError(f"line {line}, column {at - self.text.rfind(chr(10), 0, at)}: {what}")

    def fail(self, at: int, expected: str) -> NoReturn:
        rest = self.text[at:].split("\n", 1)[0]
        found = repr(rest if len(rest) <= 40 else rest[:37] + "...") if rest else "the end of the line"
        raise self.make_error(
            at, f"expected {expected}, found {found if at < len(self.text) else 'the end of the text'}"
        )

    # --- reading ------------------------------------------------------------------------------------------------

    def skip(self, pattern: str) -> str | None:
        """Skip white space and a match of `pattern`; return the match, or its group. `None` if it does not match."""
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        found = re.compile(pattern).match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[found.re.groups]

    def expect(self, pattern: str, expected: str) -> str:
        """Skip white space and a match of `pattern`; return the match, or its group.

        Raises:
            ParseError: `pattern` does not match. The message says that `expected` is missing.
        """
        found = self.skip(pattern)
        return self.fail(self.at, expected) if found is None else found

    def iterate_items(self, end: str) -> Iterator[None]:
        """Iterate over comma-separated items up to the closing bracket `end`. The caller parses each item."""
        more = self.skip(re.escape(end)) is None
        while more:
            yield
            more = self.skip(",") is not None
            if not more:
                self.expect(re.escape(end), f"',' or {end!r}")

    def parse_call(self) -> _ParsedCall:
        """Parse `Class(name=..., ...)`, a leaf or a container."""
        cls = self.expect(r"[A-Za-z_]\w*(?=\()", "a class and its content, such as TensorDict(...)")
        value = _ParsedCall(cls, self.at - len(cls))
        if cls not in _FACTS:
            self.fail(value.at, f"one of the classes that can be made from text, {', '.join(sorted(_FACTS))}")
        self.at += 1
        if cls in _HOLDERS:
            self.skip("data=")
            value.facts["data"] = self.expect(_VALUE, "a value and its batch_size=")
        for _ in self.iterate_items(")"):
            missing = [name for name in _FACTS[cls] if name not in value.facts]
            expected = f"one of {', '.join(f'{name}=' for name in missing)}" if missing else "')'"
            name = self.expect(rf"({'|'.join(missing) or '(?!)'})=", expected)
            value.facts[name] = self.parse_argument(name, cls)
        return value

    def parse_argument(self, name: str, cls: str) -> Any:
        """Parse the value of a keyword argument, the text behind `name=`."""
        self.skip("")
        start = self.at
        if name == "fields":
            return self.parse_groups(0)[0]
        if name == "exclusive_fields":
            return self.parse_groups(None)
        if name == "source":
            return self.parse_call()
        if name == "names":
            self.expect(r"\[", "dim names, such as ['time', None]")
            return [ast.literal_eval(self.expect(_NAME, "a name in quotes, or None")) for _ in self.iterate_items("]")]
        if name in ("shape", "batch_size"):
            self.expect(r"torch\.Size\(\s*\[", "a size, such as torch.Size([3, 4])")
            size = tuple([self.parse_dim(name == "shape") for _ in self.iterate_items("]")])
            self.expect(r"\)", "')'")
            if name == "batch_size" and -1 in size and cls != "LazyStackedTensorDict":
                self.fail(start, "a batch size without -1, which only lazy stacks have,")
            return size
        pattern, read, expected = _FORMS[name]
        text = self.expect(pattern, expected)
        try:
            return read(text)
        except (KeyError, ValueError, RuntimeError, SyntaxError):  # not compiled: reads text
            self.fail(start, expected)

    def parse_dim(self, may_be_ragged: bool) -> int | str:
        text = self.expect(
            r"(?:-1|\d+)(?![\w.])" + (r"|[A-Za-z]\w*" if may_be_ragged else ""),
            f"a size made of ints{', -1 and names of ragged dims' if may_be_ragged else ' and -1'}",
        )
        return text if text[0].isalpha() else int(text)

    def parse_groups(self, member: int | None) -> dict[int, dict[str, _ParsedCall]]:
        """Parse `{key: Class(...), ...}`, the entries of one member.

        If `member` is `None`, parse `{0 -> key: Class(...), ..., 1 -> ...}`, the entries that only some members of a
        lazy stack have.
        """
        found: dict[int, dict[str, _ParsedCall]] = {} if member is None else {member: {}}
        indent = re.compile(" *").match(self.text, self.text.rfind("\n", 0, self.at) + 1)
        is_grouped = member is None
        # The white space before each entry, if the text still has its line breaks.
        margin = "\n" + indent[0] + " " * (8 if is_grouped else 4)  # type: ignore[index]
        self.expect(r"\{", _ENTRIES)
        more = self.skip(_NO_ENTRIES) is None
        start = self.text.rfind("{", 0, self.at) + 1
        while more:
            self.at = start
            if is_grouped and (number := _MEMBER.match(self.text, start)):
                member, self.at = int(number[1]), number.end()
            if self.text.startswith(margin, self.at):
                self.at += len(margin)
            else:
                self.skip("")
            key = _KEY.match(self.text, self.at)
            if key is None or _NO_KEY.search(key[1]):
                self.fail(self.at, "an entry, such as key: Tensor(shape=torch.Size([3]), ...)")
            if member is None:
                self.fail(self.at, "the number of a member, such as '0 ->'")
            if key[1] in found.setdefault(member, {}):
                self.fail(self.at, f"a key that is not taken yet (there is an entry {key[1]!r} before this one)")
            self.at = key.end()
            found[member][key[1]] = self.parse_call()
            more = self.skip(",") is not None
            start = self.at
            if not more:
                self.expect(r"\}", "',' or '}'")
        return found

    # --- making -------------------------------------------------------------------------------------------------

    def require(self, value: _ParsedCall, name: str) -> Any:
        """Return a keyword argument; raise an error if the text lacks it."""
        if name not in value.facts:
            self.fail(value.at, f"a {value.cls} with {name}=..., which cannot be made without it")
        return value.facts[name]

    def device_of(self, value: _ParsedCall) -> torch.device | None:
        named: torch.device | None = value.facts.get("device")
        return named if self.override is None or named is None else self.override

    def make(self, value: _ParsedCall) -> Any:
        """Make a leaf or a container."""
        is_leaf, is_on_cpu = value.cls in _LEAVES, (self.device_of(value) or torch.device("cpu")).type == "cpu"
        try:
            made: Any = self.make_leaf(value) if is_leaf else _CONTAINERS[value.cls](self, value)
            if value.facts.get("is_shared") and is_on_cpu and is_leaf:
                made.share_memory_()
            elif value.facts.get("is_shared") and is_on_cpu:
                # Each leaf is shared if its own text says so. A shared container is locked.
                made._is_shared = True
                made.lock_()
            return made
        except ParseError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            # torch raises an AssertionError if it was built without CUDA.
            raise self.explain_failure(value, error) from error

    def explain_failure(self, value: _ParsedCall, error: Exception) -> ParseError:
        """Return the error for a call that was parsed but cannot be made."""
        device = self.device_of(value)
        hint = "" if device is None or device.type in ("cpu", "meta") else "; device='cpu' would put everything there"
        return self.make_error(value.at, f"this {value.cls} cannot be made: {error}{hint}")

    def make_tensordict(self, value: _ParsedCall) -> Any:
        entries = {key: (entry, self.make(entry)) for key, entry in self.require(value, "fields").items()}
        return self.fill_tensordict(value, entries, self.require(value, "batch_size"), value.facts.get("names"))

    def fill_tensordict(
        self, value: _ParsedCall, entries: dict[str, tuple[_ParsedCall, Any]], size: tuple[int, ...], names: Any
    ) -> Any:
        """Make a `TensorDict` from entries, each given with the call that it was made from."""
        made = TensorDict(batch_size=size, device=self.device_of(value), names=names)
        for key, (read, entry) in entries.items():
            try:
                made.set(key, entry)
            except RuntimeError as error:
                raise self.explain_failure(read, error) from error
        return made

    def make_stack(self, value: _ParsedCall) -> Any:
        dim = self.require(value, "stack_dim")
        made = makers.lazy_stack(*self.make_members(value, dim), stack_dim=dim, names=value.facts.get("names"))
        # An empty stack keeps the keys of the stack that it was sliced from.
        return made if value.facts["batch_size"][dim] else made[tuple([slice(None)] * dim + [slice(0, 0)])]

    def make_members(self, value: _ParsedCall, dim: int) -> list[Any]:
        """Make the members of a lazy stack, at least one, from the common and the exclusive entries."""
        size, common = self.require(value, "batch_size"), self.require(value, "fields")
        if not 0 <= dim < len(size) or size[dim] < 0:
            self.fail(value.at, f"a stack_dim among the dims of {list(size)}")
        exclusive = value.facts.get("exclusive_fields", {})
        if any(member >= max(1, size[dim]) for member in exclusive):
            self.fail(value.at, f"exclusive_fields of the members 0 to {max(1, size[dim]) - 1}")
        columns = {key: self.split_entry(entry, dim, size[dim]) for key, entry in common.items()}
        made = []
        for member, rest in enumerate(self.member_shapes(value, size, dim)):
            entries = {key: (common[key], column[member]) for key, column in columns.items()}
            entries |= {key: (entry, self.make(entry)) for key, entry in exclusive.get(member, {}).items()}
            made.append(self.fill_tensordict(value, entries, rest, None))
        return made

    def split_entry(self, value: _ParsedCall, dim: int, count: int) -> list[Any]:
        """Make the entry of each member from an entry of the stack."""
        if value.cls in _LEAVES and value.cls != "NestedTensor":
            shape = self.require(value, "shape")
            if len(shape) <= dim or shape[dim] != count:
                self.fail(value.at, f"an entry whose dim {dim} is of size {count}, as in the stack")
            shapes = self.member_shapes(value, shape, dim)
            return [self.make(_ParsedCall(value.cls, value.at, value.facts | {"shape": rest})) for rest in shapes]
        if value.cls == "LazyStackedTensorDict" and value.facts.get("stack_dim") == dim:
            return self.make_members(value, dim)
        return list(self.make(value).unbind(dim))

    def member_shapes(self, value: _ParsedCall, shape: tuple[int, ...], dim: int) -> list[tuple[int, ...]]:
        """Return the shape of each member along `dim`: 1 and 2 in turn replace -1."""
        count, rest = max(1, shape[dim]), shape[:dim] + shape[dim + 1 :]
        if count == 1 and -1 in rest:
            self.fail(value.at, f"a size for the dims that are -1, which the one member of dim {dim} has,")
        return [tuple([1 + i % 2 if n == -1 else n for n in rest]) for i in range(count)]

    def make_holder(self, value: _ParsedCall) -> Any:
        """Make a holder of the literal in a text, or of the text itself if it is not a literal."""
        held = _parse_literal(value.facts["data"])
        size = torch.Size(self.require(value, "batch_size"))
        if value.cls == "NonTensorStack":
            # A list that was cut, or that contains more than literals, gives values of `None`.
            held = held if isinstance(held, list) else numpy.full(size, None).tolist()
            return makers.values(held, size, 0, self.device_of(value))
        held = held if str(held) == value.facts["data"] else value.facts["data"]
        return registry.lookup(value.cls)(held, batch_size=size, device=self.device_of(value))

    def make_view(self, value: _ParsedCall) -> Any:
        source = self.require(value, "source")
        if source.cls in _LEAVES:
            self.fail(source.at, "a container")
        method, arguments = self.require(value, "op")
        with set_lazy_legacy(True):
            return getattr(self.make(source), method)(*arguments)

    def make_leaf(self, value: _ParsedCall) -> Tensor:
        shape, device = self.require(value, "shape"), self.device_of(value) or torch.device("cpu")
        dtype = value.facts.get("dtype", torch.get_default_dtype())
        if -1 in shape or value.cls == "NestedTensor" or any(isinstance(dim, str) for dim in shape):
            numbers = self.make_ragged(value, shape, dtype, device)
        else:
            numbers = self.make_numbers(shape, dtype, device)
        by_default = value.cls == "Parameter" and (dtype.is_floating_point or dtype.is_complex)
        made = _LEAVES[value.cls](numbers)
        return made.requires_grad_() if value.facts.get("requires_grad", by_default) else made

    def make_numbers(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make zeros, or random numbers that do not depend on the device."""
        if self.generator is None or device.type == "meta":
            return torch.zeros(shape, dtype=dtype, device=device)
        if dtype.is_complex or dtype.is_floating_point:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            made = torch.randn(shape, dtype=wide, generator=self.generator)
        else:
            made = torch.randint(2 if dtype == torch.bool else 100, shape, generator=self.generator)
        return made.to(device, dtype)

    def make_ragged(
        self, value: _ParsedCall, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        ragged = [i for i, dim in enumerate(shape) if isinstance(dim, str)]
        if value.cls == "Tensor" and not ragged and shape[0] != -1:
            # The strided layout of ragged tensors.
            sizes = [tuple([1 + i % 2 if dim == -1 else dim for dim in shape[1:]]) for i in range(shape[0])]
            rows = [self.make_numbers(size, dtype, device) for size in sizes]
            return torch.nested.nested_tensor(rows, dtype=dtype, device=device)
        if value.cls != "NestedTensor" or len(ragged) != 1 or not ragged[0] or -1 in shape:
            self.fail(
                value.at,
                "a NestedTensor with one ragged dim behind the first, as torch.Size([2, j1]), or a Tensor whose first "
                "dim is not ragged, as torch.Size([2, -1])",
            )
        at, rows = ragged[0], shape[0]
        key = (shape[at], rows, device)
        if key not in self.offsets:
            lengths = torch.tensor([0] + [1 + i % 2 for i in range(rows)])
            self.offsets[key] = lengths.cumsum(0).to(device)
        offsets = self.offsets[key]
        values = self.make_numbers((*shape[1:at], int(offsets[-1]), *shape[at + 1 :]), dtype, device)
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=at)


def _parse_literal(text: str) -> Any:
    """Return the value of a Python literal; `None` for any other text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


_CONTAINERS: dict[str, Callable[[_PrintedParser, _ParsedCall], Any]] = {
    **dict.fromkeys(("NonTensorData", "MetaData", "NonTensorStack"), _PrintedParser.make_holder),
    "TensorDict": _PrintedParser.make_tensordict,
    "LazyStackedTensorDict": _PrintedParser.make_stack,
    "LazyView": _PrintedParser.make_view,
}
