"""The errors that `plan --for` prints are those of docs/accuracy.md."""

from docs.stack_errors import PAGE, TABLE, document
from meshwright.stacks.declaration.software import published_errors
from meshwright.stacks.trainer_table import SOFTWARE


def test_the_data_is_that_of_the_page() -> None:
    assert TABLE.read_text(encoding="utf-8") == document(PAGE.read_text(encoding="utf-8")), (
        "python -m docs.stack_errors"
    )


def test_every_source_that_a_software_names_has_a_row() -> None:
    for entry in SOFTWARE.values():
        assert [name for name, _ in published_errors(entry)] == list(entry.measured)
        assert entry.measured or entry.unknown
