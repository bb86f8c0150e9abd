"""Training: step, loop, checkpoint, watchers of a run.

step             one optimizer step; the file to read first
loop, trainer    a run from its plan to its end; the loop over steps
batches          rows of tokens -> micro-batches on a device
optimizer, muon, narrow_moments     AdamW, Muon, 8-bit moments
precision, skipping, rate     dtypes and loss scale; skipped steps; learning rate
objectives       the loss: preference, orpo, distillation, on_policy
teacher, staged_teacher, teacher_targets, reference     models beside the trained one
state, resume_checks     what a run resumes from, and when it refuses to
evaluate         held-out text
fits, available_memory, disk     refusals before the first step
watch, watchers, plot    records of a step, and where they go
"""
