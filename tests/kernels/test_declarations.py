"""Prototypes and structs read from the C sources agree with the compiler's: sizes, offsets, argument types."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.kernels.c import build, serving_library
from meshwright.kernels.c.build import structure

STRUCTS = {
    "rows.h": ("Panels", "Attention"),
    "block.c": ("Block", "Step", "LowRank", "LowRanks"),
    "sequence_attention.c": ("Strided", "Sequences"),
}


@pytest.mark.parametrize("source", STRUCTS)
def test_fields_of_structs_lie_where_c_reads_them(source: str, tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)), None)
    assert compiler is not None, "the tests need a C compiler"
    lines = [f'#include "{build.FOLDER / source}"', "#include <stddef.h>"]
    for name in STRUCTS[source]:
        fields = structure(name)
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(fields)}, "{name}");')
        for field, *_ in fields._fields_:
            offset = getattr(fields, field).offset
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");')
    check = tmp_path / "check.c"
    check.write_text("\n".join(lines))
    outcome = subprocess.run([compiler, "-w", "-fsyntax-only", str(check)], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_functions_have_the_types_of_their_definitions() -> None:
    library = build.load(*serving_library.STEPS)
    assert library is not None
    pointer, whole, fraction = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    assert library.rms_norm.argtypes == [pointer] * 3 + [fraction] + [pointer] * 2 + [whole] * 2
    assert library.rms_norm.restype is None
    assert library.has_int8.argtypes == [] and library.has_int8.restype == whole
    assert library.multiply.argtypes == [pointer, whole, pointer, pointer, whole]
    assert library.multiply.restype == whole
    with pytest.raises(TypeError):
        library.multiply(None, 0, None, None)


def test_a_struct_that_no_source_declares_is_an_error() -> None:
    with pytest.raises(KeyError, match="no C source declares struct Nothing"):
        structure("Nothing")
