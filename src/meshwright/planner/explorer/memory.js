// Peak memory of each pipeline rank: planner/cost/states.py and planner/memory/rank_memory.py, ported;
// peaks.js has the moments. What is linear comes from Python
// (planner/explorer/coefficients.py) in DATA.memory; tests hold the two against each other on random plans.

const KINDS = ["parameters", "shards", "gradients", "masters", "moments", "counters", "activations", "logits",
  "buffers", "temporaries", "reserve"];
// Memory of a legal layout: for each pipeline rank {when, kinds: {kind: bytes}, total}.
function memoryOf(data, recipe, layout) {
  const m = microBatches(data.model, layout, recipe);
  const tokens = microBatchOf(data.model, layout, recipe) * recipe.sequence / layout.cp;
  const {pp, vp} = layout, kind = data.schedules[layout.schedule];
  const split = stageLayers(data.model, pp * vp);
  const stages = stageCosts(data, recipe, layout, tokens, split);
  const sums = addsGradients(layout, m), products = sumsProducts(data, layout, m) && !data.model.experts;
  const table = data.memory.states[layout.zero][Number(pp > 1)][Number(sums)];
  const units = unitsOf(data, layout, table);
  const between = layout.sp ? tokens / layout.tp : tokens, {own: engine} = data.stack;
  const border = pp > 1 ? between * data.model.hidden * data.model.activation_bytes : 0;
  return [...Array(pp).keys()].map((rank) => {
    const held = pp === 1 ? [0] : stagesOf(kind, pp, vp, rank);
    const last = held.includes(pp * vp - 1);
    const count = countOf(data, layout, held.map((stage) => split[stage]), held.includes(0), last);
    const state = stateBytes(data.memory, table.step, count);
    const costs = held.map((stage) => stages[stage]);
    const sizes = held.map((stage) =>
      countOf(data, {...layout, zero: 0}, [split[stage]], stage === 0, stage === pp * vp - 1).whole);
    const shares = sizes.map((size) => size / sizes.reduce((a, b) => a + b, 0));
    const facts = {layout, costs, state, units, first: held.includes(0), last, table, shares, products, stack: data.stack};
    const moments = momentsOf(layout, kind, m, rank);
    const worst = engine ? peakOf(facts, moments) :
      otherPeakOf(facts, moments, m, border, logitBytes(data, layout, tokens));
    const layers = held.reduce((sum, stage) => sum + split[stage].end - split[stage].start, 0);
    const routed = held.reduce((sum, stage) => sum + routedOf(data.model, split[stage]), 0);
    const matrices = matrixBytes(data, layout, layers - routed, routed);
    return rankMemory(data, table, count, worst, engine ? 2 * border : 0, matrices);
  });
}

// Whether any gradient is a sum: spec/memory/held.py.
const addsGradients = (layout, m) =>
  m > 1 || degreeOfData(layout) * layout.cp > 1 || (layout.ep > 1 && layout.ep < layout.tp);

// Whether such sums take products: planner/step/shared_costs.py.
const sumsProducts = ({memory, schedules}, {zero, pp, schedule, ...layout}, m) => addsGradients({...layout, zero, pp}, m) &&
  memory.sums_products[zero][Number(pp > 1)][Number(m > 1)][Number(schedules[schedule].splits === "all")];

// Bytes of a rank at the worse of two moments: inside the passes, or the optimizer's update.
function rankMemory({stack, memory}, table, count, worst, borders, matrices) {
  const step = {...worst.kinds, activations: worst.kinds.activations + borders};
  const temporaries = Math.max(matrices, Math.min(stack.widened_bytes * count.updated, stack.bucket_bytes));
  const update = {...stateBytes(memory, table.update, count), temporaries};
  const inside = sumOf(step) >= sumOf(update);
  const kinds = {...(inside ? step : update)};
  kinds.reserve = stack.reserve_bytes + (stack.slack - 1) * (kinds.activations ?? 0);
  return {when: inside ? worst.when : "optimizer step", kinds, total: sumOf(kinds)};
}

// Of a stage's logits for one micro-batch, in 16 bits.
const logitBytes = ({model, stack}, {tp}, tokens) =>
  tokens * model.vocab * model.activation_bytes / (stack.vocab_parallel ? tp : 1);

const numel = (shape) => shape.reduce((a, b) => a * b, 1);
const sumOf = (kinds) => Object.values(kinds).reduce((a, b) => a + b, 0);

function stateBytes({elements}, table, count) {
  const dot = (widths) => widths.reduce((sum, width, n) => sum + width * count[elements[n]], 0);
  return Object.fromEntries(Object.entries(table).map(([kind, widths]) => [kind, dot(widths)]));
}

// Codes that ZeRO-3 shares: spec/weights/boxes.py.
const LINE_BYTES = 16;

// Ranks over which ZeRO cuts a parameter, and an expert's.
function sharersOf({zero, dp_shard: shards, cp, tp, ep}) {
  const ranks = zero ? shards * cp : 1;
  return [ranks, zero && ep > 1 ? ranks * tp / ep : ranks];
}

// Elements on a rank: whole, its padded shard, gathered again; of what is trained the same, and the number of tensors.
// `alone`: of experts only.
function countOf(data, layout, layers, first, last, alone = false) {
  const pieces = data.memory.pieces[`${layout.tp},${layout.ep}`];
  const number = layers.reduce((sum, range) => sum + range.end - range.start, 0);
  const routed = layers.reduce((sum, range) => sum + routedOf(data.model, range), 0);
  const parts = [[pieces.dense, number - routed], [pieces.routed, routed]];
  if (first) parts.push([pieces.embedding, 1]);
  if (last) parts.push([pieces.norm, 1]);
  if (last && !(data.model.tied && first)) parts.push([pieces.head, 1]);
  const {zero} = layout, [ranks, expertRanks] = sharersOf(layout);
  const count = {whole: 0, shard: 0, updated: 0, gathered: 0, tensors: 0, moments: 0, learned: 0, learned_gathered: 0,
    codes: 0, codes_gathered: 0};
  for (const [sizes, times] of parts)
    for (const [shape, expert, copies, stored, trained, codes, lines] of sizes) {
      if (alone && !expert) continue;
      const n = expert ? expertRanks : ranks, pieceCount = times * copies;
      if (codes) {
        const share = zero === 3 && layout.pp === 1 && n > 1 ? Math.ceil(lines / n) * LINE_BYTES : 0;
        count.codes += pieceCount * (share || codes);
        count.codes_gathered += pieceCount * share * n;
        continue;
      }
      const dim = shardedDim(shape, n);
      const elements = numel(shape), shard = Math.ceil(shape[dim] / n) * (elements / shape[dim]);
      count.whole += pieceCount * elements;
      count.shard += pieceCount * shard;
      count.gathered += pieceCount * shard * n;
      if (!trained) continue;
      count.updated += pieceCount * shard;
      count.learned += pieceCount * elements;
      count.learned_gathered += pieceCount * shard * n;
      count.tensors += pieceCount;
      count.moments += pieceCount * momentBytes(shape.map((size, at) => (at === dim ? Math.ceil(size / n) : size)), stored);
    }
  return count;
}

// Of a piece of a parameter: spec/weights/boxes.py.
function momentBytes(sizes, [element, scale, block]) {
  const row = sizes[sizes.length - 1], elements = numel(sizes);
  return element * elements + (scale ? scale * elements / row * Math.ceil(row / block) : 0);
}

// The dim along which ZeRO cuts a tensor: spec/weights/boxes.py, for experts too few for all ranks one inside them.
function shardedDim(sizes, ranks) {
  if (sizes.length < 3 || Math.ceil(sizes[0] / ranks) * (ranks - 1) < sizes[0]) return 0;
  return Math.max(0, sizes.findIndex((size, dim) => dim > 0 && size % ranks === 0));
}

// Layers of a range that are mixtures of experts.
const routedOf = (model, {start, end}) =>
  model.experts ? Math.max(0, end - Math.max(start, model.first_dense)) : 0;

// Bytes of what is gathered and reduced together: parameters, gradients as they are summed, and as they are made.
function unitsOf(data, layout, table) {
  const {tied, layers} = data.model;
  const unit = (ranges, first, last, alone) => {
    const count = countOf(data, layout, ranges, first, last, alone);
    const {gathered, learned_gathered: learned} = count;
    return {
      parameters: gathered * table.parameter_bytes + count.codes_gathered, gradients: learned * table.gradient_bytes,
      made: learned * table.parameter_bytes, share: count.updated * table.gradient_bytes,
    };
  };
  const widest = [{start: layers - 1, end: layers}], [, expertRanks] = sharersOf(layout);
  const apart = layout.ep > 1 && routedOf(data.model, widest[0]) > 0; // experts are a unit in the block
  const cut = apart ? data.memory.pieces[`${layout.tp},${layout.ep}`].routed.filter(
    ([shape, expert, , , trained]) => expert && trained && shardedDim(shape, expertRanks)) : [];
  const block = unit(widest, false, false), experts = unit(apart ? widest : [], false, false, true);
  const last = unit([], tied, true);
  if (table.parameter_bytes === 4) last.made = 0; // the loss has the head's gradient in fp32, so no rounded copy is made
  return {
    first: unit([], true, tied), block,
    last, ends: unit([], true, true), summed: degreeOfData(layout) * layout.cp > 1, tied,
    experts, dense: Object.fromEntries(Object.entries(block).map(([size, n]) => [size, n - experts[size]])),
    alone: apart && expertRanks === 1,
    stack: Math.max(0, ...cut.map(([shape]) => numel(shape))) * table.parameter_bytes,
  };
}

// Bytes of each stage for one micro-batch: what is kept adds up, of the others the largest of any part.
const SUMMED = ["kept", "queued", "logits_kept", "logits_held"];
function stageCosts(data, recipe, layout, tokens, split) {
  const {tp, sp, ep, cp, pp} = layout, {sizes} = data.memory;
  const piped = tp === 1 && ep === 1 && cp === 1 && pp > 1; // blocks of one device are counted in another way
  const key = `${tp}${sp ? "s" : ""}${ep > 1 ? "e" : ""}${cp > 1 ? "c" : ""}${piped ? "p" : ""}`;
  const {kept: keptLines} = data.memory, late = pp > 1 && data.schedules[layout.schedule].splits === "all";
  const parts = ((late && keptLines[`${key}z`]) || keptLines[key])[layout.recompute];
  const at = (lines) => lines.length === 3 ? lines[0] + lines[1] * tokens + lines[2] * tokens * recipe.sequence :
    Math[lines[3] > lines[1] ? "max" : "min"](lines[0] + lines[1] * tokens, lines[2] + lines[3] * tokens);
  const bytes = Object.fromEntries(Object.entries(parts).map(([part, lines]) =>
    [part, Object.fromEntries(lines.map((line, n) => [sizes[n], at(line)]))]));
  for (const [part, cost] of Object.entries(bytes)) {
    const trained = data.memory.pieces[`${tp},${ep}`][part].filter(([, , , , trained]) => trained);
    cost.weights = part === "dense" || part === "routed" ? Math.max(0, ...trained.map(([shape]) => numel(shape))) : 0;
    cost.made = data.stack.own ? cost.weights * data.model.activation_bytes : 0;
    cost.split = Math.max(0, cost.kept + Math.max(cost.mlp, cost.attention) - cost.queued);
    cost.mlp += cost.made;
    cost.largest_kept = cost.kept;
  }
  return split.map((range, stage) => {
    const routed = routedOf(data.model, range);
    const times = {
      dense: range.end - range.start - routed, routed, embedding: Number(stage === 0),
      head: Number(stage === split.length - 1),
    };
    return Object.fromEntries([...sizes, "split", "weights", "made", "largest_kept"].map((size) => [size, Object.entries(times).reduce(
      (sum, [part, layerCount]) => {
        if (SUMMED.includes(size)) return sum + layerCount * bytes[part][size];
        return layerCount ? Math.max(sum, bytes[part][size]) : sum;
      }, 0)]));
  });
}
