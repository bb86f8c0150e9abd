"""`meshwright schema`: what a plan file may hold, for editors and programs."""

import json


def schema() -> None:
    """Print the JSON Schema of the plan file."""
    from meshwright import planfile

    print(json.dumps(planfile.schema(), indent=2))
