"""The containers, and the parts that only containers use."""
