// Peak memory of each pipeline rank: planner/states.py and planner/memory.py, ported. What is linear comes from Python
// (planner/coefficients.py) in DATA.memory; tests hold the two against each other on random plans.

const KINDS = ["parameters", "shards", "gradients", "masters", "moments", "counters", "activations", "logits",
  "buffers", "temporaries", "reserve"];
const ENOUGH = 3; // rounds of the pipeline beyond which no more micro-batches are in flight (all but afab)
const flights = new Map();

// Memory of a legal layout: for each pipeline rank {when, kinds: {kind: bytes}, total}.
function memoryOf(data, recipe, layout) {
  const m = microBatches(layout, recipe.global_batch);
  const tokens = microBatchOf(layout, recipe.global_batch) * recipe.sequence / layout.cp;
  const {pp, vp} = layout;
  const split = stageLayers(data.model.layers, pp * vp);
  const stages = stageCosts(data, layout, tokens, split);
  const sums = m > 1 || degreeOfData(layout) * layout.cp > 1 || (layout.ep > 1 && layout.ep < layout.tp);
  const table = data.memory.states[layout.zero][Number(pp > 1)][Number(sums)];
  const alone = pp > 1 || degreeOfData(layout) * layout.cp === 1;
  const whole = alone ? {loss: 0, head: 0, layer: 0} : gathered(data, layout, table);
  const between = layout.sp ? tokens / layout.tp : tokens;
  const borders = pp > 1 ? 2 * between * data.model.hidden * data.model.activation_bytes : 0;
  return [...Array(pp).keys()].map((rank) => {
    const own = pp === 1 ? [0] : stagesOf(layout.schedule, pp, vp, rank);
    const count = countOf(data, layout, own.map((stage) => split[stage]), own.includes(0), own.includes(pp * vp - 1));
    const costs = own.map((stage) => stages[stage]);
    return rankMemory(data, table, count, costs, momentsOf(layout, m, rank), whole, borders);
  });
}

// Bytes of a rank at the worse of two moments: a backward pass, or the optimizer's update.
function rankMemory({stack, memory}, table, count, costs, alive, whole, borders) {
  const activations = mostAlive(alive, costs.map((cost) => cost.kept));
  const step = {...stateBytes(memory, table.step, count), activations, ...backward(alive, costs, whole)};
  step.buffers += borders;
  const temporaries = count.own * stack.update_bytes + Math.min(4 * count.own, stack.bucket_bytes);
  const update = {...stateBytes(memory, table.update, count), temporaries};
  const sum = (kinds) => Object.values(kinds).reduce((a, b) => a + b, 0);
  const inside = sum(step) >= sum(update);
  const kinds = {...(inside ? step : update)};
  kinds.reserve = stack.reserve_bytes + (stack.slack - 1) * (kinds.activations ?? 0);
  return {when: inside ? "backward pass" : "optimizer step", kinds, total: sum(kinds)};
}

const mostAlive = (alive, sizes) =>
  Math.max(...alive.map((moment) => moment.reduce((sum, n, stage) => sum + n * sizes[stage], 0)));

// The worst of three moments: inside head and loss; when the head's gradients are reduced; inside the layer behind them,
// when one micro-batch's logits are gone.
function backward(alive, costs, whole) {
  const most = (size) => Math.max(...costs.map(size));
  const kept = mostAlive(alive, costs.map((cost) => cost.logits_kept));
  const gone = most((cost) => cost.logits_kept - cost.logits_held);
  const found = [
    {logits: kept + most((cost) => cost.logits_transient), temporaries: 0, buffers: whole.loss},
    {logits: kept - gone, temporaries: 0, buffers: whole.head},
    {logits: kept - gone, temporaries: most((cost) => cost.transient), buffers: whole.layer},
  ];
  const sum = (kinds) => kinds.logits + kinds.temporaries + kinds.buffers;
  return found.reduce((worst, kinds) => sum(kinds) > sum(worst) ? kinds : worst);
}

function stateBytes({elements}, table, count) {
  const dot = (widths) => widths.reduce((sum, width, n) => sum + width * count[elements[n]], 0);
  return Object.fromEntries(Object.entries(table).map(([kind, widths]) => [kind, dot(widths)]));
}

// Elements on a rank: whole, its padded shard, its own, gathered again, and the number of tensors.
function countOf(data, layout, layers, first, last) {
  const pieces = data.memory.pieces[`${layout.tp},${layout.ep}`];
  const number = layers.reduce((sum, range) => sum + range.end - range.start, 0);
  const routed = layers.reduce((sum, range) => sum + routedOf(data.model, range), 0);
  const parts = [[pieces.dense, number - routed], [pieces.routed, routed]];
  if (first) parts.push([pieces.embedding, 1]);
  if (last) parts.push([pieces.norm, 1]);
  if (last && !(data.model.tied && first)) parts.push([pieces.head, 1]);
  const {tp, cp, ep, zero} = layout;
  const ranks = zero ? layout.dp_shard * cp : 1;
  const same = zero && ep > 1 ? layout.dp_shard * cp * tp / ep : ranks;
  const count = {whole: 0, shard: 0, own: 0, gathered: 0, tensors: 0};
  for (const [sizes, times] of parts)
    for (const [shape, expert, copies] of sizes) {
      const n = expert ? same : ranks, dim = shardedDim(shape, n), many = times * copies;
      const numel = shape.reduce((a, b) => a * b, 1), each = Math.ceil(shape[dim] / n) * (numel / shape[dim]);
      count.whole += many * numel;
      count.shard += many * each;
      count.own += many * each;
      count.gathered += many * each * n;
      count.tensors += many;
    }
  return count;
}

// The dim along which ZeRO cuts a tensor: spec/boxes.py, for experts too few for all ranks one inside them.
function shardedDim(sizes, ranks) {
  if (sizes.length < 3 || Math.ceil(sizes[0] / ranks) * (ranks - 1) < sizes[0]) return 0;
  return Math.max(0, sizes.findIndex((size, dim) => dim > 0 && size % ranks === 0));
}

// Layers of a range that are mixtures of experts.
const routedOf = (model, {start, end}) =>
  model.experts ? Math.max(0, end - Math.max(start, model.first_dense)) : 0;

// What data parallelism holds for a while without a pipeline, at three moments: planner/memory.py, whole_apart.
function gathered(data, layout, table) {
  const {zero} = layout, {tied, layers} = data.model;
  const unit = (ranges, first, last) => {
    const count = countOf(data, layout, ranges, first, last).gathered;
    return {parameters: zero === 3 ? count * table.parameter_bytes : 0, gradients: count * table.gradient_bytes};
  };
  const block = unit([{start: layers - 1, end: layers}], false, false), end = unit([], tied, true);
  const copies = zero >= 2 ? 2 : 1, kept = tied && zero >= 2 ? end.gradients : 0;
  const layer = 2 * block.parameters, both = end.parameters + block.parameters;
  if (tied) {
    const reduced = copies * block.gradients;
    return {loss: end.parameters, head: both + kept, layer: end.parameters + kept + layer + reduced};
  }
  const reduced = Math.max(block.gradients, end.gradients) + (copies - 1) * block.gradients;
  return {loss: end.parameters, head: both + copies * end.gradients, layer: layer + reduced};
}

// Bytes of each stage for one micro-batch: what is kept adds up, of the others the largest of any part.
const SUMMED = ["kept", "logits_kept", "logits_held"];
function stageCosts(data, layout, tokens, split) {
  const {tp, sp, ep} = layout, {sizes} = data.memory;
  const parts = data.memory.kept[`${tp}${sp ? "s" : ""}${ep > 1 ? "e" : ""}`][layout.recompute];
  const at = (lines) => lines.length === 2 ? lines[0] + lines[1] * tokens :
    Math.min(lines[0] + lines[1] * tokens, lines[2] + lines[3] * tokens);
  const bytes = Object.fromEntries(Object.entries(parts).map(([part, lines]) => [part, lines.map(at)]));
  return split.map((range, stage) => {
    const routed = routedOf(data.model, range);
    const times = {
      dense: range.end - range.start - routed, routed, embedding: Number(stage === 0),
      head: Number(stage === split.length - 1),
    };
    return Object.fromEntries(sizes.map((size, n) => [size, Object.entries(times).reduce((sum, [part, many]) => {
      if (SUMMED.includes(size)) return sum + many * bytes[part][n];
      return many ? Math.max(sum, bytes[part][n]) : sum;
    }, 0)]));
  });
}

// Micro-batches of a step that has as many in flight as one of m: whole rounds of the same width.
function enough(name, pp, m, vp) {
  if (name === "afab" || m <= ENOUGH * pp + pp) return m;
  if (vp > 1 && !V_PLACED.includes(name)) return ENOUGH * Math.floor(m / Math.floor(m / pp));
  return ENOUGH * pp + (vp === 1 ? m % pp : 0);
}

// The moments of a rank worth looking at: micro-batches alive in each of its stages, none below another.
function momentsOf(layout, m, rank) {
  const {pp, vp} = layout, name = layout.schedule;
  if (pp === 1) return [[1]];
  const few = enough(name, pp, m, vp);
  const key = `${name},${pp},${few},${vp}`;
  if (!flights.has(key)) flights.set(key, schedule(name, pp, few, vp).map(aliveIn));
  return flights.get(key)[rank];
}

function aliveIn(own) {
  const stages = [...new Set(own.map((action) => action.stage))].sort((a, b) => a - b);
  const alive = stages.map(() => 0), found = new Map();
  for (const {kind, stage} of own) {
    const place = stages.indexOf(stage);
    if (kind === "F") {
      alive[place]++;
      found.set(alive.join(), [...alive]);
    } else if (kind !== "B") alive[place]--;
  }
  const all = [...found.values()];
  return all.filter((a) => !all.some((b) => b !== a && a.every((n, s) => n <= b[s])));
}
