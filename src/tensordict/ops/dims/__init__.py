"""Operations on batch dims: shape, index, order, names, and joining along a dim."""
