"""The base of all other rooms: the contract of containers, keys, indices, shapes, settings, errors."""
