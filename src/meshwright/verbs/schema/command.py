"""`meshwright schema`: print the JSON Schema of plan files."""

from importlib.resources import files


def schema() -> None:
    """Print the JSON Schema of the plan file, for editors and programs."""
    # `make schema` writes the file and a test checks it, since computing it takes half a second.
    print((files("meshwright.planfile") / "schema.json").read_text(encoding="utf-8"), end="")
