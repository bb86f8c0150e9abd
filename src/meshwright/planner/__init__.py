"""Predicted cost of a plan, by counting: no torch, standard library only, milliseconds.

    cost      shape, layout, micro-batch -> work, seconds and kept bytes of layers, stages and exchanges on one rank
    time      the schedule played with those seconds; what a rank sends
    memory    the schedule played with those bytes; the peak of a rank
    step      all of it for one layout, as a Prediction
    search    every legal layout, ranked
    machine   measured rates in place of a device's figures
    accuracy  the planner compared with published runs
    explorer  layouts as a page

Each imports only those above it. Data flow: Plan -> step.predict -> Prediction -> words, tables, JSON; Plan without a
layout -> search -> [Prediction].
"""
