"""Free functions on containers: the public place of `containers/free_functions.py`."""

from tensordict.containers.api import make_tensordict
from tensordict.containers.collating import collate
from tensordict.containers.free_functions import (
    cat,
    dense_stack_tds,
    from_module,
    from_modules,
    group_by,
    is_batchedtensor,
    lazy_cat,
    lazy_stack,
    maybe_dense_stack,
    merge_tensordicts,
    pack_sequences,
    pad,
    pad_sequence,
    stack,
    unpack_sequences,
    unpad_sequence,
)

__all__ = [
    "cat",
    "collate",
    "dense_stack_tds",
    "from_module",
    "from_modules",
    "group_by",
    "is_batchedtensor",
    "lazy_cat",
    "lazy_stack",
    "make_tensordict",
    "maybe_dense_stack",
    "merge_tensordicts",
    "pack_sequences",
    "pad",
    "pad_sequence",
    "stack",
    "unpack_sequences",
    "unpad_sequence",
]
