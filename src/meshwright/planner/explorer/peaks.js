// The moments of a step at which a rank may hold most, and what each needs: planner/memory/engine_peak.py and planner/memory/engine_peak.py,
// ported. A moment is [what, place of its stage, alive, queued, graded, reduced].

const ENOUGH = 3; // rounds of the pipeline beyond which no more micro-batches are in flight (all but afab)
const WHEN = {
  loss: "head and loss", pass: "backward pass", inputs: "backward pass", sums: "last backward pass", split: "split backward pass",
  embedding: "gradient of the embedding", end: "gradient of the embedding", weights: "gradients of weights",
  reduce: "sum of gradients",
};
const moments = new Map();

function momentsOf(layout, kind, m, rank) {
  const {pp, vp} = layout, name = layout.schedule;
  if (pp === 1) return momentsAlone(layout.zero, m);
  const width = Math.floor(m / Math.max(1, Math.floor(m / pp)));
  const all = kind.holds_all || m <= (ENOUGH + 1) * width;
  const few = all ? m : ENOUGH * width + (vp === 1 ? m % pp : 0);
  const key = `${name},${pp},${few},${vp}`;
  if (!moments.has(key)) moments.set(key, schedule(kind, pp, few, vp).map((own) => momentsIn(own, pp * vp - 1)));
  return moments.get(key)[rank];
}

function momentsAlone(zero, m) {
  const found = [0, 1].slice(0, m).map((graded) => ["loss", 0, [1], [0], [graded], [0]]);
  const passes = m > 1 ? [[Number(m > 2), false]] : []; // one between is above the first
  if (m < 3 || zero < 2) passes.push([Number(m > 1), true]); // and the last, but where all gradients are summed in that
  for (const [graded, final] of passes)
    found.push([final ? "sums" : "pass", 0, [1], [0], [graded], [0]],
      [final ? "end" : "embedding", 0, [0], [0], [graded], [0]]);
  return found;
}

function momentsIn(own, lastStage) {
  const stages = [...new Set(own.map((action) => action.stage))].sort((a, b) => a - b);
  const [alive, queued, graded, reduced] = [0, 0, 0, 0].map(() => stages.map(() => 0));
  const last = new Map(own.filter(({kind}) => kind === "W" || kind === "BW").map((one) => [one.stage, one]));
  const found = new Map();
  for (const action of own) {
    const {kind, stage} = action, place = stages.indexOf(stage);
    const now = (what) => {
      const moment = [what, place, [...alive], [...queued], [...graded], [...reduced]];
      found.set(JSON.stringify(moment), moment);
    };
    if (kind === "F") {
      alive[place]++;
      if (stage === lastStage) now("loss");
    } else if (kind === "W") {
      now("weights");
      queued[place]--;
      graded[place] = 1;
      if (action === last.get(stage)) now("reduce");
    } else {
      const final = action === last.get(stage);
      now(kind === "B" ? "inputs" : final ? "sums" : "pass");
      alive[place]--;
      if (kind === "B") {
        queued[place]++;
        now("split");
      }
      if (stage === 0) now(final ? "end" : "embedding");
      if (kind === "BW") graded[place] = 1;
    }
    if (action === last.get(stage)) reduced[place] = 1;
  }
  const all = [...found.values()];
  return all.filter((one) => !all.some((other) => below(one, other))).sort(inOrder);
}

const below = (one, other) => one !== other && one[0] === other[0] && one[1] === other[1] &&
  [2, 3, 4].every((n) => one[n].every((x, stage) => x <= other[n][stage])) &&
  one[5].every((x, stage) => x >= other[5][stage]); // what is reduced is less with ZeRO and as much without

function inOrder(one, other) {
  if (one[0] !== other[0]) return one[0] < other[0] ? -1 : 1;
  const [a, b] = [one, other].map((moment) => moment.slice(1).flat());
  const n = a.findIndex((x, at) => x !== b[at]);
  return n < 0 ? 0 : a[n] - b[n];
}

// {when, kinds} of the worst of these moments.
function peakOf(rank, found) {
  let best = null, most = -1;
  for (const moment of found)
    for (const kinds of atMoment(rank, moment)) {
      const total = sumOf(kinds);
      if (total > most) [most, best] = [total, {when: WHEN[moment[0]], kinds: {...rank.state, ...kinds}}];
    }
  return best;
}

function atMoment(rank, [what, place, alive, queued, graded, reduced]) {
  const {layout, costs, state, units, first, last, table, shares, products} = rank; // products: sums take them
  const cost = costs[place], again = graded[place], whole = state.gradients;
  const sum = (size) => costs.reduce((total, one, n) => total + size(one, n), 0);
  const kept = sum((one, n) => alive[n] * one.kept + queued[n] * one.queued);
  const logits = sum((one, n) => alive[n] * one.logits_kept);
  const ends = last && place === costs.length - 1, early = queued[place] && !again; // gradients of weights wait
  const alone = layout.pp === 1, apart = alone && layout.zero >= 2, frees = alone && layout.zero === 3;
  const final = units.summed && (what === "sums" || what === "end");
  const shards = units.summed && layout.zero && !frees; // parameters that were whole go with a stage's last backward pass
  const letsGo = final && shards;
  const done = sum((one, n) => reduced[n] * shares[n]), sharers = layout.dp_shard * layout.cp;
  const before = whole * (sum((one, n) => graded[n] * shares[n]) - done) + whole * done / (shards ? sharers : 1) +
    (ends && early ? units.last.gradients : 0);
  const parameters = state.parameters * (shards ? 1 - done : 1);
  const made = table.parameter_bytes, summed = table.gradient_bytes;
  const kinds = (gradients, logits, temporaries, buffers, gone = 0) =>
    ({gradients, activations: kept, logits, temporaries, buffers, parameters: parameters - gone});

  if (what === "loss") {
    const gathered = alone && units.summed && (frees || (layout.zero && !again));
    const transient = Math.max(cost.logits_chunk, cost.logits_matrix);
    const late = units.tied ? units.block : units.last; // both ends of a tied matrix were gathered before the blocks
    const buffers = late.parameters * Number(Boolean(gathered)) + units.last.parameters * Number(frees);
    return [kinds(before, logits + transient, 0, buffers)];
  }
  const wider = made < summed && !again ? summed : 0;
  if (what === "weights") return [kinds(before, logits, cost.weights * ((products ? 0 : made) + wider), 0)];
  if (what === "reduce") {
    if (!units.summed) return [];
    const some = [...(first && place === 0 ? [units.first] : []), units.block];
    if (!layout.zero) return [kinds(before, logits, 0, 0)]; // added up where they are reduced
    const unit = some.reduce((a, b) => b.gradients - b.parameters > a.gradients - a.parameters ? b : a);
    return [kinds(before, logits, 0, unit.gradients, unit.parameters)];
  }
  if (what === "split") return [kinds(before, logits, cost.split, 0)];
  if (what === "embedding" || what === "end") {
    const {first: embedding, block} = units;
    const own = whole * shares[place], after = again ? before : before + (early ? embedding.gradients : own);
    const rest = letsGo ? Math.max(0, state.parameters * shares[place] - embedding.parameters) : 0;
    if (apart) {
      const gathers = frees ? embedding.parameters : 0;
      return [kinds(whole, logits, embedding.made, gathers + Math.max(embedding.gradients, block.gradients), rest)];
    }
    const left = embedding.gradients + block.gradients + own / sharers;
    const added = again || units.tied || units.summed || made < summed || !alone; // else it becomes the gradient
    const beside = added ? embedding.made : 0;
    return [kinds(after - (final && layout.zero ? Math.max(0, own - left) : 0), logits, beside, 0, rest)];
  }
  const end = ends ? units.last : {parameters: 0, gradients: 0, made: 0, share: 0}, {block} = units;
  const gone = ends ? cost.logits_kept - cost.logits_held : 0;
  const headless = ends && letsGo && !units.tied ? end.parameters : 0;
  const share = again ? 0 : end.share;
  const gradients = apart ? before + share : again ? before : Math.min(whole, before + end.gradients);
  const found = [];
  if (ends) {
    const gathers = frees ? end.parameters + block.parameters : 0;
    found.push(kinds(before, logits, end.made, gathers));
    if (apart) found.push(kinds(gradients, logits - gone, end.made, gathers + end.gradients, headless));
    else {
      found.push(kinds(gradients, logits - gone, end.made, 0));
      const reduced = gradients + end.share;
      if (final && layout.zero && !units.tied) found.push(kinds(reduced, logits - gone, 0, end.gradients, headless));
    }
  }
  const leaves = products || (what === "inputs" && cost.made > 0); // gradients of weights, for later or for sums
  const inside = Math.max(cost.mlp - (leaves ? cost.made : 0), cost.attention);
  if (apart || (final && !again && shards && alone)) {
    const [beside, buffers] = insideOf(rank, cost, Math.max(end.gradients, units.dense.gradients));
    found.push(kinds(before + share, logits - gone, beside, buffers, headless));
    if (frees && !again) { // the second layer of the model, where gradients of all behind it are there
      const [last, copies] = insideOf(rank, cost, units.dense.gradients);
      const all = Math.max(0, whole - units.first.share - 2 * block.share);
      found.push({...kinds(all, 0, last, copies), activations: Math.min(cost.kept, 2 * cost.largest_kept)});
    }
  } else found.push(kinds(gradients, logits - gone, inside, 0, headless));
  if (final && layout.zero && !apart) { // the last layer's gradients are reduced
    const left = gradients - (units.tied ? 0 : end.gradients - end.share);
    found.push({...kinds(left, logits - gone, 0, block.gradients, headless + block.parameters), activations: kept - cost.largest_kept});
  }
  if (alone && !again && !units.summed) { // the first layer, where gradients of all others are there
    const last = block.gradients + (units.tied ? 0 : units.first.gradients);
    const all = Math.max(0, whole * shares[place] - last);
    found.push({...kinds(all, 0, inside, 0), activations: cost.largest_kept});
  }
  return found;
}

// [temporaries, buffers] at the worst place of a layer whose gradients are reduced at once: engine_peak.py.
function insideOf({layout, units}, cost, reduced) {
  const {block, experts, stack, dense} = units, frees = layout.zero === 3, kept = units.summed ? reduced : 0;
  let gathered = frees ? 2 * block.parameters : 0;
  if (!experts.made)
    return [Math.max(cost.mlp, Math.max(cost.after, cost.attention) + block.made), gathered + kept];
  if (frees && units.alone) gathered -= experts.parameters;
  const behind = gathered - (frees ? experts.parameters : 0) + experts.gradients * (units.alone ? 2 : 1);
  const outside = cost.outside - cost.inner;
  const places = [
    [Math.max(cost.mlp, cost.after + experts.made), gathered + kept], [outside + experts.made + stack, behind],
    [cost.attention + dense.made, behind]];
  if (frees && stack) places.push([outside > 0 ? outside : cost.outside, gathered + 2 * experts.parameters + kept]);
  return places.reduce((most, one) => one[0] + one[1] > most[0] + most[1] ? one : most);
}

// The same of other software, of which less is known: planner/memory/rank_memory.py. All gradients at every moment, and
// the worse of two: inside head and loss, or inside the layer behind them.
function otherPeakOf(rank, found, m, border, logitBytes) {
  const {layout, costs, state, first, last, stack} = rank;
  const alive = found.map(([, , one, queued]) => one.map((n, place) => n + queued[place]));
  const most = (size) => Math.max(...alive.map((moment) => moment.reduce((sum, n, place) => sum + n * size(costs[place]), 0)));
  const largest = (size) => Math.max(...costs.map(size)), kept = most((one) => one.logits_kept);
  const head = {logits: kept + largest((one) => Math.max(one.logits_chunk, one.logits_matrix)), temporaries: 0};
  const layer = {
    logits: kept - largest((one) => one.logits_kept - one.logits_held),
    temporaries: largest((one) => Math.max(one.mlp, one.attention)),
  };
  const worse = sumOf(head) >= sumOf(layer) ? head : layer, piped = layout.pp > 1;
  let buffers = gatheredBytes(rank);
  if (piped) buffers += 2 * border + (stack.outputs_kept ? border * most(() => 1) : 0);
  if (piped && stack.step_buffers) {
    buffers += (2 * costs.length - first - last) * m * border;
    if (last) worse.logits += m * logitBytes;
  }
  return {when: WHEN.pass, kinds: {...state, activations: most((one) => one.kept), ...worse, buffers}};
}

// Two blocks beside both ends, one's gradients and the buffer they are reduced from.
function gatheredBytes({layout, units: {block, ends, summed}, stack}) {
  if (!summed || layout.zero < 3 || layout.pp > 1 && stack.sharding !== "flat") return 0;
  return 2 * block.parameters + 2 * block.gradients + ends.parameters;
}
