"""What a rank does while it is in one of these functions, in the words of a watchdog's sentence."""

PHASES = {
    "meshwright.data.token_cache:prepare": "prepare the text",
    "meshwright.train.loop:_checkpoint_of": "verify the checkpoint",
    "meshwright.train.loop:new_state": "build the model",
    "meshwright.train.loop:_resume": "load",
    "meshwright.train.batches:Feed.take": "data",
    "meshwright.train.step:MicroPass.__call__": "forward",
    "meshwright.parallel.pipeline:Passes._forward": "forward",
    "meshwright.parallel.pipeline:Passes._backward": "backward",
    "meshwright.kernels.linear:WeightGradients.run": "backward",
    "torch._tensor:Tensor.backward": "backward",
    "meshwright.parallel.engine:Engine.finish_gradients": "gradients",
    "meshwright.parallel.engine:Engine.gradient_norm": "gradients",
    "meshwright.train.optimizer:AdamW.step": "optimizer",
    "meshwright.train.trainer:Trainer._check": "loss",
    "meshwright.train.trainer:Trainer._evaluate": "evaluate",
    "meshwright.train.trainer:Trainer._save": "save",
    "meshwright.train.trainer:Trainer._tell": "report",
    "meshwright.train.trainer:Trainer._finish": "finish",
}
"""module:function -> phase. Of several on a stack the outermost counts: an evaluation's forward pass is evaluate."""

READS = frozenset(
    {
        "meshwright.model.seams:counts_on_host",
        "meshwright.train.evaluate:evaluate",
        "meshwright.train.readback:Readback.read",
        "meshwright.train.stopping:StopAgreement.reached",
        "meshwright.train.pending_step:first_without_number",
    }
)
"""Functions that read numbers off a device. Whoever stands in one of them itself waits for what the device has to
compute first, and that for other ranks."""
