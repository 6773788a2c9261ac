"""Values that are no tensors as JSON, and the tensors in them beside it.

`encode` gives a form in JSON and the list of the tensors, which the form calls by their numbers; `restored` takes both.
A value of another class (`NotJson`) can be kept by pickle only, which nothing is written or read with unless the caller
agrees.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from tensordict.memory.mapped import MemoryMappedTensor
from tensordict.memory.storable import check_storable
from tensordict.memory.stored_tensors import StoredTensor

# Larger ints are read by Python's own reader, but not by that of the reference.
_INT_BITS = 64
_TUPLE, _FLOAT, _DICT, _ITEMS, _ORDERED = "%tuple", "%float", "%dict", "%items", "%ordered"
_TENSOR, _ARRAY, _SCALAR = "%tensor", "%array", "%scalar"
# Values of torch, which state dicts of containers have in them.
_SIZE, _DTYPE, _DEVICE = "%size", "%dtype", "%device"
_DEEP = "a value that is nested too deeply has no form in JSON"
_ODD_FLOATS = {"nan", "inf", "-inf"}
# The types of the keys of a dict, and tuples of them.
_KEYS = {str, int, float, bool, type(None)}
# Parameters come back as tensors.
_TENSORS = {Tensor, torch.nn.Parameter, MemoryMappedTensor}
_SCALARS = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
# `Module.state_dict()` keeps the versions of the modules in this attribute of its OrderedDict.
_VERSIONS = "_metadata"


class NotJson(TypeError):
    """A value that JSON cannot hold so that it is the same when read again."""


class Encoded(NamedTuple):
    """The form of a value in JSON, and the tensors that it calls by their numbers."""

    form: Any
    tensors: list[Tensor]


def encode(value: object) -> Encoded:
    """Give the form of a value of which `restored` makes the same value, in type and content.

    A list or dict that is in the value twice is two when it is read again. A tensor stays one.

    Raises:
        NotJson: the value, or one inside it, has no form; the message names its type and where it is.
    """
    return _encode(value)


def exact(value: object) -> Any:
    """Give the form of `encode` where there is no place for tensors.

    Raises:
        NotJson: as `encode`, and for a tensor.
    """
    return _encode(value, tensors=False).form


def plain(value: object) -> Any:
    """The value as any reader understands it: a tuple is a list, and a float that is not finite is `null`.

    Raises:
        NotJson: when not even that is possible; its message names the type and where it is.
    """
    return _encode(value, tensors=False, is_plain=True).form


def restored(form: object, tensors: Sequence[Tensor] = ()) -> Any:
    """The value of what `encode` gave.

    Raises:
        ValueError: the form is none that `encode` gives.
    """
    try:
        return _Decoder(tensors).value(form)
    except RecursionError:
        raise ValueError(_DEEP) from None


# --- to JSON ----------------------------------------------------------------------------------------------------------


def _encode(value: object, tensors: bool = True, is_plain: bool = False) -> Encoded:
    if type(value) is str and value.isascii():
        # Most values are such texts; an encoder would take 1 us.
        return Encoded(value, [])
    encoder = _Encoder(tensors, is_plain)
    try:
        return Encoded(encoder.form(value), encoder.tensors)
    except RecursionError:
        raise NotJson(_DEEP) from None


class _Encoder:
    """Makes forms of values and collects the tensors.

    Args:
        tensors: whether there is a place for tensors.
        is_plain: make the forms of `plain`.
    """

    __slots__ = ("_above", "_is_plain", "_numbers", "_path", "_takes_tensors", "tensors")

    def __init__(self, tensors: bool, is_plain: bool) -> None:
        self._takes_tensors, self._is_plain = tensors, is_plain
        self.tensors: list[Tensor] = []
        # The numbers of tensors and arrays by their ids, so that each is stored once.
        self._numbers: dict[int, int] = {}
        # The keys and positions that lead to a value, and the ids of the lists and dicts on the way.
        self._path: list[object] = []
        self._above: set[int] = set()

    def form(self, value: Any) -> Any:
        """The form of a value, or of one inside it."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            if not (value.isascii() or _is_unicode(value)):
                raise NotJson(f"a str with lone surrogates{self._where()} is no text that a file can hold")
            return value
        if kind is int:
            if value.bit_length() >= _INT_BITS:
                bits = value.bit_length()
                raise NotJson(f"an int of {bits} bits{self._where()} is larger than readers of JSON take")
            return value
        if kind is float:
            return value if math.isfinite(value) else None if self._is_plain else {_FLOAT: repr(value)}
        if kind is list or kind is tuple or kind is torch.Size:
            forms = self._forms(value, enumerate(value))
            return forms if kind is list or self._is_plain else {_TUPLE if kind is tuple else _SIZE: forms}
        if kind is dict or kind is OrderedDict:
            return self._mapping(value, self._forms(value, value.items()))
        if self._is_plain:
            self._refuse(value)
        return self._number_or_tensor(value)

    def _forms(self, value: object, items: Iterable[tuple[object, Any]]) -> list[Any]:
        """The forms of the values in a list or a dict."""
        if id(value) in self._above:
            raise NotJson(f"a {type(value).__name__}{self._where()} is nested in itself and has no form in JSON")
        found: list[Any] = []
        self._above.add(id(value))
        self._path.append(None)
        for self._path[-1], item in items:
            found.append(self.form(item))
        self._path.pop()
        self._above.remove(id(value))
        return found

    def _mapping(self, value: dict[Any, Any], forms: list[Any]) -> Any:
        is_ordered, are_texts, is_odd = type(value) is OrderedDict, True, False
        for key in value:
            if type(key) is not str or not (key.isascii() or _is_unicode(key)):
                are_texts = False
            elif key[:1] == "%":
                is_odd = True
        if are_texts and (self._is_plain or not is_ordered):
            by_name = dict(zip(value, forms, strict=True))
            return {_DICT: by_name} if is_odd and not self._is_plain else by_name
        pairs = [[self._key(key), form] for key, form in zip(value, forms, strict=True)]
        if not is_ordered:
            return {_ITEMS: pairs}
        kept = vars(value)
        if not kept:
            return {_ORDERED: pairs}
        if kept.keys() != {_VERSIONS}:
            raise NotJson(f"an OrderedDict with attributes ({', '.join(kept)}){self._where()} has no form in JSON")
        return {_ORDERED: pairs, _VERSIONS: self.form(kept[_VERSIONS])}

    def _key(self, key: object) -> Any:
        if self._is_plain or not _is_key(key):
            raise NotJson(f"a dict with the key {key!r:.40}{self._where()}, which is no text, has no form in JSON")
        return self.form(key)

    def _number_or_tensor(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, np.generic) and value.dtype.name in _SCALARS:
            dtype = _SCALARS[value.dtype.name]
            return {_SCALAR: [value.dtype.name, value.astype(dtype).tobytes().hex()]}
        if kind is torch.dtype or kind is torch.device:
            return {_DTYPE if kind is torch.dtype else _DEVICE: str(value)}
        if kind not in _TENSORS and kind is not np.ndarray:
            self._refuse(value)
        if not self._takes_tensors:
            self._refuse(value)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(self._tensor_of(value))
        return {_ARRAY if kind is np.ndarray else _TENSOR: self._numbers[id(value)]}

    def _tensor_of(self, value: Any) -> Tensor:
        try:
            if isinstance(value, Tensor):
                check_storable(value)
                if value.is_meta:
                    raise TypeError("it is on the meta device and has no content")
                return value.detach().as_subclass(Tensor)
            is_whole = value.flags.c_contiguous and value.flags.writeable
            return torch.from_numpy(value if is_whole else value.copy())
        except (TypeError, ValueError) as error:
            self._refuse(value, f" ({error})")

    def _refuse(self, value: object, why: str = "") -> NoReturn:
        raise NotJson(f"a {type(value).__name__}{self._where()} has no form in JSON{why}")

    def _where(self) -> str:
        return f" at {''.join([f'[{part!r:.80}]' for part in self._path])}" if self._path else ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_key(key: object) -> bool:
    """Whether `key` is one that a dict has in a form."""
    return all(map(_is_key, key)) if type(key) is tuple else type(key) in _KEYS


# --- from JSON --------------------------------------------------------------------------------------------------------


class _Decoder:
    """Makes values of forms, which a file may have from anybody."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def value(self, form: Any) -> Any:
        """The value of a form."""
        if type(form) is list:
            return [self.value(item) for item in form]
        if type(form) is not dict:
            return form
        tags = [key for key in form if key[:1] == "%"]
        if not tags:
            return {key: self.value(item) for key, item in form.items()}
        tag = tags[0]
        content = form[tag]
        if tag == _ORDERED and type(content) is list and form.keys() <= {_ORDERED, _VERSIONS}:
            ordered = OrderedDict(self._items(content))
            if _VERSIONS in form:
                vars(ordered)[_VERSIONS] = self.value(form[_VERSIONS])
            return ordered
        if len(form) == 1:
            if tag == _TUPLE and type(content) is list:
                return tuple([self.value(item) for item in content])
            if tag == _DICT and type(content) is dict:
                return {key: self.value(item) for key, item in content.items()}
            if tag == _ITEMS and type(content) is list:
                return self._items(content)
            if tag == _FLOAT and type(content) is str and content in _ODD_FLOATS:
                return float(content)
            if tag == _SCALAR:
                return _scalar(content)
            if tag in (_SIZE, _DTYPE, _DEVICE):
                return _of_torch(tag, content)
            if tag in (_TENSOR, _ARRAY) and type(content) is int and 0 <= content < len(self._tensors):
                tensor = self._tensors[content]
                return tensor if tag == _TENSOR else _array(tensor)
        raise _unknown(form)

    def _items(self, pairs: list[Any]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2:
                raise _unknown(pair)
            key = self.value(pair[0])
            if not _is_key(key) or key in found:
                raise ValueError(f"{pair[0]!r:.80} is no key of a dict, or is there twice")
            found[key] = self.value(pair[1])
        return found


def _scalar(content: Any) -> Any:
    """The NumPy scalar of a pair of a dtype and hexadecimal bytes."""
    if type(content) is list and len(content) == 2 and all(type(part) is str for part in content):
        name, digits = content
        if name in _SCALARS and len(digits) == 2 * _SCALARS[name].itemsize:
            return np.frombuffer(bytes.fromhex(digits), _SCALARS[name]).astype(name)[0]
    raise _unknown(content)


def _of_torch(tag: str, content: Any) -> Any:
    """Give the size, dtype or device of a form."""
    if tag == _SIZE and type(content) is list and all(type(size) is int for size in content):
        return torch.Size(content)
    if tag == _DTYPE and type(content) is str:
        found = vars(torch).get(content.removeprefix("torch."))
        if isinstance(found, torch.dtype):
            return found
    if tag == _DEVICE and type(content) is str:
        try:
            return torch.device(content)
        except RuntimeError as error:
            raise ValueError(f"{content!r:.80} is no device: {error}") from None
    raise _unknown(content)


def _array(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or isinstance(tensor, StoredTensor) or tensor.is_meta:
        # The save is looked at, or its structure is wanted: nothing is read, and NumPy has no such arrays.
        return tensor
    try:
        return tensor.numpy(force=True)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"an array of {tensor.dtype} on {tensor.device} cannot be: {error}") from None


def _unknown(form: object) -> ValueError:
    return ValueError(f"{form!r:.80} is no form of a value")
