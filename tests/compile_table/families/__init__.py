"""The forms of the table, in one file per family."""

from compile_table.families import (
    casting,
    contexts,
    converting,
    indexing,
    lazy,
    modules,
    pointwise,
    ragged,
    reading,
    reducing,
    shape,
    structure,
    tensorclasses,
    transforms,
    unbatched,
    values,
    writing,
)
from compile_table.forms import Form, Row, make_rows

FORMS: list[Form] = [
    form
    for family in (
        reading,
        indexing,
        shape,
        pointwise,
        reducing,
        structure,
        writing,
        casting,
        converting,
        tensorclasses,
        lazy,
        ragged,
        values,
        unbatched,
        contexts,
        modules,
        transforms,
    )
    for form in family.FORMS
]
ROWS: dict[str, Row] = make_rows(FORMS)
