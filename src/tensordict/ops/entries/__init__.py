"""Operations on entries: reading, writing, moving, copying, locking."""
