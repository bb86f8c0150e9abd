"""Shared ground of all verbs: Python arguments and answers, options, processes, text for terminals, opened models.

planning   words, keywords and plans -> Plan, and the layout that is asked for
answers    arguments of Python functions, and the frozen objects that they answer with: Python, JSON, HTML
trained    a trained model: generate, evaluate, serve
options    options that several verbs take
process    launch under torchrun, environment, failures
terminal   text for a terminal of any width
"""
