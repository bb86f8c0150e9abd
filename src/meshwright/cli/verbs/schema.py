"""`meshwright schema`: what a plan file may hold, for editors and programs."""

from importlib.resources import files


def schema() -> None:
    """Print the JSON Schema of the plan file, for editors and programs."""
    # It lies beside `planfile`, written by `make schema` (a test keeps it true): making it anew takes half a second.
    print((files("meshwright.planfile") / "schema.json").read_text(encoding="utf-8"), end="")
