"""The encoding of non-tensor values as JSON, which every format uses.

`encode` returns a form in JSON and the list of the tensors in the value, which the form references by number. `decode`
takes both. Values of other classes raise `NotJson`. Only pickle can store them, and only if the caller allows pickle.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.core.keys import Path, entry_of
from tensordict.io.checks import DTYPES
from tensordict.memory.mapped import MemoryMappedTensor
from tensordict.memory.storable import check_storable
from tensordict.memory.stored_tensors import StoredTensor

# The JSON reader of the reference cannot read larger ints. They are stored as hexadecimal digits.
_INT_BITS = 64
_TUPLE, _FLOAT, _DICT, _ITEMS, _ORDERED = "%tuple", "%float", "%dict", "%items", "%ordered"
# `MultiStepLR.state_dict()` contains a `Counter`, the state of a NumPy generator ints of 128 bits.
_COUNTER, _INT, _TYPE = "%counter", "%int", "%type"
# `from_pytree` marks each level with one of these types.
_TYPES: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple, "OrderedDict": OrderedDict}
_TENSOR, _ARRAY, _SCALAR = "%tensor", "%array", "%scalar"
# Values of torch, which the state dicts of containers contain.
_SIZE, _DTYPE, _DEVICE = "%size", "%dtype", "%device"
_DEEP = "a value that is nested too deeply has no form in JSON"
_ODD_FLOATS = {"nan", "inf", "-inf"}
# The supported types of the keys of a dict. Tuples of them are supported too.
_KEYS = {str, int, float, bool, type(None)}
# The supported types of tensors. Parameters are decoded as plain tensors.
_TENSORS = {Tensor, torch.nn.Parameter, MemoryMappedTensor}
_SCALARS = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
# `Module.state_dict()` stores the versions of the modules in this attribute of its OrderedDict.
_VERSIONS = "_metadata"


class NotJson(TypeError):
    """A value that cannot be restored exactly from JSON."""


class EncodedValue(NamedTuple):
    """The form of a value in JSON, and the tensors that the form references by number."""

    form: Any
    tensors: list[Tensor]


def encode(value: object) -> EncodedValue:
    """Encode a value so that `decode` restores it with the same types and content.

    A list or dict that occurs twice in the value becomes two. A tensor that occurs twice stays one.

    Raises:
        NotJson: the value, or a value in it, cannot be encoded; names its type and its position.
    """
    return _encode(value)


def encode_entry(value: object, key: Path, advice: str, tensors: bool = True) -> EncodedValue:
    """Encode the value of an entry.

    Raises:
        UnsupportedEntryError: the value cannot be encoded, or has tensors without `tensors`. The error names the key,
            and ends with `advice`.
    """
    try:
        return _encode(value, tensors)
    except NotJson as error:
        raise UnsupportedEntryError(f"{entry_of(key)}{error}{advice}") from None


def encode_without_tensors(value: object) -> Any:
    """Return the form of `encode` for files that cannot store tensors beside it.

    Raises:
        NotJson: as `encode`, and for a tensor.
    """
    return _encode(value, tensors=False).form


def encode_plainly(value: object) -> Any:
    """Return a value as plain JSON for other programs: tuples become lists, and NaN and infinity become `null`.

    Raises:
        NotJson: the value, or a value in it, has no plain form; names its type and its position.
    """
    return _encode(value, tensors=False, is_plain=True).form


def decode(form: object, tensors: Sequence[Tensor] = ()) -> Any:
    """Restore the value that `encode` encoded.

    Raises:
        ValueError: `encode` does not write such a form.
    """
    try:
        return _Decoder(tensors).decode(form)
    except RecursionError:
        raise ValueError(_DEEP) from None


# --- to JSON ----------------------------------------------------------------------------------------------------------


def _encode(value: object, tensors: bool = True, is_plain: bool = False) -> EncodedValue:
    if type(value) is str and value.isascii():
        # Most values are ASCII texts. Creating an encoder for them would take 1 us.
        return EncodedValue(value, [])
    encoder = _Encoder(tensors, is_plain)
    try:
        return EncodedValue(encoder.encode(value), encoder.tensors)
    except RecursionError:
        raise NotJson(_DEEP) from None


class _Encoder:
    """Encodes values and collects their tensors.

    Args:
        tensors: allow tensors in the value.
        is_plain: return the forms of `encode_plainly`.
    """

    __slots__ = ("_above", "_is_plain", "_numbers", "_path", "_takes_tensors", "tensors")

    def __init__(self, tensors: bool, is_plain: bool) -> None:
        self._takes_tensors, self._is_plain = tensors, is_plain
        self.tensors: list[Tensor] = []
        # The numbers of tensors and arrays by their ids, so that each is stored once.
        self._numbers: dict[int, int] = {}
        # The keys and positions that lead to the current value, and the ids of the lists and dicts around it.
        self._path: list[object] = []
        self._above: set[int] = set()

    def encode(self, value: Any) -> Any:
        """Return the form of a value, or of a value in it."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            if not (value.isascii() or _is_unicode(value)):
                raise NotJson(f"a str with lone surrogates{self._where()} cannot be written to a file as text")
            return value
        if kind is int:
            if value.bit_length() < _INT_BITS:
                return value
            if self._is_plain:
                raise NotJson(f"an int of {value.bit_length()} bits{self._where()} is larger than readers of JSON take")
            return {_INT: hex(value)}
        if kind is float:
            return value if math.isfinite(value) else None if self._is_plain else {_FLOAT: repr(value)}
        if kind is list or kind is tuple or kind is torch.Size:
            forms = self._encode_items(value, enumerate(value))
            return forms if kind is list or self._is_plain else {_TUPLE if kind is tuple else _SIZE: forms}
        if kind is dict or kind is OrderedDict or kind is Counter:
            return self._encode_dict(value, self._encode_items(value, value.items()))
        if self._is_plain:
            self._refuse(value)
        if kind is type and any(value is known for known in _TYPES.values()):
            return {_TYPE: value.__name__}
        return self._encode_number_or_tensor(value)

    def _encode_items(self, value: object, items: Iterable[tuple[object, Any]]) -> list[Any]:
        """Return the forms of the values in a list or a dict."""
        if id(value) in self._above:
            raise NotJson(f"a {type(value).__name__}{self._where()} is nested in itself and has no form in JSON")
        found: list[Any] = []
        self._above.add(id(value))
        self._path.append(None)
        for self._path[-1], item in items:
            found.append(self.encode(item))
        self._path.pop()
        self._above.remove(id(value))
        return found

    def _encode_dict(self, value: dict[Any, Any], forms: list[Any]) -> Any:
        is_ordered, is_counter, are_texts, is_odd = type(value) is OrderedDict, type(value) is Counter, True, False
        for key in value:
            if type(key) is not str or not (key.isascii() or _is_unicode(key)):
                are_texts = False
            elif key[:1] == "%":
                is_odd = True
        if are_texts and (self._is_plain or not (is_ordered or is_counter)):
            by_name = dict(zip(value, forms, strict=True))
            return {_DICT: by_name} if is_odd and not self._is_plain else by_name
        pairs = [[self._encode_key(key), form] for key, form in zip(value, forms, strict=True)]
        if not is_ordered:
            return {_COUNTER if is_counter else _ITEMS: pairs}
        attributes = vars(value)
        if not attributes:
            return {_ORDERED: pairs}
        if attributes.keys() != {_VERSIONS}:
            raise NotJson(
                f"an OrderedDict with attributes ({', '.join(attributes)}){self._where()} has no form in JSON"
            )
        return {_ORDERED: pairs, _VERSIONS: self.encode(attributes[_VERSIONS])}

    def _encode_key(self, key: object) -> Any:
        if self._is_plain or not _is_key(key):
            raise NotJson(f"a dict with the key {key!r:.40}{self._where()}, which is not a text, has no form in JSON")
        return self.encode(key)

    def _encode_number_or_tensor(self, value: Any) -> Any:
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
            self.tensors.append(self._to_tensor(value))
        return {_ARRAY if kind is np.ndarray else _TENSOR: self._numbers[id(value)]}

    def _to_tensor(self, value: Any) -> Tensor:
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
    """Return True for a key of a dict that can be encoded."""
    return all(map(_is_key, key)) if type(key) is tuple else type(key) in _KEYS


# --- from JSON --------------------------------------------------------------------------------------------------------


class _Decoder:
    """Decodes forms, which may come from an untrusted file."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def decode(self, form: Any) -> Any:
        """Return the value of a form."""
        if type(form) is list:
            return [self.decode(item) for item in form]
        if type(form) is not dict:
            return form
        tags = [key for key in form if key[:1] == "%"]
        if not tags:
            return {key: self.decode(item) for key, item in form.items()}
        tag = tags[0]
        content = form[tag]
        if tag == _ORDERED and type(content) is list and form.keys() <= {_ORDERED, _VERSIONS}:
            ordered = OrderedDict(self._decode_pairs(content))
            if _VERSIONS in form:
                vars(ordered)[_VERSIONS] = self.decode(form[_VERSIONS])
            return ordered
        if len(form) == 1:
            if tag == _TUPLE and type(content) is list:
                return tuple([self.decode(item) for item in content])
            if tag == _DICT and type(content) is dict:
                return {key: self.decode(item) for key, item in content.items()}
            if tag == _ITEMS and type(content) is list:
                return self._decode_pairs(content)
            if tag == _COUNTER and type(content) is list:
                return Counter(self._decode_pairs(content))
            if tag == _INT and type(content) is str and re.fullmatch("-?0x[0-9a-f]+", content):
                return int(content, 16)
            if tag == _TYPE and type(content) is str and content in _TYPES:
                return _TYPES[content]
            if tag == _FLOAT and type(content) is str and content in _ODD_FLOATS:
                return float(content)
            if tag == _SCALAR:
                return _decode_scalar(content)
            if tag in (_SIZE, _DTYPE, _DEVICE):
                return _decode_torch_value(tag, content)
            if tag in (_TENSOR, _ARRAY) and type(content) is int and 0 <= content < len(self._tensors):
                tensor = self._tensors[content]
                return tensor if tag == _TENSOR else _to_array(tensor)
        raise _form_error(form)

    def _decode_pairs(self, pairs: list[Any]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2:
                raise _form_error(pair)
            key = self.decode(pair[0])
            if not _is_key(key) or key in found:
                raise ValueError(f"{pair[0]!r:.80} is no key of a dict, or is there twice")
            found[key] = self.decode(pair[1])
        return found


def _decode_scalar(content: Any) -> Any:
    """Return a NumPy scalar from a pair of a dtype and hexadecimal bytes."""
    if type(content) is list and len(content) == 2 and all(type(part) is str for part in content):
        name, digits = content
        if name in _SCALARS and len(digits) == 2 * _SCALARS[name].itemsize:
            return np.frombuffer(bytes.fromhex(digits), _SCALARS[name]).astype(name)[0]
    raise _form_error(content)


def _decode_torch_value(tag: str, content: Any) -> Any:
    """Return a size, a dtype or a device from its form."""
    if tag == _SIZE and type(content) is list and all(type(size) is int for size in content):
        return torch.Size(content)
    if tag == _DTYPE and type(content) is str and content in DTYPES:
        return DTYPES[content]
    if tag == _DEVICE and type(content) is str:
        try:
            return torch.device(content)
        except RuntimeError as error:
            raise ValueError(f"{content!r:.80} is no device: {error}") from None
    raise _form_error(content)


def _to_array(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or isinstance(tensor, StoredTensor) or tensor.is_meta:
        # The caller inspects the save without reading it, so a tensor without content stands for the array.
        return tensor
    try:
        return tensor.numpy(force=True)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"NumPy has no array of {tensor.dtype} on {tensor.device}: {error}") from None


def _form_error(form: object) -> ValueError:
    return ValueError(f"{form!r:.80} is no form of a value")
