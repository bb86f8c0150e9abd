"""What a plan would cost, by counting: no torch, standard library only, milliseconds.

    block      shape, layout, micro-batch -> the operations of a layer on one rank: work, bytes kept, exchanges
    speeds     seconds of an operation on a device         links   seconds of an exchange
    stages     the sums of a pipeline stage                states  parameters, gradients, optimizer states
    timeline   the schedule played with those seconds      memory  the schedule played with those bytes
    predict    all of it as one Prediction                 search  every legal layout, ranked
    curves     rates that were measured, in place of a device's figures; clusterfile reads them
    stack      what other training software does otherwise; the published measurements were made with it

Data flow: Plan -> predict -> Prediction -> words, tables, JSON; Plan without layout -> search -> [Prediction].
"""
