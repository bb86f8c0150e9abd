"""A room for each verb: `command` has the options, `answer` the Python function, `screen` and `page` what people see.

`main` is the `meshwright` command, and `commands` the parser. A verb is imported only when it runs. It uses the
`answer` of another verb, and nothing else of it; tests/test_layers.py lists the exceptions.
"""
