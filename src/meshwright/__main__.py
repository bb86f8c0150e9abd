"""`python -m meshwright` is the `meshwright` command."""

import sys

from meshwright.verbs.main import main

if __name__ == "__main__":
    sys.exit(main())
