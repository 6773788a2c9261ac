"""What everything rests on: the contract of containers, keys, indices, shapes, settings, errors."""
