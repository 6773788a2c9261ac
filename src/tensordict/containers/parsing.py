"""`parse_tensor_dict_string`, which makes a container from the `repr` of one, for use in a debugger."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy
import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.containers.nontensor import MetaData, NonTensorData
from tensordict.containers.unbatched import UnbatchedTensor
from tensordict.core import makers
from tensordict.core import torch_internals as internals
from tensordict.core.settings import set_lazy_legacy
from tensordict.io import checks
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
_FLAGS = "is_shared requires_grad is_contiguous is_view"
# Keyword arguments that are ignored.
_STATISTICS = "storage_size mean std min max"
# The required and the optional keyword arguments of each class. The argument `data` of holders is parsed separately.
_ARGUMENTS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(_LEAVES, ("shape", f"device dtype {_FLAGS} {_STATISTICS}")),
    **dict.fromkeys(_HOLDERS, ("batch_size", "device")),
    "TensorDict": ("fields batch_size", "device is_shared names"),
    "LazyStackedTensorDict": ("fields batch_size stack_dim", "device is_shared names exclusive_fields"),
    "LazyView": ("source op", ""),
}
_OPERATION = r"(?:view|permute|transpose|squeeze|unsqueeze)\((?:[^()]|\([^()]*\))*\)"
# For keyword arguments: a pattern of the text, a function that converts it, and the description for errors.
_FORMS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    **dict.fromkeys(_FLAGS.split(), (r"(?:True|False)\b", "True".__eq__, "True or False")),
    **dict.fromkeys(_STATISTICS.split(), (r"\([^()]*\)|[-+\w.]+", str, "a number")),
    "dtype": (r"torch\.\w+", checks.DTYPES.__getitem__, "a dtype, such as torch.float32"),
    "device": (r"\w[\w:]*", torch.device, "a device, such as cpu, cuda:0 or None"),
    "stack_dim": (r"\d+\b", int, "an int"),
    "op": (_OPERATION, lambda text: text[:-1].split("(", 1), "a shape method, such as view(6) or permute(1, 0)"),
}
_VALUE = r"([\s\S]*?),\s*(?=batch_size=torch\.Size\()"
_NAME = r"""None\b|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\""""


class _ParsedCall(NamedTuple):
    """A parsed `Class(name=..., ...)`: the class, its position in the text, and the keyword arguments."""

    cls: str
    at: int
    arguments: dict[str, Any]


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
        value = self.parse_container()
        self.expect(r"\Z", "the end of the text")
        return self.make(value)

    def make_error(self, at: int, what: str) -> ParseError:
        line = self.text.count("\n", 0, at) + 1
        return ParseError(f"line {line}, column {at - self.text.rfind(chr(10), 0, at)}: {what}")

    def fail(self, at: int, expected: str) -> NoReturn:
        """Raise the error that `expected` is missing at the first character behind `at` that is no white space."""
        rest = self.text[at:].lstrip()
        line = rest.partition("\n")[0]
        found = repr(line if len(line) <= 40 else line[:37] + "...") if rest else "the end of the text"
        raise self.make_error(len(self.text) - len(rest), f"expected {expected}, found {found}")

    def check(self, condition: bool, at: int, expected: str) -> None:
        if not condition:
            self.fail(at, expected)

    # --- reading ------------------------------------------------------------------------------------------------

    def skip(self, pattern: str) -> str | None:
        """Skip white space and a match of `pattern`; return the match, or its group. `None` if it does not match."""
        found = re.compile(rf"\s*({pattern})").match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found[found.re.groups] if found else None

    def expect(self, pattern: str, expected: str) -> str:
        """Skip white space and a match of `pattern`; return the match, or its group.

        Raises:
            ParseError: `pattern` does not match. The message says that `expected` is missing.
        """
        found = self.skip(pattern)
        return self.fail(self.at, expected) if found is None else found

    def iterate_items(self, end: str, empty: str | None = None) -> Iterator[None]:
        """Iterate over comma-separated items up to the closing bracket `end`. The caller parses each item."""
        more = self.skip(empty or re.escape(end)) is None
        while more:
            yield
            more = self.skip(",") is not None
            if not more:
                self.expect(re.escape(end), f"',' or {end!r}")

    def parse_container(self) -> _ParsedCall:
        value = self.parse_call()
        self.check(value.cls not in _LEAVES, value.at, "a container, such as TensorDict(fields={...}, ...)")
        return value

    def parse_call(self) -> _ParsedCall:
        """Parse `Class(name=..., ...)`, a leaf or a container."""
        cls = self.expect(r"([A-Za-z_]\w*)\(", "a class and its content, such as TensorDict(...)")
        call = _ParsedCall(cls, self.at - len(cls) - 1, {})
        classes = ", ".join(sorted(_ARGUMENTS))
        self.check(cls in _ARGUMENTS, call.at, f"one of the classes that can be made from text, {classes}")
        if cls in _HOLDERS:
            self.skip("data=")
            call.arguments["data"] = self.expect(_VALUE, "a value and its batch_size=")
        required, optional = [names.split() for names in _ARGUMENTS[cls]]
        for _ in self.iterate_items(")"):
            missing = [f"{name}=" for name in required + optional if name not in call.arguments]
            expected = f"one of {', '.join(missing)}" if missing else "')'"
            name = self.expect("|".join(missing) or "(?!)", expected)[:-1]
            call.arguments[name] = self.parse_argument(name, cls)
        for name in required:
            self.check(name in call.arguments, call.at, f"a {cls} with {name}=..., which cannot be made without it")
        return call

    def parse_argument(self, name: str, cls: str) -> Any:
        """Parse the value of a keyword argument, the text behind `name=`."""
        start = self.at
        if name in ("fields", "exclusive_fields"):
            return self.parse_entries(name == "exclusive_fields")
        if name == "source":
            return self.parse_container()
        if name == "device" and self.skip("None"):
            return None
        if name == "names":
            self.expect(r"\[", "dim names, such as ['time', None]")
            return [ast.literal_eval(self.expect(_NAME, "a name in quotes, or None")) for _ in self.iterate_items("]")]
        if name in ("shape", "batch_size"):
            self.expect(r"torch\.Size\(\s*\[", "a size, such as torch.Size([3, 4])")
            dim, expected = r"(?:-1|\d+)(?![\w.])", "a size made of ints and -1"
            if name == "shape":
                dim, expected = rf"{dim}|[A-Za-z]\w*", "a size made of ints, -1 and names of ragged dims"
            dims = [self.expect(dim, expected) for _ in self.iterate_items("]")]
            self.expect(r"\)", "')'")
            lazy = name == "shape" or cls == "LazyStackedTensorDict"
            self.check(lazy or "-1" not in dims, start, "a batch size without -1, which only lazy stacks have,")
            return tuple([dim if dim[0].isalpha() else int(dim) for dim in dims])
        pattern, read, expected = _FORMS[name]
        text = self.expect(pattern, expected)
        try:
            return self.override or read(text) if name == "device" else read(text)
        except (KeyError, RuntimeError):  # not compiled: reads text
            self.fail(start, expected)

    def parse_entries(self, are_exclusive: bool) -> dict[tuple[int, str], _ParsedCall]:
        """Parse `{key: Class(...), ...}`; the entries belong to member 0.

        If `are_exclusive`, parse `{0 -> key: Class(...), ..., 1 -> ...}`, the entries that only some members of a lazy
        stack have.
        """
        entries: dict[tuple[int, str], _ParsedCall] = {}
        line = self.text[self.text.rfind("\n", 0, self.at) + 1 :]
        # The white space before each entry, if the text still has its line breaks. More of it belongs to the key.
        margin = "\n" + " " * (len(line) - len(line.lstrip(" ")) + (8 if are_exclusive else 4))
        number, member = (r"(?:\s*(\d+) ->(?=\s))?", None) if are_exclusive else ("()", "0")
        pattern = re.compile(rf"{number}(?:{margin}|(?!{margin})\s*)([^\n]*?):\s+(?=[A-Za-z_]\w*\()")
        self.expect(r"\{", "entries, such as {key: Tensor(shape=torch.Size([3]), ...)}")
        for _ in self.iterate_items("}", empty=r"\}(?=\s*(?:\)|,\s*[a-z_]+=))"):
            found = pattern.match(self.text, self.at)
            if found is None or re.search(r"\w\((?:shape|fields|source|device)=", found[2]):
                self.fail(self.at, "an entry, such as key: Tensor(shape=torch.Size([3]), ...)")
            member = found[1] or member
            if member is None:
                self.fail(self.at, "the number of a member, such as '0 ->'")
            entry = (int(member), found[2])
            self.check(entry not in entries, self.at, f"a key that is not taken yet (there is an entry {found[2]!r})")
            self.at = found.end()
            entries[entry] = self.parse_call()
        return entries

    # --- making -------------------------------------------------------------------------------------------------

    @contextmanager
    def explain(self, value: _ParsedCall) -> Iterator[None]:
        """Add the position of `value` to an error that is raised while it is made."""
        try:
            yield
        except ParseError:
            raise
        except (RuntimeError, TypeError, ValueError, SyntaxError, IndexError, AssertionError) as error:
            # torch raises an AssertionError if it was built without CUDA.
            device = value.arguments.get("device")
            elsewhere = device is not None and device.type not in ("cpu", "meta")
            hint = "; device='cpu' would put everything there" if elsewhere else ""
            raise self.make_error(value.at, f"this {value.cls} cannot be made: {error}{hint}") from error

    def make(self, value: _ParsedCall) -> Any:
        """Make a leaf or a container."""
        arguments = value.arguments
        with self.explain(value):
            if "made" in arguments:
                return arguments["made"]
            if value.cls in _LEAVES:
                made: Any = self.make_leaf(value)
            elif value.cls in _HOLDERS:
                made = self.make_holder(value)
            elif value.cls == "LazyView":
                method, sizes = arguments["op"]
                with set_lazy_legacy(True):
                    made = getattr(self.make(arguments["source"]), method)(*ast.literal_eval(f"[{sizes}]"))
            elif value.cls == "LazyStackedTensorDict":
                dim, members = arguments["stack_dim"], [self.make(member) for member in self.split_stack(value)]
                made = makers.lazy_stack(*members, stack_dim=dim, names=arguments.get("names"))
                # An empty stack keeps the keys of the stack that it was sliced from.
                made = made if arguments["batch_size"][dim] else made[(slice(None),) * dim + (slice(0, 0),)]
            else:
                size, device, names = (arguments.get(name) for name in ("batch_size", "device", "names"))
                made = TensorDict(batch_size=size, device=device, names=names)
                for (_, key), entry in arguments["fields"].items():
                    item = self.make(entry)
                    with self.explain(entry):
                        made.set(key, item)
            if arguments.get("is_shared") and (arguments.get("device") or torch.device("cpu")).type == "cpu":
                made.share_memory_()
            return made

    def split_stack(self, value: _ParsedCall) -> list[_ParsedCall]:
        """Return the members of a lazy stack, at least one, from the common and the exclusive entries."""
        size, dim = value.arguments["batch_size"], value.arguments["stack_dim"]
        exclusive = value.arguments.get("exclusive_fields", {})
        in_range = 0 <= dim < len(size) and size[dim] >= 0
        self.check(in_range, value.at, f"a stack_dim among the dims of {list(size)}")
        sizes = self.split_shape(value, size, dim)
        in_range = all(member < len(sizes) for member, _ in exclusive)
        self.check(in_range, value.at, f"exclusive_fields of the members 0 to {len(sizes) - 1}")
        columns = {at: self.split_entry(entry, dim, size[dim]) for at, entry in value.arguments["fields"].items()}
        device, members = value.arguments.get("device"), []
        for i, rest in enumerate(sizes):
            fields = {at: column[i] for at, column in columns.items()}
            fields |= {at: entry for at, entry in exclusive.items() if at[0] == i}
            members.append(
                _ParsedCall("TensorDict", value.at, {"fields": fields, "batch_size": rest, "device": device})
            )
        return members

    def split_entry(self, value: _ParsedCall, dim: int, count: int) -> list[_ParsedCall]:
        """Return the entry of each member from an entry of the stack."""
        if value.cls in _LEAVES and value.cls != "NestedTensor":
            shape = value.arguments["shape"]
            fits = len(shape) > dim and shape[dim] == count
            self.check(fits, value.at, f"an entry whose dim {dim} is of size {count}, as in the stack")
            shapes = self.split_shape(value, shape, dim)
            return [value._replace(arguments=value.arguments | {"shape": rest}) for rest in shapes]
        if value.arguments.get("stack_dim") == dim:
            return self.split_stack(value)
        return [value._replace(arguments={"made": part}) for part in self.make(value).unbind(dim)]

    def split_shape(self, value: _ParsedCall, shape: tuple[int, ...], dim: int) -> list[tuple[int, ...]]:
        """Return the shape of each member along `dim`."""
        count, rest = max(1, shape[dim]), shape[:dim] + shape[dim + 1 :]
        has_sizes = count > 1 or -1 not in rest
        self.check(has_sizes, value.at, f"a size for the dims that are -1, which the one member of dim {dim} has,")
        return [_choose_sizes(rest, i) for i in range(count)]

    def make_holder(self, value: _ParsedCall) -> Any:
        """Make a holder of the literal in a text, or of the text itself if it is not a literal."""
        text, size = value.arguments["data"], torch.Size(value.arguments["batch_size"])
        try:
            held = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            held = None
        if value.cls == "NonTensorStack":
            # A list that was cut, or that contains more than literals, gives values of `None`.
            held = held if isinstance(held, list) else numpy.full(size, None).tolist()
            return makers.values(held, size, 0, value.arguments.get("device"))
        held = held if str(held) == text else text
        cls = MetaData if value.cls == "MetaData" else NonTensorData
        return cls(held, batch_size=size, device=value.arguments.get("device"))

    def make_leaf(self, value: _ParsedCall) -> Tensor:
        cls, at, arguments = value
        shape, dtype = arguments["shape"], arguments.get("dtype", torch.get_default_dtype())
        make_numbers = partial(
            self.make_numbers, dtype, arguments.get("device") or self.override or torch.device("cpu")
        )
        ragged = [i for i, dim in enumerate(shape) if isinstance(dim, str)]
        if cls == "NestedTensor" and len(ragged) == 1 and ragged[0] and -1 not in shape:
            dim, lengths = ragged[0], torch.tensor([0] + [1 + i % 2 for i in range(shape[0])])
            values = make_numbers((*shape[1:dim], int(lengths.sum()), *shape[dim + 1 :]))
            offsets = self.offsets.setdefault(
                (shape[dim], shape[0], values.device), lengths.cumsum(0).to(values.device)
            )
            numbers = internals.nest_jagged(values, offsets, jagged_dim=dim)
        elif cls == "Tensor" and not ragged and -1 in shape[1:] and shape[0] != -1:
            # The strided layout of ragged tensors.
            rows = [make_numbers(_choose_sizes(shape[1:], i)) for i in range(shape[0])]
            numbers = torch.nested.nested_tensor(rows, dtype=dtype)
        elif cls == "NestedTensor" or ragged or -1 in shape:
            nested = "a NestedTensor with one ragged dim behind the first, as torch.Size([2, j1])"
            self.fail(at, f"{nested}, or a Tensor whose first dim is not ragged, as torch.Size([2, -1])")
        else:
            numbers = make_numbers(shape)
        by_default = cls == "Parameter" and (dtype.is_floating_point or dtype.is_complex)
        made = _LEAVES[cls](numbers)
        return made.requires_grad_() if arguments.get("requires_grad", by_default) else made

    def make_numbers(self, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> Tensor:
        """Make zeros, or random numbers that do not depend on the device."""
        if self.generator is None or device.type == "meta":
            return torch.zeros(shape, dtype=dtype, device=device)
        if dtype.is_complex or dtype.is_floating_point:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            return torch.randn(shape, dtype=wide, generator=self.generator).to(device, dtype)
        end = 2 if dtype == torch.bool else 100
        return torch.randint(end, shape, generator=self.generator).to(device, dtype)


def _choose_sizes(shape: tuple[int, ...], i: int) -> tuple[int, ...]:
    """Return the shape of row `i` of a ragged leaf: 1 and 2 in turn replace -1."""
    return tuple([1 + i % 2 if n == -1 else n for n in shape])
