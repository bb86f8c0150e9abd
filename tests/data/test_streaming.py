"""Files larger than memory: encoding takes a few megabytes, however long a file, a row group or an array is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE_BYTES = 48 * 2**20
MOST_BYTES = 24 * 2**20
"""Half of the file: a few batches of text, and what the allocator keeps."""
WARM_BYTES = 2**20

MEASURE = """
import sys
from pathlib import Path
from meshwright.data import prepare
from meshwright.spec import Data

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

def encode(path, name):
    return prepare(Data(path=path, tokenizer="bytes"), processes=1, cache_root=Path(sys.argv[3]) / name)

encode(sys.argv[1], "small")
before = peak()
found = encode(sys.argv[2], "large")
print(found.train.num_bytes + found.validation.num_bytes, peak() - before)
"""


def written(path: Path, size: int) -> int:
    """A file with so much text, one document or rows of 2 KiB; gives the bytes of its text."""
    line = "a line of words that repeat themselves, some of them more than once, 0123456789\n"
    row = line * 25
    rows = size // len(row)
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pyarrow.table({"text": [f"{number} {row}" for number in range(rows)]})
        parquet.write_table(table, path, row_group_size=rows, use_dictionary=False, compression="none")
        return sum(len(f"{number} {row}") for number in range(rows))
    with path.open("w") as file:
        for _ in range(rows):
            file.write(json.dumps({"text": row}) + "\n" if path.suffix == ".jsonl" else row)
    return rows * len(row)


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".parquet"])
def test_a_long_file_is_encoded_in_little_memory(tmp_path: Path, ending: str) -> None:
    """Memory that a small file needs is the baseline: libraries, tables, the first buffers."""
    if not Path("/proc/self/status").is_file():
        pytest.skip("needs Linux to tell resident memory")
    small, large = (tmp_path / f"{name}{ending}" for name in ("small", "large"))
    written(small, WARM_BYTES)
    expected = written(large, FILE_BYTES)
    command = [sys.executable, "-c", MEASURE, str(small), str(large), str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    num_bytes, grown = map(int, process.stdout.split())
    assert num_bytes == expected
    assert grown < MOST_BYTES, f"{grown / 2**20:.0f} MiB for a file of {large.stat().st_size / 2**20:.0f} MiB"
