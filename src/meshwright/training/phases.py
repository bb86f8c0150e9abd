"""Names of a rank's activity by function, for the messages of the watchdog."""

PHASES = {
    "meshwright.data.preparation:prepare": "prepare the text",
    "meshwright.training.loop:find_checkpoint": "verify the checkpoint",
    "meshwright.training.loop:new_state": "build the model",
    "meshwright.training.loop:load_checkpoint": "load",
    "meshwright.training.step.batches:Feed.take": "data",
    "meshwright.training.step.step:MicroPass.__call__": "forward",
    "meshwright.parallel.pipeline.executor:Passes._forward": "forward",
    "meshwright.parallel.pipeline.executor:Passes._backward": "backward",
    "meshwright.kernels.linear.weight_gradients:WeightGradients.run": "backward",
    "torch._tensor:Tensor.backward": "backward",
    "meshwright.parallel.engine:Engine.finish_gradients": "gradients",
    "meshwright.parallel.engine:Engine.gradient_norm": "gradients",
    "meshwright.training.optimizer.optimizer:Optimizer.step": "optimizer",
    "meshwright.training.trainer:Trainer._read_numbers": "loss",
    "meshwright.training.trainer:Trainer._evaluate": "evaluate",
    "meshwright.training.objectives.reference:log_probabilities": "reference",
    "meshwright.training.run_samples:RunSamples.take": "sample",
    "meshwright.training.trainer:Trainer._save": "save",
    "meshwright.training.trainer:Trainer._notify": "report",
    "meshwright.training.trainer:Trainer._finish": "finish",
}
"""module:function -> phase. The outermost on a stack counts: a forward pass within an evaluation is "evaluate"."""

READS = frozenset(
    {
        "meshwright.model.seams:counts_on_host",
        "meshwright.kernels.experts.experts:_on_host",
        "meshwright.training.step.evaluate:evaluate",
        "meshwright.training.objectives.reference:_add_to_table",
        "meshwright.training.run_samples:RunSamples._answer_over_ranks",
        "meshwright.training.records:Readback.read",
        "meshwright.training.step.interrupt:StopAgreement.reached",
        "meshwright.training.records:name_non_finite_rank",
    }
)
"""Functions that read numbers off a device.

A rank inside one of them waits for what the device has to compute first, and so for other ranks.
"""
