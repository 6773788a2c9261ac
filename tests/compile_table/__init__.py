"""A table of calls that run in compiled code as they do in eager code.

A *form* is one call, such as `td.reshape(-1)`. A *kind* is one class or state of container, such as a lazy stack. Each
form runs on each of its kinds, which makes one *row*. To add a row, add a form to a file of `families/`, or a kind to
`kinds.py`. `expected.toml` lists the rows that torch refuses, with torch's words, and the rows that need more than two
graphs.

    python tests/compile_table                  # runs all rows and prints those that differ from `expected.toml`
    python tests/compile_table shape: lazy      # runs rows whose name has each of these words
    python tests/compile_table --write gather   # runs rows and writes what came of them to `expected.toml`
    python tests/compile_table --json           # prints the outcome of each row; works on the reference package, too
"""
