"""Use a separate generator for code that draws from torch's global one, as distributions do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from tensordict.core.keys import Key, is_nested_key, unravel_key
from tensordict.ops.collection import TensorCollection
from tensordict.ops.dims.indexing import unwrap_value

Source: TypeAlias = "torch.Generator | int | Key | None"

# Seeds that are written back to a container are smaller.
_SEEDS = 2**62


def as_source(generator: object) -> torch.Generator | Key | None:
    """Convert the argument `generator` of a module to a generator, or to the key of an entry that provides one."""
    if isinstance(generator, int) and not isinstance(generator, bool):
        return torch.Generator().manual_seed(generator)
    if generator is None or isinstance(generator, torch.Generator):
        return generator
    if is_nested_key(generator):
        return unravel_key(generator)
    raise TypeError(f"generator must be a torch.Generator, int, NestedKey, or None; got {type(generator).__name__}.")


def resolve(
    source: torch.Generator | Key | None, tensordict: TensorCollection, device: torch.device
) -> tuple[torch.Generator | None, Callable[[torch.Generator], None] | None]:
    """Return the generator for one call, and a function that writes the next seed to the container afterwards.

    The entry may be a generator, which advances in place, or a seed: an int or an integer tensor without dims.
    """
    if source is None or isinstance(source, torch.Generator):
        return source, None
    entry = tensordict.get(source, None)
    value = unwrap_value(entry)
    if value is None or isinstance(value, torch.Generator):
        return value, None
    seed = int(value)
    generator = torch.Generator(device).manual_seed(seed)

    def hand_on(generator: torch.Generator) -> None:
        following = torch.randint(_SEEDS, (), generator=generator, device=generator.device)
        if isinstance(value, torch.Tensor):
            tensordict.set(source, following.to(value.device, value.dtype))
        else:
            tensordict.set_non_tensor(source, following.item())

    return generator, hand_on


@contextlib.contextmanager
def use_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Replace the state of torch's global generator by another generator's for a block, and advance that generator.

    Compiled code cannot exchange states, and uses the global generator.
    """
    if generator is None or torch.compiler.is_compiling():
        yield
        return
    device = generator.device
    glob = torch.default_generator if device.type == "cpu" else _get_global_generator(device)
    before = glob.get_state()
    glob.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(glob.get_state())
        glob.set_state(before)


def _get_global_generator(device: torch.device) -> torch.Generator:
    module: Any = torch.get_device_module(device)
    index: int | None = device.index
    if index is None:
        index = module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator
