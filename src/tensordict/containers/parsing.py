"""`parse_tensor_dict_string`: the text that `repr` gives of a container, read back into a container like it."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
    try:
        value = _TextReader(s).read()
        if value.is_leaf:
            _fail(s, value.at, "a container, such as TensorDict(fields={...}, ...)")
        return _Maker(s, seed, device).container(value)  # type: ignore[no-any-return]
    except RecursionError:
        raise ValueError("the containers in the text are nested more deeply than Python's recursion limit") from None


class ParseError(ValueError):
    """A text that is no `repr` of a container, or says what cannot be."""

    def __init__(self, text: str, at: int, what: str) -> None:
        line = text.count("\n", 0, at) + 1
        super().__init__(f"line {line}, column {at - text.rfind(chr(10), 0, at)}: {what}")


def _fail(text: str, at: int, expected: str) -> NoReturn:
    rest = text[at:].split("\n", 1)[0]
    found = repr(rest if len(rest) <= 40 else rest[:37] + "...") if rest else "the end of the line"
    raise ParseError(text, at, f"expected {expected}, found {found if at < len(text) else 'the end of the text'}")


# --- reading ----------------------------------------------------------------------------------------------------------

_LEAVES = ("Tensor", "Parameter", "Buffer", "MemoryMappedTensor", "FakeTensor", "NestedTensor", "UnbatchedTensor")
_LEAF_FACTS = ("shape", "device", "dtype", "is_shared", "requires_grad", "is_contiguous", "is_view")
# What is read over.
_STATISTICS = ("storage_size", "mean", "std", "min", "max")
_DENSE_FACTS = ("fields", "batch_size", "device", "is_shared", "names")
# The keyword arguments of each class; `data` of the holders of values is read apart from them.
_FACTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_LEAVES, _LEAF_FACTS + _STATISTICS),
    **dict.fromkeys(("NonTensorData", "MetaData", "NonTensorStack"), ("batch_size", "device")),
    "TensorDict": _DENSE_FACTS,
    "LazyStackedTensorDict": (*_DENSE_FACTS, "exclusive_fields", "stack_dim"),
    "LazyView": ("source", "op"),
}
# Python's parser refuses 200 brackets within each other; one pair is added.
_MOST_BRACKETS = 198

_TOKEN = re.compile(
    r"(?P<value>\b(?:NonTensorData|MetaData)\(\s*data=\s*|\bNonTensorStack\(\s*)|(?P<groups>exclusive_fields=\s*)?[({\[]"
    r"|[)\]},]|'[^'\\\n]*'|\"[^\"\\\n]*\""
)
_VALUE = re.compile(r"(.*?),\s*(?=batch_size=torch\.Size\()", re.DOTALL)
_MEMBER = re.compile(r"\s*(\d+) ->(?=\s)")
_KEY = re.compile(r"([^\n]*?):\s+(?=[A-Za-z_]\w*\()")
_GOES_ON, _ENDS = re.compile(r"\s*[,)\]}]"), re.compile(r"\s*\Z")
_FOREIGN = re.compile(r"[^ -\[\]-~]")
_LEAF = re.compile(r"\w*Tensor\((?:\w+=(?:torch\.Size\(\[[^][()]*\]\)|[^][(){},'\"]*)(?:,\s*|(?=\))))*\)(?=,|\})")
_NO_KEY = re.compile(r"\w\((?:shape|fields|source|device)=")
_NO_ENTRIES = re.compile(r"(?:exclusive_fields=\s*)?\{\s*\}\s*(?:\)|,\s*[a-z_]+=)")


@dataclass
class _ParsedCall:
    """`Class(name=..., ...)` as it was read; `at` is its position in the text."""

    cls: str
    at: int
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_leaf(self) -> bool:
        return self.cls in _LEAVES


class _TextReader:
    """Reads a text with Python's own parser.

    Keys, and values that are no tensors, may be any text. They are replaced by spaces first; the rest is an expression
    of Python, and the position of a node in it that of the node in the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.code = list(re.sub(r"(device=\s*\w+):", r"\1_", re.sub(r"\s", " ", text)))
        # By the position of the class that an entry is of: its key, where that begins, and the number that a lazy stack
        # shows before the first entry of a member.
        self.keys: dict[int, tuple[str, int, int | None]] = {}
        # By the position of the class that holds the value.
        self.values: dict[int, str] = {}

    def fail(self, at: int | ast.expr | ast.keyword, expected: str) -> NoReturn:
        at = at if isinstance(at, int) else at.col_offset - 1
        _fail(self.text, self.skip(max(at, 0)), expected)

    def skip(self, at: int) -> int:
        """The position behind the white space."""
        return re.compile(r"\s*").match(self.text, at).end()  # type: ignore[union-attr]

    def read(self) -> _ParsedCall:
        code = self.expression()
        try:
            # A character that takes several bytes would move the positions behind it.
            tree = ast.parse("(" + _FOREIGN.sub("?", code) + ")", mode="eval")
        except SyntaxError as error:
            self.fail((error.offset or 2) - 2, f"what a container is printed as ({error.msg})")
        return self.value(tree.body)

    # --- to an expression ---------------------------------------------------------------------------------------

    def expression(self) -> str:
        """The text on one line, without keys and values; notes these."""
        text, at = self.text, 0
        # For braces, the white space before each entry, and whether it may be of one member only.
        brackets: list[tuple[str, bool] | None] = []
        while token := _TOKEN.search(text, at):
            (start, at), last = token.span(), token[0][-1]
            if token["value"]:
                if (value := _VALUE.match(text, at)) is None:
                    self.fail(at, "a value and its batch_size=")
                self.values[start], at, last = value[1], value.end(), "("
                self.blank(text.index("(", start) + 1, at)
            if last in "({[":
                brackets.append(self.margin(start, token["groups"] is not None) if last == "{" else None)
                if len(brackets) > _MOST_BRACKETS:
                    raise ParseError(text, at, "containers nested more deeply than Python's parser reads")
            elif last in ")}]":
                del brackets[-1:]
                if not (_GOES_ON if brackets else _ENDS).match(text, at):
                    self.fail(at, "',' or ')'" if brackets else "the end of the text")
            if last in "{," and brackets and (margin := brackets[-1]) and not _NO_ENTRIES.match(text, start):
                at = self.entry(at, *margin)
        if brackets:
            self.fail(len(text), "more of a container, such as fields={...}, or ')'")
        return "".join(self.code)

    def blank(self, start: int, stop: int) -> None:
        self.code[start:stop] = " " * (stop - start)

    def margin(self, at: int, is_grouped: bool) -> tuple[str, bool]:
        """What entries begin with if the text is as it was printed: they are indented by four more than this line."""
        indent = re.compile(" *").match(self.text, self.text.rfind("\n", 0, at) + 1)
        return "\n" + indent[0] + " " * (8 if is_grouped else 4), is_grouped  # type: ignore[index]

    def entry(self, start: int, margin: str, is_grouped: bool) -> int:
        """Note the key of the entry that begins here; the position at which there is more to note."""
        member = _MEMBER.match(self.text, start) if is_grouped else None
        at = member.end() if member else start
        at = at + len(margin) if self.text.startswith(margin, at) else self.skip(at)
        key = _KEY.match(self.text, at)
        if key is None or _NO_KEY.search(key[1]):
            self.fail(at, "an entry, such as key: Tensor(shape=torch.Size([3]), ...)")
        self.keys[key.end()] = key[1], at, int(member[1]) if member else None
        self.blank(start, key.end())
        # There are no keys in a tensor.
        return key.end() if (leaf := _LEAF.match(self.text, key.end())) is None else leaf.end()

    # --- from nodes ---------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> _ParsedCall:
        """`Class(name=..., ...)`, a leaf or a container."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            self.fail(node, "a class and its content, such as TensorDict(...)")
        cls, at = node.func.id, node.col_offset - 1
        if cls not in _FACTS:
            self.fail(at, f"one of the classes that can be made from text, {', '.join(sorted(_FACTS))}")
        value = _ParsedCall(cls, at)
        items: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
        for item in items:
            missing = [name for name in _FACTS[cls] if name not in value.facts]
            if not isinstance(item, ast.keyword) or item.arg not in missing:
                self.fail(item, f"one of {', '.join(f'{name}=' for name in missing)}" if missing else "')'")
            value.facts[item.arg] = _READ[item.arg](self, item.value)
            if item.arg == "batch_size" and -1 in value.facts[item.arg] and cls != "LazyStackedTensorDict":
                self.fail(item.value, "a batch size without -1, which only lazy stacks have,")
        if at in self.values:
            value.facts["data"] = self.values[at]
        return value

    def groups(self, node: ast.expr, member: int | None = None) -> dict[int, dict[str, _ParsedCall]]:
        """`{0 -> key: Class(...), ..., 1 -> ...}`, the entries that only some members of a lazy stack have."""
        found: dict[int, dict[str, _ParsedCall]] = {} if member is None else {member: {}}
        if not (isinstance(node, ast.Set) or (isinstance(node, ast.Dict) and not node.keys)):
            self.fail(node, "entries, such as {key: Tensor(shape=torch.Size([3]), ...)}")
        for entry in getattr(node, "elts", ()):
            key, at, number = self.keys[entry.col_offset - 1]
            member = member if number is None else number
            if member is None:
                self.fail(at, "the number of a member, such as '0 ->'")
            if key in found.setdefault(member, {}):
                self.fail(at, f"a key that is not taken yet (there is an entry {key!r} before this one)")
            found[member][key] = self.value(entry)
        return found

    def entries(self, node: ast.expr) -> dict[str, _ParsedCall]:
        """`{key: Class(...), ...}`"""
        return self.groups(node, 0)[0]

    def size(self, node: ast.expr) -> tuple[int | str, ...]:
        """`torch.Size([2, -1, j1])`: ints, and names of ragged dims."""
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), "Size"), [ast.List(dims)], []):
                return tuple([self.dim(dim) for dim in dims])
        self.fail(node, "a size, such as torch.Size([3, 4])")

    def dim(self, node: ast.expr) -> int | str:
        match node:
            case ast.UnaryOp(ast.USub(), ast.Constant(1)):
                return -1
            case ast.Constant(value) if type(value) is int:
                return value
            case ast.Name(name):
                return name
        self.fail(node, "a size made of ints, -1 and names of ragged dims")

    def batch_size(self, node: ast.expr) -> tuple[int | str, ...]:
        """That of a lazy stack has -1 where the members differ."""
        size = self.size(node)
        if any(isinstance(dim, str) for dim in size):
            self.fail(node, "a batch size made of ints")
        return size

    def shown(self, node: ast.expr) -> str:
        return self.text[node.col_offset - 1 : (node.end_col_offset or 0) - 1]

    def device(self, node: ast.expr) -> torch.device | None:
        name = self.shown(node)
        try:
            return None if name == "None" else torch.device(name)
        except RuntimeError:
            self.fail(node, "a device, such as cpu, cuda:0 or None")

    def dtype(self, node: ast.expr) -> torch.dtype:
        match node:
            case ast.Attribute(ast.Name("torch"), name) if isinstance(dtype := getattr(torch, name, None), torch.dtype):
                return dtype
        self.fail(node, "a dtype, such as torch.float32")

    def constant(self, node: ast.expr, kind: type, expected: str) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is kind:
            return node.value
        self.fail(node, expected)

    def statistic(self, node: ast.expr) -> None:
        """A number that is not needed: `-1e-07`, `nan` or `1+2j`."""
        if not isinstance(node, ast.Constant | ast.Name | ast.UnaryOp | ast.BinOp):
            self.fail(node, "a number")

    def names(self, node: ast.expr) -> list[str | None]:
        if not isinstance(node, ast.List):
            self.fail(node, "dim names, such as ['time', None]")
        for item in node.elts:
            if not (isinstance(item, ast.Constant) and isinstance(item.value, str | None)):
                self.fail(item, "a name in quotes, or None")
        return list(ast.literal_eval(self.shown(node)))

    def operation(self, node: ast.expr) -> tuple[str, Any]:
        """The shape method of a lazy view and its arguments."""
        match node:
            case ast.Call(ast.Name("view" | "permute" | "transpose" | "squeeze" | "unsqueeze" as method), dims, []):
                with contextlib.suppress(ValueError):
                    return method, tuple([ast.literal_eval(dim) for dim in dims])
        self.fail(node, "a shape method, such as view(6) or permute(1, 0)")


_READ: dict[str, Callable[[_TextReader, ast.expr], Any]] = {
    **dict.fromkeys(_LEAF_FACTS, partial(_TextReader.constant, kind=bool, expected="True or False")),
    **dict.fromkeys(_STATISTICS, _TextReader.statistic),
    "shape": _TextReader.size,
    "batch_size": _TextReader.batch_size,
    "device": _TextReader.device,
    "dtype": _TextReader.dtype,
    "names": _TextReader.names,
    "fields": _TextReader.entries,
    "exclusive_fields": _TextReader.groups,
    "stack_dim": partial(_TextReader.constant, kind=int, expected="an int"),
    "source": _TextReader.value,
    "op": _TextReader.operation,
}

# --- making -----------------------------------------------------------------------------------------------------------


class _Maker:
    """Makes what was read."""

    def __init__(self, text: str, seed: int | None, device: Any) -> None:
        self.text = text
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.override = None if device is None else torch.device(device)
        self.fake: internals.FakeTensorMode | None = None
        # Leaves that show the same ragged dim share its offsets, as they did where they were printed.
        self.offsets: dict[tuple[str, int, torch.device], Tensor] = {}

    def fact(self, value: _ParsedCall, name: str) -> Any:
        """A fact that cannot be done without."""
        if name not in value.facts:
            _fail(self.text, value.at, f"a {value.cls} with {name}=..., which cannot be made without it")
        return value.facts[name]

    def device(self, value: _ParsedCall) -> torch.device | None:
        named: torch.device | None = value.facts.get("device")
        return named if self.override is None or named is None else self.override

    # --- containers ---------------------------------------------------------------------------------------------

    def container(self, value: _ParsedCall) -> Any:
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

    def contradiction(self, value: _ParsedCall, error: Exception) -> ParseError:
        """The error of a text that can be read, but not made."""
        device = self.device(value)
        hint = "" if device is None or device.type in ("cpu", "meta") else "; device='cpu' would put everything there"
        return ParseError(self.text, value.at, f"this {value.cls} cannot be made: {error}{hint}")

    def tensordict(self, value: _ParsedCall) -> Any:
        entries = {key: (entry, self.entry(entry)) for key, entry in self.fact(value, "fields").items()}
        size = torch.Size(self.fact(value, "batch_size"))
        return self.filled(value, entries, size, value.facts.get("names"))

    def filled(
        self, value: _ParsedCall, entries: dict[str, tuple[_ParsedCall, Any]], size: torch.Size, names: object
    ) -> Any:
        """A `TensorDict` of the entries, each with what it was made from."""
        made = TensorDict(batch_size=size, device=self.device(value), names=names)
        for key, (read, entry) in entries.items():
            try:
                made.set(key, entry)
            except RuntimeError as error:
                raise self.contradiction(read, error) from error
        return made

    def entry(self, value: _ParsedCall) -> Any:
        return self.leaf(value) if value.is_leaf else self.container(value)

    def stack(self, value: _ParsedCall) -> Any:
        dim = self.fact(value, "stack_dim")
        made = makers.lazy_stack(*self.members(value, dim), stack_dim=dim, names=value.facts.get("names"))
        # A stack of none has its entries from the one that it was cut from.
        return made if value.facts["batch_size"][dim] else made[tuple([slice(None)] * dim + [slice(0, 0)])]

    def members(self, value: _ParsedCall, dim: int) -> list[Any]:
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

    def split(self, value: _ParsedCall, dim: int, count: int) -> list[Any]:
        """What the members of a lazy stack have of an entry of the stack."""
        if value.is_leaf and value.cls != "NestedTensor":
            shape = self.fact(value, "shape")
            if len(shape) <= dim or shape[dim] != count:
                _fail(self.text, value.at, f"an entry whose dim {dim} is of size {count}, as that of the stack is")
            return [
                self.leaf(_ParsedCall(value.cls, value.at, value.facts | {"shape": rest}))
                for rest in self.shapes(value, shape, dim)
            ]
        if value.cls == "LazyStackedTensorDict" and value.facts.get("stack_dim") == dim:
            return self.members(value, dim)
        return list(self.entry(value).unbind(dim))

    def shapes(self, value: _ParsedCall, shape: tuple[int, ...], dim: int) -> list[tuple[int, ...]]:
        """What is left of a shape for each of the members along `dim`: 1 and 2 in turn in place of -1."""
        count, rest = max(1, shape[dim]), shape[:dim] + shape[dim + 1 :]
        if count == 1 and -1 in rest:
            _fail(self.text, value.at, f"a size for the dims that are -1, which the one member of dim {dim} has,")
        return [tuple([1 + i % 2 if n == -1 else n for n in rest]) for i in range(count)]

    def holder(self, value: _ParsedCall) -> Any:
        """The holder of what a text stands for, as far as it is a literal; else of the text."""
        text = self.fact(value, "data")
        held = _literal(text)
        size = torch.Size(self.fact(value, "batch_size"))
        return registry.lookup(value.cls)(
            text if str(held) != text else held, batch_size=size, device=self.device(value)
        )

    def values(self, value: _ParsedCall) -> Any:
        """A stack of the values of a printed list; of `None` where it is cut or made of other things than literals."""
        size = torch.Size(self.fact(value, "batch_size"))
        try:
            return makers.values(_literal(self.fact(value, "data")), size, 0, self.device(value))
        except ValueError:
            return makers.values(numpy.full(size, None).tolist(), size, 0, self.device(value))

    def view(self, value: _ParsedCall) -> Any:
        source = self.fact(value, "source")
        if source.is_leaf:
            _fail(self.text, source.at, "a container")
        method, arguments = self.fact(value, "op")
        with set_lazy_legacy(True):
            return getattr(self.container(source), method)(*arguments)

    # --- leaves -------------------------------------------------------------------------------------------------

    def leaf(self, value: _ParsedCall) -> Tensor:
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

    def tensor(self, value: _ParsedCall, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if any(isinstance(dim, str) for dim in shape) or value.cls == "NestedTensor":
            return self.jagged(value, shape, dtype, device)
        if -1 in shape:
            return self.strided(value, shape, dtype, device)
        if value.cls == "MemoryMappedTensor":
            return MemoryMappedTensor.from_tensor(self.numbers(shape, dtype, torch.device("cpu")))
        if value.cls == "FakeTensor":
            # Made when it is needed: it takes 0.5 ms.
            self.fake = self.fake or internals.FakeTensorMode()
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
        if dtype.is_complex or dtype.is_floating_point:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            made = torch.randn(shape, dtype=wide, generator=self.generator)
        else:
            made = torch.randint(2 if dtype == torch.bool else 100, shape, generator=self.generator)
        return made.to(device, dtype)

    def jagged(self, value: _ParsedCall, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
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

    def strided(self, value: _ParsedCall, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
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


_CONTAINERS: dict[str, Callable[[_Maker, _ParsedCall], Any]] = {
    "TensorDict": _Maker.tensordict,
    "LazyStackedTensorDict": _Maker.stack,
    "LazyView": _Maker.view,
    "NonTensorData": _Maker.holder,
    "MetaData": _Maker.holder,
    "NonTensorStack": _Maker.values,
}
