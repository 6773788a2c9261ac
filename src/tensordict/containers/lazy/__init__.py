"""Lazy stacks: containers that keep their members and stack what is read."""

from tensordict.containers.lazy.stack import LazyStackedTensorDict as LazyStackedTensorDict
