"""What a rank does while it is in one of these functions, in the words of a watchdog's sentence."""

PHASES = {
    "meshwright.data.preparation:prepare": "prepare the text",
    "meshwright.training.loop:_checkpoint_of": "verify the checkpoint",
    "meshwright.training.loop:new_state": "build the model",
    "meshwright.training.loop:_resume": "load",
    "meshwright.training.batches:Feed.take": "data",
    "meshwright.training.step:MicroPass.__call__": "forward",
    "meshwright.parallel.pipeline:Passes._forward": "forward",
    "meshwright.parallel.pipeline:Passes._backward": "backward",
    "meshwright.kernels.weight_gradients:WeightGradients.run": "backward",
    "torch._tensor:Tensor.backward": "backward",
    "meshwright.parallel.engine:Engine.finish_gradients": "gradients",
    "meshwright.parallel.engine:Engine.gradient_norm": "gradients",
    "meshwright.training.optimizer:Optimizer.step": "optimizer",
    "meshwright.training.trainer:Trainer._check": "loss",
    "meshwright.training.trainer:Trainer._evaluate": "evaluate",
    "meshwright.training.reference:log_probabilities": "reference",
    "meshwright.training.run_samples:RunSamples.take": "sample",
    "meshwright.training.trainer:Trainer._save": "save",
    "meshwright.training.trainer:Trainer._tell": "report",
    "meshwright.training.trainer:Trainer._finish": "finish",
}
"""module:function -> phase. Of several on a stack the outermost counts: an evaluation's forward pass is evaluate."""

READS = frozenset(
    {
        "meshwright.model.seams:counts_on_host",
        "meshwright.kernels.experts:_on_host",
        "meshwright.training.evaluate:evaluate",
        "meshwright.training.reference:_note",
        "meshwright.training.run_samples:RunSamples._together",
        "meshwright.training.readback:Readback.read",
        "meshwright.training.stopping:StopAgreement.reached",
        "meshwright.training.pending_step:first_without_number",
    }
)
"""Functions that read numbers off a device. Whoever stands in one of them itself waits for what the device has to
compute first, and that for other ranks."""
