"""The arguments of one line, drawn for the container that it is called on."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator

from differ.arrangements import Arrangements, comma
from differ.sides import Summary
from differ.specs import NAMES, VALUES, Containers, render, shape_text

DTYPES = {
    "f32": "torch.float32",
    "f64": "torch.float64",
    "f16": "torch.float16",
    "bf16": "torch.bfloat16",
    "i64": "torch.int64",
    "i32": "torch.int32",
    "i16": "torch.int16",
    "i8": "torch.int8",
    "u8": "torch.uint8",
    "bl": "torch.bool",
    "c64": "torch.complex64",
}
_UNARY = [
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]
_BINARY = [
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "maximum",
    "minimum",
    "clamp_max",
    "clamp_min",
    "logical_and",
    "bitwise_and",
    "mod",
    "rsub",
]

# Placeholders whose arguments depend on nothing.
CHOICES: dict[str, list[str]] = {
    "bool": ["True", "False"],
    "n": ["0", "1", "1", "2", "2", "3", "-1"],
    "n01": ["0", "1", "2"],
    "num": ["0", "1", "2", "0.5", "-1", "2.5", "True"],
    "default": ["None", "0", "torch.zeros(1)", '"d"', "1.5"],
    "defop": ["None", '"intersection"', "torch.zeros(())"],
    "sep": [".", ".", "_", "/", "::"],
    "isleaf": ["tensordict.is_leaf_nontensor", "None", "tensordict.default_is_leaf", "tensordict.is_tensorclass"],
    "value": VALUES,
    "dtype": ["f32", "f64", "i64", "i32", "bl", "bf16", "f16", "c64", "u8"],
    "device": ['"cpu"', '"cpu"', 'torch.device("cpu")', "None", '"meta"'],
    "fn": [
        "lambda u: u + 1",
        "lambda u: u * 0",
        "lambda u: None",
        "lambda u: u",
        "lambda u: u.unsqueeze(0)",
        "lambda u: u.sum()",
        "torch.zeros_like",
        "lambda u: u if u.dtype is f32 else None",
        "lambda u: u.to(f64)",
        "lambda u: 1 / 0",
        "lambda u: 3",
        "lambda u: u.shape",
        "lambda u: u.flatten()",
        "lambda u: TensorDict(q=u)",
    ],
    "nfn": [
        "lambda n, u: u + 1",
        "lambda n, u: None",
        "lambda n, u: u if n == 'a' else None",
        "lambda n, u: u.sum()",
        "lambda n, u: n",
        "lambda n, u: u + len(n)",
    ],
    "unary": [*_UNARY, "isnan", "isfinite", "isneginf", "isposinf", "isreal"],
    "unary_": [name + "_" for name in _UNARY],
    "binary": _BINARY,
    "binary_": [name + "_" for name in _BINARY if name not in ("rsub", "mod", "logical_and", "bitwise_and")],
    "op": ["+", "-", "*", "/", "**", "//", "%", "&", "|", "^", "@", "<<"],
    "iop": ["+=", "-=", "*=", "/=", "**=", "//=", "|=", "&="],
    "cmp": ["==", "!=", "<", "<=", ">", ">="],
    "reduce": ["sum", "mean", "prod", "nansum", "nanmean"],
    "minmax": ["min", "max"],
    "aminmax": ["amin", "amax"],
    "cumm": ["cummin", "cummax"],
    "varstd": ["var", "std"],
    "q": ["0.5", "0.25", "torch.tensor([0.25, 0.75])", "1.5"],
    "cast": [
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "uint16",
    ],
    "tfun1": [
        "abs",
        "exp",
        "sqrt",
        "sin",
        "isnan",
        "sign",
        "neg",
        "atleast_1d",
        "numel",
        "is_tensor",
        "flipud",
        "ravel",
        "detach",
        "isfinite",
    ],
    "tbinary": [name for name in _BINARY if name not in ("mod",)] + ["true_divide", "bitwise_or", "fmod"],
    "treduce": ["amin", "amax", "min", "max", "cummin", "cummax", "any", "all", "logsumexp", "softmax", "norm"],
    "tshape": ["squeeze", "ravel", "fliplr", "flipud", "atleast_2d", "atleast_3d", "detach", "clone", "numel"],
    "tshape1": ["squeeze", "unsqueeze", "unbind", "flatten"],
    "tswap": ["transpose", "swapaxes", "swapdims", "movedim", "moveaxis"],
    "tsplit": ["split", "chunk", "tensor_split"],
    "isdtype": ["is_bool", "is_integer", "is_floating", "is_inexact"],
    "side": ['"left"', '"right"', '"left"', '"middle"'],
    "mode": ['"r"', '"r+"', '"r"', '"r+"', '"w"', "None"],
    "nulls": ['"raise"', '"fill"', '"mask"'],
    "cfilter": [
        "tensordict.is_inexact",
        "tensordict.is_floating",
        "tensordict.is_integer",
        "lambda k, v: True",
        "lambda k, v: False",
        "lambda k, v: k[-1] == 'a'",
        "lambda k, v: len(k) > 1",
        "lambda k, v: v.dtype is f32",
        "lambda v: True",
        "None",
    ],
    "mfn": [
        "lambda u: u + 1",
        "lambda u: (u, u + 1)",
        "lambda *u: u[0]",
        "lambda **u: list(u.values())[0]",
        "lambda u: None",
        "lambda u: u.sum()",
        "lambda u: u.float().mean(-1)",
        "torch.zeros_like",
        "torch.nn.Identity()",
        "torch.nn.Flatten(0)",
        "lambda *u: len(u)",
    ],
    "mfn2": ["lambda u, v: u + v", "torch.add", "lambda u, v: (u, v)", "lambda u, v=None: u", "lambda u, v: v is None"],
    "mkey": ['"m1"', '"m2"', '"m1", "m2"', '"missing"', ""],
    "inplace": ["True", "False", '"empty"', "None"],
    "itype": [
        "InteractionType.MODE",
        "InteractionType.MEAN",
        "InteractionType.MEDIAN",
        "InteractionType.RANDOM",
        "InteractionType.DETERMINISTIC",
        '"random"',
        '"mode"',
        "None",
    ],
    "samples": ["2", "[2]", "torch.Size([2])", "0", "None"],
    "normal": ["torch.distributions.Normal", "torch.distributions.Laplace", "IndependentNormal", "TanhNormal"],
    "discrete": ["torch.distributions.Categorical", "OneHotCategorical", "torch.distributions.Bernoulli"],
    "sampling": ["sample()", "sample((2,))", "rsample()", "mode", "mean", "deterministic_sample"],
    "tcls": ["TCA", "TCB", "TCN", "TCC", "TCO", "TCF", "TCF", "TCS", "TCS", "TCD", "TCM", "TCM", "TCX", "TCE", "TCE"],
    "attr": ["a", "b", "s", "x", "n", "child", "missing", "double_a", "batch_size", "device"],
}
ODD_KEYS = ['"missing"', '("a", "missing")', '"a"', '("missing", "q")', "()", "3", '("a", 1)', "None", '""']
ODD_OBJECTS = [
    "(T(2), T(3))",
    "[T(2), T(2)]",
    "[{'a': T(2)}, {'a': T(2)}]",
    "1",
    '"text"',
    "T(2, 3)",
    "np.zeros(3)",
    "None",
    '{"a": [1, 2]}',
    '{"a": {"b": "c"}}',
    'np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")])',
    '[("a", 1)]',
    '{"a": (T(2), T(2))}',
    '{"a": np.zeros(2), "b": 1.5, "c": True}',
]
ODD_ENTRIES = [
    "T(5, 7)",
    "T()",
    "[]",
    "{}",
    "np.float64(1.5)",
    "[1, 2]",
    "['a', 'b']",
    "torch.nn.Parameter(T(2))",
    "MemoryMappedTensor.from_tensor(T(2))",
]
ODD_ASSIGNED = ["None", '"text"', "[]", "{}", "TensorDict()", 'TensorDict({"new": T(2)}, [])', "np.ones(1)"]
ODD_SIZES = ["[]", "[2]", "[1]", "()", "2", "torch.Size([])", "[3, 2]", "None", "[-1]", "(1,)", "[2, 3, 4, 5]"]

Key = tuple[str, ...]


def containers_in(summary: Summary, expression: str, depth: int = 0) -> Iterator[tuple[str, Summary]]:
    """Expression and summary of every container that a variable holds."""
    if summary["k"] == "td" and "nontensor" not in summary:
        yield expression, summary
    elif summary["k"] == "list" and depth < 1:
        for i, part in enumerate(summary["entries"][:3]):
            yield from containers_in(part, f"{expression}[{i}]", depth + 1)


def keys_of(summary: Summary, prefix: Key = ()) -> Iterator[tuple[Key, bool, Summary]]:
    """List the keys of a container: the key, whether it leads to a node, and the entry's summary."""
    if "members" in summary:
        if summary["members"]:
            yield from keys_of(summary["members"][0], prefix)
        return
    for name, entry in zip(summary.get("keys", []), summary.get("entries", [])):
        node = entry["k"] == "td" and "nontensor" not in entry
        yield (*prefix, name), node, entry
        if node:
            yield from keys_of(entry, (*prefix, name))


class Arguments:
    """Draws arguments for the container `x`. `summary` describes it; `others` are all containers."""

    def __init__(self, rng: random.Random, x: str, summary: Summary, others: list[tuple[str, Summary]]) -> None:
        self.r, self.x, self.others = rng, x, others
        self.batch_size: list[int] = summary["batch_size"]
        self.keys = list(keys_of(summary))
        self.containers, self.arrangements = Containers(rng), Arrangements(rng)

    def draw(self, placeholder: str) -> str:
        """The code of an argument."""
        if placeholder in CHOICES:
            return self.r.choice(CHOICES[placeholder])
        make: Callable[[Arguments], str] = PLACEHOLDERS[placeholder]
        return make(self)

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def _dim(self, extra: int = 0) -> str:
        return self.arrangements.dim(len(self.batch_size) + extra)

    # Keys

    def key_text(self, key: Key) -> str:
        if len(key) == 1:
            return f'"{key[0]}"' if self.chance(0.9) else f'("{key[0]}",)'
        if self.chance(0.05):
            return f'("{key[0]}", ({", ".join(map(repr, key[1:]))},))'
        return "(" + ", ".join(f'"{name}"' for name in key) + ")"

    def existing(self) -> str:
        return self.key_text(self.r.choice(self.keys)[0] if self.keys else ("a",))

    def key(self) -> str:
        if self.chance(0.86) and self.keys:
            return self.existing()
        return self.r.choice(ODD_KEYS)

    def new_key(self) -> str:
        p = self.r.random()
        if p < 0.6:
            return '"n1"'
        if p < 0.75:
            nodes = [key for key, node, _ in self.keys if node]
            return self.key_text((*self.r.choice(nodes), "n2")) if nodes else '("nest", "n2")'
        return '("nest", "n2")' if p < 0.88 else self.key()

    def _some_keys(self) -> list[str]:
        count = self.r.choice([0, 1, 1, 2])
        return [self.key() if self.chance(0.2) else self.existing() for _ in range(count)]

    def key_list(self) -> str:
        return "[" + ", ".join(self._some_keys()) + "]"

    def key_arguments(self) -> str:
        keys = self._some_keys()
        return ", ".join(keys) if keys or self.chance(0.5) else "*[]"

    # Containers

    def other(self) -> str:
        """Draw a container like this one, or another existing one."""
        p = self.r.random()
        same = [e for e, s in self.others if s["batch_size"] == self.batch_size and e != self.x]
        for share, make in ((0.3, "{}.clone()"), (0.4, "({} + 1)")):
            if p < share:
                return make.format(self.x)
        if p < 0.45:
            return f"{self.x}.select({self.existing()})"
        if p < 0.5:
            return f"{self.x}.clone().zero_()"
        if same and p < 0.85:
            return self.r.choice(same)
        if p < 0.9 and self.batch_size:
            return f"{self.x}[:1]"
        return self.r.choice(self.others)[0]

    def several(self) -> str:
        """A list or tuple of containers, this one first."""
        count = self.r.choice([1, 2, 2, 3])
        out = [self.x] + [self.other() for _ in range(count - 1)]
        if self.chance(0.02):
            out = []
        if self.chance(0.3):
            out = [self.x] * count
        return f"[{', '.join(out)}]" if self.chance(0.85) else f"({comma(out)})"

    def literal(self) -> str:
        """A dict of entries."""
        spec = self.containers.dense(1, list(self.batch_size), plain=self.chance(0.4))
        spec["dict"] = True
        return render(spec)

    def foreign(self) -> str:
        """An object for `from_any` and its kin."""
        p = self.r.random()
        if p < 0.35:
            return self.literal()
        if p < 0.5:
            return self.x
        if p < 0.7:
            return f"{'Point' if p < 0.6 else 'Rec'}(T(2, 3), {self.literal()})"
        return self.r.choice(ODD_OBJECTS)

    # Values

    def tensor(self) -> str:
        """A tensor of the batch size, or one that broadcasts or does not."""
        p = self.r.random()
        bs = self.batch_size
        shape = bs if p < 0.7 else [1] * len(bs) if p < 0.8 else [*bs, 2] if p < 0.9 else [2]
        args = [str(n) for n in shape]
        if self.chance(0.15):
            args.append("dt=i64")
        if self.chance(0.5):
            args.append("s=1")
        return f"T({', '.join(args)})"

    def mask(self) -> str:
        p = self.r.random()
        shape = self.batch_size if p < 0.8 else self.batch_size[:1] if p < 0.95 else [*self.batch_size, 2]
        return f"T({', '.join(map(str, [*shape, 'dt=bl']))}, s={self.r.randrange(5)})"

    def operand(self) -> str:
        p = self.r.random()
        if p < 0.4:
            return self.draw("num")
        if p < 0.6:
            return self.tensor()
        return self.other() if p < 0.95 else self.r.choice(["None", '"text"', "np.ones(1)", "{}", "1j"])

    def new_value(self) -> str:
        """A value for an entry."""
        r, bs = self.r, self.batch_size
        p = r.random()
        if p < 0.45:
            return render(self.containers.leaf(list(bs)))
        if p < 0.55:
            return render(self.containers.dense(1, list(bs)))
        if p < 0.62:
            return r.choice(VALUES)
        if p < 0.70:
            return self.draw("num")
        if p < 0.75:
            return self.other()
        if p < 0.80:
            return f"NonTensorData({r.choice(VALUES)})"
        if p < 0.85:
            return '{"p": ' + render(self.containers.leaf(list(bs))) + "}"
        if p < 0.90 and bs:
            return f"np.ones({bs})"
        if p < 0.93 and bs:
            return str(list(range(bs[0])))
        return render(self.containers.tensorclass(list(bs), 2)) if p < 0.96 else r.choice(ODD_ENTRIES)

    def assigned(self) -> str:
        """A value for an indexed assignment."""
        p = self.r.random()
        if p < 0.35:
            return self.draw("num")
        if p < 0.45:
            return self.tensor()
        if p < 0.6:
            return self.other()
        if p < 0.75:
            return f"{self.x}[{self.index()}]"
        if p < 0.85:
            return "{" + f"{self.existing()}: {self.draw('num')}" + "}"
        return self.r.choice(ODD_ASSIGNED)

    def update(self) -> str:
        """Draw an argument of `update`: a dict or a container."""
        p = self.r.random()
        if p < 0.3:
            return self.other()
        body = "{" + ", ".join(self._item() for _ in range(self.r.choice([0, 1, 1, 2]))) + "}"
        return body if p < 0.75 else f"TensorDict({body}, {shape_text(self.batch_size if self.chance(0.8) else [])})"

    def _item(self) -> str:
        if not (self.chance(0.6) and self.keys):
            return f"{self.new_key()}: {self.new_value()}"
        key, _, entry = self.r.choice(self.keys)
        new = self.new_value()
        if entry["k"] == "tensor" and self.chance(0.7):
            dtype = next((short for short, name in DTYPES.items() if name == entry["dtype"]), "f32")
            new = f"T({', '.join([str(n) for n in entry['shape']] + ['dt=' + dtype])}, s=3)"
        return f"{self.key_text(key)}: {new}"

    # Indices

    def index(self) -> str:
        return self.arrangements.index(self.batch_size)

    def index_object(self) -> str:
        """An index as an argument."""
        index = self.index()
        if re.fullmatch(r"[^,\[(]*", index) and ":" not in index:
            return index
        return f"np.index_exp[{index}]" if "," in index else f"np.s_[{index}]"

    def gather(self) -> str:
        """The dim and the index of `gather`."""
        bs = self.batch_size
        if not bs:
            return "0, torch.zeros(1, dtype=i64)"
        dim = self.r.randrange(len(bs))
        shape = list(bs)
        shape[dim] = self.r.choice([1, 2, 3])
        if bs[dim] <= 0:
            return f"{dim}, torch.zeros({shape}, dtype=i64)"
        values = [self.r.randrange(bs[dim]) for _ in range(math.prod(shape))]
        dim = dim if self.chance(0.6) else dim - len(bs)
        return f"{dim}, torch.tensor({values}).reshape({shape})"

    def splits(self) -> str:
        size = self.r.choice(self.batch_size) if self.batch_size else 2
        p = self.r.random()
        if p < 0.5:
            return self.r.choice(["1", "2", "3", "0", "-1"])
        if p < 0.9 and size > 1:
            first = self.r.randrange(1, size)
            return f"[{first}, {size - first}]" if self.chance(0.7) else f"({first}, {size - first})"
        return self.r.choice(["[1, 1]", "[1, -1]", "[]", "[5]", f"[{size}, 0]"])

    def counts(self) -> str:
        """How often `repeat_interleave` repeats each row."""
        rows = self.batch_size[0] if self.batch_size else 1
        return f"torch.tensor({[self.r.choice([0, 1, 2]) for _ in range(rows)]}, dtype=i64)"

    # Shapes

    def batch_sizes(self) -> str:
        p = self.r.random()
        if p < 0.45:
            return shape_text(self.batch_size)
        if p < 0.7 and self.batch_size:
            return shape_text(self.batch_size[: self.r.randrange(len(self.batch_size))])
        return self.r.choice(ODD_SIZES)

    def reduced_dims(self) -> str:
        p = self.r.random()
        count = len(self.batch_size)
        if p < 0.6:
            return self._dim()
        if p < 0.75:
            return '"feature"'
        if p < 0.9 and count:
            return str(tuple(self.r.sample(range(count), self.r.randrange(1, count + 1))))
        return "None" if p < 0.95 else self.r.choice(["(0, 1)", "(-1,)", "()", '"t"', "(0, 0)"])

    def flipped_dims(self) -> str:
        count = len(self.batch_size)
        if self.chance(0.5):
            return self._dim()
        return str(self.r.sample(range(count), self.r.randrange(0, count + 1)))

    def permutation(self) -> list[int]:
        count = len(self.batch_size)
        dims = list(range(count))
        self.r.shuffle(dims)
        if self.chance(0.3):
            dims = [dim - count for dim in dims]
        if self.chance(0.08):
            dims = dims[1:]
        if self.chance(0.05):
            dims = [*dims, 0]
        return dims

    def permuted(self) -> str:
        dims = self.permutation()
        if self.chance(0.5) and dims:
            return ", ".join(map(str, dims))
        return str(dims) if self.chance(0.5) else f"({comma(dims)})"

    def shape_tuple(self) -> str:
        shape = self.arrangements.reshape(self.batch_size)
        return shape if shape[0] in "([t" else f"({shape},)"

    def new_shape(self) -> str:
        bs = self.batch_size
        return self.r.choice([", ".join(map(str, bs)) or "2", "(3, 2)", "4", str(tuple(bs)), f"torch.Size({bs})", "[]"])

    def unflattened(self) -> str:
        size = self.r.choice(self.batch_size) if self.batch_size else 1
        return str(self.r.choice([[1, size], [size, 1], [-1, 1], [2, -1], [-1], (1, size), [size]]))

    def repeats(self) -> str:
        count = len(self.batch_size) + self.r.choice([0, 0, 0, 1, -1])
        repeats = []
        for _ in range(max(count, 0)):
            odd = self.chance(0.3)
            repeats.append(self.r.choice([1, 2, 3, 0] if odd else [1, 2]))
        if self.chance(0.6) and repeats:
            return ", ".join(map(str, repeats))
        return f"torch.Size({repeats})" if self.chance(0.4) else f"{tuple(repeats)}"

    def padding(self) -> str:
        count = len(self.batch_size) + self.r.choice([0, 0, 0, -1, 1])
        length = max(2 * count - self.chance(0.05), 0)
        return str([self.r.choice([0, 1, 2]) for _ in range(length)])

    # Names

    def _some_names(self) -> list[str]:
        return self.r.sample(NAMES, min(len(self.batch_size), 4))

    def names(self) -> str:
        if self.chance(0.7):
            return str(self._some_names())
        return self.r.choice(["None", '["t"]', '["t", "t"]', "[None]", '"t"', '["t", None]', "[]"])

    def name_arguments(self) -> str:
        names = self._some_names()
        if self.chance(0.6):
            return ", ".join(f'"{name}"' for name in names)
        return self.r.choice(["None", "..., 't'", "'t', ...", "'t', 't'", "'t', None"])

    def renamed(self) -> str:
        return "**" + str(dict(zip(self.r.sample(NAMES, 2), ["q", "p"])))


PLACEHOLDERS: dict[str, Callable[[Arguments], str]] = {
    "x": lambda a: a.x,
    "y": Arguments.other,
    "tds": Arguments.several,
    "key": Arguments.key,
    "nkey": Arguments.new_key,
    "keys": Arguments.key_list,
    "keysargs": Arguments.key_arguments,
    "newval": Arguments.new_value,
    "aval": Arguments.assigned,
    "upd": Arguments.update,
    "operand": Arguments.operand,
    "tb": Arguments.tensor,
    "mask": Arguments.mask,
    "lit": Arguments.literal,
    "anyobj": Arguments.foreign,
    "idx": Arguments.index,
    "idxt": Arguments.index_object,
    "gather": Arguments.gather,
    "splits": Arguments.splits,
    "rep1": Arguments.counts,
    "dim": Arguments._dim,
    "dimx": lambda a: a._dim(1),
    "rdim": Arguments.reduced_dims,
    "dims": Arguments.flipped_dims,
    "pair": lambda a: f"({a._dim()}, {a._dim()})",
    "perm": Arguments.permuted,
    "permt": lambda a: str(tuple(a.permutation())),
    "shape": lambda a: a.arrangements.reshape(a.batch_size),
    "shapet": Arguments.shape_tuple,
    "eshape": lambda a: a.arrangements.expand(a.batch_size),
    "nshape": Arguments.new_shape,
    "mshape": lambda a: str(a.batch_size + a.r.choice([[], [2]])),
    "usize": Arguments.unflattened,
    "reps": Arguments.repeats,
    "padsize": Arguments.padding,
    "bsz": Arguments.batch_sizes,
    "names": Arguments.names,
    "namesargs": Arguments.name_arguments,
    "ndict": Arguments.renamed,
}
