"""Names and members that client programs take although they are not part of the public API.

Each is a re-export or a few lines over the package's own mechanism, and says who needs it; nothing else in the package
uses them. Modules whose paths programs know (`utils.py`, `compat/paths/_C.py`, ...) export them from here.
`client_names.tsv` lists what programs import and reach, with the programs.
"""
