// How numbers are printed, and what every name means: [title, sentences, formula, source].

const PAGE = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;

function gib(bytes) {
  if (bytes < 2 ** 20 / 10) return `${(bytes / 2 ** 10).toFixed(1)} KiB`;
  if (bytes < GIB / 10) return `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  return `${(bytes / GIB).toFixed(bytes < 10 * GIB ? 2 : 1)} GiB`;
}

function duration(seconds) {
  if (seconds < 0.0995) return `${(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 99.5) return `${seconds.toPrecision(3)} s`;
  if (seconds < 5990) return `${(seconds / 60).toPrecision(3)} min`;
  return `${(seconds / 3600).toPrecision(3)} h`;
}

const dollars = (usd) => `$${usd < 100 ? usd.toPrecision(3) : Math.round(usd).toLocaleString("en")}`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

// What is not the default, as `meshwright plan` prints it.
function layoutWords(layout) {
  const {dp_replicate: copies, dp_shard: shards} = layout;
  const words = [];
  if (copies > 1 || shards === 1) words.push(`dp_replicate=${copies}`);
  if (shards > 1) words.push(`dp_shard=${shards}`);
  if (layout.zero) words.push(`zero=${layout.zero}`);
  for (const axis of ["tp", "cp", "pp", "ep"])
    if (layout[axis] > 1) words.push(`${axis}=${layout[axis]}${axis === "tp" && layout.sp ? " sp" : ""}`);
  if (layout.pp > 1) words.push(layout.schedule + (layout.vp > 1 ? ` vp=${layout.vp}` : ""));
  words.push(`micro_batch=${layout.micro_batch}`);
  if (layout.recompute !== "none") words.push(`recompute=${layout.recompute}`);
  return words.join(" ");
}

// The layout as `--layout` of `meshwright plan` takes it.
function layoutOption(layout) {
  const fields = ["dp_replicate", "dp_shard", "zero", "tp", "cp", "pp", "ep", "vp", "micro_batch", "recompute"];
  const words = fields.map((name) => `${name}=${layout[name]}`);
  if (layout.tp > 1) words.push(`sp=${layout.sp}`);
  if (layout.pp > 1) words.push(`schedule=${layout.schedule}`);
  return words.join(",");
}

const EXPLAIN = {
  parameters: ["Parameters", "The weights that a rank computes with. Under ZeRO 3 only its shard stays; a layer is gathered when its turn comes.",
    "2 bytes each in bf16, 4 in fp32; / (tp pp), and / (dp_shard cp) under ZeRO 3", "ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054, section 3"],
  shards: ["Own shards", "fully_shard keeps a rank's shard beside the whole copy, with its last rows padded so that all ranks have equally many.",
    "while parameters are whole: 4 N / (dp_shard cp) where the shards are the fp32 masters, else 2 N / (dp_shard cp) in bf16", "docs/parallel.md"],
  gradients: ["Gradients", "One number for each weight. Whole under ZeRO 0 and 1, sharded from ZeRO 2 on; whole within a step under a pipeline.",
    "2 bytes each in bf16, 4 where several are added; / (dp_shard cp) from ZeRO 2 on", "ZeRO, arXiv:1910.02054, figure 1"],
  masters: ["fp32 master weights", "The optimizer adds small steps to weights; 16 bits would lose them.",
    "4 N / (dp_shard cp) with ZeRO 1 or more", "Micikevicius et al. 2018, arXiv:1710.03740, section 3.1"],
  moments: ["Optimizer moments", "AdamW keeps a mean and a mean square of every gradient, Muon a mean of a matrix's. With parameters, gradients and masters: 16 bytes a weight. recipe.optimizer_states makes them narrower.",
    "8 N / (dp_shard cp) with ZeRO 1 or more; 4 N in bf16, 2.03 N in 8 bits", "Loshchilov and Hutter 2019, arXiv:1711.05101"],
  counters: ["Counters", "The optimizer's step numbers, one for each tensor.", "4 bytes a tensor", "torch.optim.AdamW"],
  activations: ["Activations", "What the forward pass keeps for the backward pass, of all micro-batches in flight. Recomputation and sequence parallelism shrink it.",
    "bytes a layer and token x layers x tokens x micro-batches in flight", "Korthikanti et al. 2022, arXiv:2205.05198, section 4"],
  logits: ["Logits", "What head and loss keep until their backward pass. Made chunk by chunk, so that the whole matrix never exists.",
    "tokens x vocab / tp x bytes, if not chunked", "src/meshwright/kernels/loss/cross_entropy.py"],
  buffers: ["Gathered layers and exchange buffers", "Under ZeRO 3 a layer is whole while it computes, and the next one arrives; gradients of a layer or of the head are laid into a buffer to be reduced.",
    "two layers and a layer's gradients", "docs/parallel.md"],
  temporaries: ["Temporaries", "Alive only inside one layer's backward pass, or one chunk of the head, or the update of the optimizer.",
    "largest moment beyond what is kept", "planner/cost/block.py"],
  reserve: ["Reserve", "Workspaces and communication buffers that do not depend on the layout.", "constant", "planner/cost/stack.py"],
  total: ["Total", "The worst moment of this rank: a backward pass, or the optimizer's update.", "sum of the kinds", "planner/memory/rank_memory.py"],
  capacity: ["Capacity", "What the device has; a program can have about 1 to 2 GB less, since driver, context and communication library keep some.",
    "memory of the chips - driver", "data sheet"],

  sequence: ["Sequence", "Tokens of one sequence. Activations grow with it, attention's work with its square.", "tokens of a rank = micro_batch x sequence / cp", ""],
  global_batch: ["Global batch", "Sequences of one optimizer step, over all ranks and micro-batches. More of them make the bubble smaller, and beyond the critical batch each is worth less.",
    "global_batch = dp x micro_batch x accumulation", "McCandlish et al. 2018, arXiv:1812.06162"],
  micro_batch: ["Micro-batch", "Sequences of one forward pass on one rank. Larger ones feed the device better, keep more activations, and leave fewer to fill a pipeline.",
    "accumulation = global_batch / (dp x micro_batch)", ""],
  tp: ["Tensor parallelism", "Ranks share every matrix. Divides weights and most activations; costs two exchanges of the hidden state a layer in each direction, so it stays inside a node.",
    "per layer: 2 all-reduces of tokens x hidden forward, 2 backward", "Shoeybi et al. 2019, arXiv:1909.08053"],
  sp: ["Sequence parallelism", "Norms and residuals between tensor-parallel regions are shared too: all-gather and reduce-scatter instead of all-reduce. Forward they move the same bytes; the backward pass gathers inputs once more, which is 10/8 in all.",
    "34 S B H / t instead of S B H (10 + 24 / t)", "Korthikanti et al. 2022, arXiv:2205.05198, section 4.2"],
  cp: ["Context parallelism", "Ranks share every sequence; keys and values pass round in a ring. For sequences that are too long for one rank.",
    "activations / cp; keys and values of a layer make 3 (cp - 1) hops: cp - 1 forward, and 2 (cp - 1) backward, with their gradients", "Liu et al. 2023, arXiv:2310.01889"],
  pp: ["Pipeline parallelism", "Ranks share the layers. Sends little, so it crosses nodes well; waits in the bubble, and front ranks keep several micro-batches.",
    "bubble of 1f1b: (p - 1) / m", "Narayanan et al. 2021, arXiv:2104.04473"],
  dp: ["Data parallelism", "Ranks that read different sequences: what tp, cp and pp leave of the devices. Gradients are summed once a step.",
    "dp = devices / (tp cp pp) = dp_replicate x dp_shard", ""],
  dp_shard: ["dp_shard", "Of dp, the ranks that share one set of states (ZeRO, FSDP); the others are replicas of the same shards. With a node's ranks, gathers stay inside it.",
    "dp_replicate = dp / dp_shard", "Zhao et al. 2023, arXiv:2304.11277, section 3.2"],
  zero: ["ZeRO stage", "0 shares nothing, 1 the optimizer's states, 2 gradients as well, 3 parameters too (FSDP): gathered layer by layer, in every micro-batch.",
    "bytes a weight over n ranks: 16, 4 + 12/n, 2 + 14/n, 16/n", "Rajbhandari et al. 2020, arXiv:1910.02054"],
  ep: ["Expert parallelism", "Ranks share the experts; tokens travel to them and back. Borrows ranks from dp_shard x cp x tp.",
    "2 all-to-alls of tokens x top_k x hidden a layer, in each direction", "Lepikhin et al. 2020, arXiv:2006.16668"],
  schedule: ["Schedule", "Order of the pipeline's forward and backward passes: it decides the bubble and how many micro-batches are in flight.",
    "see the timelines below", "src/meshwright/spec/layout/schedule.py"],
  vp: ["Virtual stages", "Stages that one pipeline rank holds. More of them make the bubble smaller and send more often.",
    "bubble of interleaved: (p - 1) / (v m)", "Narayanan et al. 2021, arXiv:2104.04473, section 2.2"],
  recompute: ["Recomputation", "norms repeats what norms make; selective the attention core, where it stores S x S weights, else nothing; all-but-attention all but the attention core; full the whole forward pass. This page recomputes all layers; `meshwright plan` takes as few as fit.",
    "full: 2 tokens x hidden bytes a layer, a third more work", "Chen et al. 2016, arXiv:1604.06174; arXiv:2205.05198, section 5"],

  ...Object.fromEntries(Object.entries((PAGE.halves?.[0] ?? PAGE).schedules).map(
    ([name, {title, meaning, formula, source}]) => [name, [title, meaning, formula, source]])),
  bubble: ["Bubble", "Waiting, over the work of the busiest rank.", "(total - work) / work", "lectures; spec/layout/replay.py"],
  in_flight: ["In flight", "Most micro-batches whose activations a rank keeps, each as a share of all its stages: 5.5 of interleaved with v=2 are 11 of one stage.", "peak over time / v, largest rank", "spec/layout/replay.py"],
  timeline_p: ["Pipeline ranks", "Of the timelines; follows the layout's pp.", "", ""],
  timeline_m: ["Micro-batches", "Of the timelines; follows the layout's.", "global_batch / (dp x micro_batch)", ""],
  timeline_v: ["Virtual stages", "Of the interleaved timeline; the V-placed ones have two, the others one.", "", ""],
  timeline_wide: ["Wide boxes", "Wide enough to read the micro-batches' numbers; the timelines scroll sideways.", "", ""],
  step: ["Time of a step", "Forward and backward passes of all micro-batches, waiting, exchanges that nothing hides, the optimizer. Counted by the planner when the page was written: for layouts on the map, for up to three controls away from the first layout, and for another sequence or batch with at most one control more. The command below the bars counts any other.",
    "passes + bubble + exposed exchanges + update", "planner/time/timeline.py; planner/explorer/nearby_times.py"],
  tight: ["Tight", "It fits with a probability below 95 %: the estimate errs by several percent and fragmentation takes some, so such a run may fail.",
    "peak > usable / quantile of the error at 95 %", "planner/search/recommend.py"],
  compute_s: ["Computation", "Forward and backward passes of the busiest rank, repeated ones included.", "", "planner/time/timeline.py"],
  money: ["Money", "What all devices cost while a billion tokens are trained, without failures, storage and idle time; `meshwright rent` counts those. The price is the lowest public list price that is known, or your --price.",
    "price of a device-hour x devices x hours", "planner/rent/data/prices.csv"],
  options: ["Options", "What the files of this software say of the chosen layout. `meshwright plan --for STACK -o DIR` writes them whole, with launch scripts.", "", "src/meshwright/stacks"],
  mfu: ["MFU", "Model FLOP utilization: FLOP that the model needs (attention in full) over what the device could have done.",
    "FLOP a token x tokens/s / peak", "Chowdhery et al. 2022, arXiv:2204.02311, appendix B"],
};

// The passes of a pipeline: what each does, and the colour of its boxes.
const PASSES = {F: "forward pass", B: "gradient of the input", W: "gradients of the weights", BW: "backward pass"};
const FILL = {F: "forward", B: "input", W: "weight", BW: "both"};

const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A canvas with as many dots as the screen has, so that lines and text are sharp; the pen draws in CSS pixels.
function canvasOf(element) {
  const width = Math.max(120, element.clientWidth), height = Math.max(1, element.clientHeight), dense = devicePixelRatio || 1;
  element.width = Math.round(width * dense);
  element.height = Math.round(height * dense);
  const pen = element.getContext("2d");
  pen.scale(dense, dense);
  pen.font = "11px system-ui, sans-serif";
  return {pen, width, height};
}

// A name that explains itself when pointed at, tapped or tabbed to.
const explained = (key, text) => `<span data-explain="${key}" tabindex="0">${escaped(text ?? EXPLAIN[key][0])}</span>`;

function explanation(key) {
  const [title, text, formula, source] = EXPLAIN[key];
  return `<b>${title}</b> ${text}${formula ? ` <code>${escaped(formula)}</code>` : ""}` +
    (source ? ` <small>${escaped(source)}</small>` : "");
}

// The panel of explanations of the section that something stands in; it covers nothing and keeps what it said last.
const panel = {
  boxOf: (target) => target.closest?.("section, form")?.querySelector(".help"),
  show(html, target) {
    const box = this.boxOf(target);
    if (!html || !box || box.shown === html) return;
    box.shown = html;
    box.innerHTML = html;
  },
};

// What an element says when it is pointed at, tapped, or reached by key: `words(target, event)`, empty for nothing.
function explainOnDemand(words) {
  const show = (event) => panel.show(words(event.target, event), event.target);
  for (const kind of ["pointermove", "pointerdown", "click"]) document.addEventListener(kind, show);
  document.addEventListener("focusin", (event) => {
    if (event.target.matches(":focus-visible")) show(event);
  });
}
