"""Training: step, loop, checkpoint, watchers of a run.

step             one optimizer step; the file to read first
loop, trainer    a run from its plan to its end; the loop over steps
batches          rows of tokens -> micro-batches on a device
optimizer, muon, narrow_moments     AdamW, Muon, moments of 8 bits
precision, skipping, rate     dtypes and loss scale; steps left out; the rate
objectives       what is minimized: preference, orpo, distillation, on_policy
teacher, staged_teacher, teacher_targets, reference     models beside the one that is trained
state, resume_checks     what a run carries on, and refuses to go on from
evaluate         held-out text
fits, available_memory, disk     what is refused before the first step
watch, watchers, plot    records of a step, and where they go
"""
