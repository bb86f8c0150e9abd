"""Training: step, loop, checkpoint, watchers of a run.

step             one optimizer step; the file to read first
loop, trainer    a run from its plan to its end; the loop over steps
job              a run before its model exists, and refusals to resume
batches          rows of tokens -> micro-batches on a device
optimizer, muon  AdamW, 8-bit moments, learning rate; Muon
precision        dtypes, loss scale, skipped steps
objectives       the loss: preference, distillation, on-policy answers
teacher, teacher_targets, reference     models in addition to the trained one
state            what a run resumes from, or begins with
evaluate         held-out text
fits             refusals for want of memory or disk
watch, records, plot     records of a run and its steps, and where they go
"""
