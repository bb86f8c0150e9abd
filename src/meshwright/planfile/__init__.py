"""Conversion between plan files, `key=value` overrides and Plan. No other package handles a plan as a dict.

text      YAML or an override -> keys and words, each with its position
keys      the known keys, their names in other tools, those that overrides set, and the nearest key to a typo
paths     the folder that a relative path of a file refers to
reading   words -> Plan
writing   Plan -> file, the commented file of `init`, the JSON Schema
"""

from meshwright.planfile.keys import absolute, without_folders
from meshwright.planfile.reading import read
from meshwright.planfile.writing import commented, content, dump, schema, write

__all__ = ["absolute", "commented", "content", "dump", "read", "schema", "without_folders", "write"]
