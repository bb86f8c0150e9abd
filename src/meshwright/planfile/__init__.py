"""The edge: plan files and `key=value` become a Plan, and a Plan becomes a file. Below it nothing sees a dict.

text      YAML or an override -> keys and words, each with the place it stands at
names     which keys there are, what else they are called elsewhere, which is nearest to a slip
paths     what a relative path of a file is relative to
reading   words -> Plan
writing   Plan -> file, the commented file of `init`, the JSON Schema
"""

from meshwright.planfile.paths import absolute
from meshwright.planfile.reading import read
from meshwright.planfile.writing import commented, content, dump, schema, write

__all__ = ["absolute", "commented", "content", "dump", "read", "schema", "write"]
