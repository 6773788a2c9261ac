"""Lazy stacks: containers that keep their members, and stack an entry when it is read."""

from tensordict.containers.lazy.stack import LazyStackedTensorDict as LazyStackedTensorDict
