// The moments of a step at which a rank may hold most, and what each needs: planner/memory/engine_peak.py, ported. Python
// cannot count them ahead, since a slider may ask for any of millions of layouts; a test holds both against each other.
// A moment is [occasion, index of its stage on the rank, alive, queued, graded, reduced]; the last four have a number for
// each stage of the rank: micro-batches whose activations live, those that wait for their gradients of weights, whether
// the stage has gradients already, whether they are reduced.

const ENOUGH = 3; // rounds of the pipeline beyond which no more micro-batches are in flight (all but afab)
const WHEN = {
  loss: "head and loss", pass: "backward pass", inputs: "backward pass", sums: "last backward pass", split: "split backward pass",
  embedding: "gradient of the embedding", end: "gradient of the embedding", weights: "gradients of weights",
  reduce: "sum of gradients",
};
const momentCache = new Map(); // a slider asks for the same schedule again and again

function momentsOf(layout, kind, m, rank) {
  const {pp, vp} = layout, name = layout.schedule;
  if (pp === 1) return momentsAlone(layout.zero, m);
  const width = Math.floor(m / Math.max(1, Math.floor(m / pp)));
  const holdsAll = kind.holds_all || m <= (ENOUGH + 1) * width;
  const few = holdsAll ? m : ENOUGH * width + (vp === 1 ? m % pp : 0);
  const key = `${name},${pp},${few},${vp}`;
  if (!momentCache.has(key)) momentCache.set(key, schedule(kind, pp, few, vp).map((actions) => momentsIn(actions, pp * vp - 1)));
  return momentCache.get(key)[rank];
}

function momentsAlone(zero, m) {
  const moments = [0, 1].slice(0, m).map((graded) => ["loss", 0, [1], [0], [graded], [0]]);
  const passes = m > 1 ? [[Number(m > 2), false]] : []; // one between is above the first
  if (m < 3 || zero < 2) passes.push([Number(m > 1), true]); // and the last, but where all gradients are summed in that
  for (const [graded, final] of passes)
    moments.push([final ? "sums" : "pass", 0, [1], [0], [graded], [0]],
      [final ? "end" : "embedding", 0, [0], [0], [graded], [0]]);
  return moments;
}

function momentsIn(actions, lastStage) {
  const stages = [...new Set(actions.map((action) => action.stage))].sort((a, b) => a - b);
  const [alive, queued, graded, reduced] = [0, 0, 0, 0].map(() => stages.map(() => 0));
  const last = new Map(actions.filter(({kind}) => kind === "W" || kind === "BW").map((action) => [action.stage, action]));
  const seen = new Map();
  for (const action of actions) {
    const {kind, stage} = action, index = stages.indexOf(stage);
    const record = (kind) => {
      const moment = [kind, index, [...alive], [...queued], [...graded], [...reduced]];
      seen.set(JSON.stringify(moment), moment);
    };
    if (kind === "F") {
      alive[index]++;
      if (stage === lastStage) record("loss");
    } else if (kind === "W") {
      record("weights");
      queued[index]--;
      graded[index] = 1;
      if (action === last.get(stage)) record("reduce");
    } else {
      const final = action === last.get(stage);
      record(kind === "B" ? "inputs" : final ? "sums" : "pass");
      alive[index]--;
      if (kind === "B") {
        queued[index]++;
        record("split");
      }
      if (stage === 0) record(final ? "end" : "embedding");
      if (kind === "BW") graded[index] = 1;
    }
    if (action === last.get(stage)) reduced[index] = 1;
  }
  const moments = [...seen.values()];
  return moments.filter((moment) => !moments.some((other) => isBelow(moment, other))).sort(compareMoments);
}

// Whether the first moment needs no more than the second in everything, so that it cannot be the peak.
const isBelow = (first, second) => first !== second && first[0] === second[0] && first[1] === second[1] &&
  [2, 3, 4].every((n) => first[n].every((x, stage) => x <= second[n][stage])) &&
  first[5].every((x, stage) => x >= second[5][stage]); // what is reduced is less with ZeRO and as much without

// engine_peak.py sorts in the same order, so that of two equal peaks both name the same moment.
function compareMoments(first, second) {
  if (first[0] !== second[0]) return first[0] < second[0] ? -1 : 1;
  const [a, b] = [first, second].map((moment) => moment.slice(1).flat());
  const n = a.findIndex((x, at) => x !== b[at]);
  return n < 0 ? 0 : a[n] - b[n];
}

// {when, kinds} of the worst of these moments.
function peakOf(rank, moments) {
  let best = null, largest = -1;
  for (const moment of moments)
    for (const kinds of atMoment(rank, moment)) {
      const total = sumOf(kinds);
      if (total > largest) [largest, best] = [total, {when: WHEN[moment[0]], kinds: {...rank.state, ...kinds}}];
    }
  return best;
}

// The bytes of a rank at one moment, by kind; where the worst point inside that moment is not known, several candidates.
function atMoment(rank, [occasion, index, alive, queued, graded, reduced]) {
  const {layout, costs, state, units, first, last, table, shares, products} = rank; // products: sums take them
  const cost = costs[index], hasGradients = graded[index], fullGradients = state.gradients;
  const sum = (size) => costs.reduce((total, cost, n) => total + size(cost, n), 0);
  const keptBytes = sum((cost, n) => alive[n] * cost.kept + queued[n] * cost.queued);
  const logits = sum((cost, n) => alive[n] * cost.logits_kept);
  const ends = last && index === costs.length - 1, early = queued[index] && !hasGradients; // gradients of weights wait
  const alone = layout.pp === 1, apart = alone && layout.zero >= 2, frees = alone && layout.zero === 3;
  const final = units.summed && (occasion === "sums" || occasion === "end");
  const shards = units.summed && layout.zero && !frees; // parameters that were whole go with a stage's last backward pass
  const letsGo = final && shards;
  const done = sum((cost, n) => reduced[n] * shares[n]), sharers = layout.dp_shard * layout.cp;
  const before = fullGradients * (sum((cost, n) => graded[n] * shares[n]) - done) + fullGradients * done / (shards ? sharers : 1) +
    (ends && early ? units.last.gradients : 0);
  const parameters = state.parameters * (shards ? 1 - done : 1);
  const madeBytes = table.parameter_bytes, summed = table.gradient_bytes;
  const kinds = (gradients, logits, temporaries, buffers, gone = 0) =>
    ({gradients, activations: keptBytes, logits, temporaries, buffers, parameters: parameters - gone});

  if (occasion === "loss") {
    const gathered = alone && units.summed && (frees || (layout.zero && !hasGradients));
    const transient = Math.max(cost.logits_chunk, cost.logits_matrix);
    const late = units.tied ? units.block : units.last; // both ends of a tied matrix were gathered before the blocks
    const buffers = late.parameters * Number(Boolean(gathered)) + units.last.parameters * Number(frees);
    return [kinds(before, logits + transient, 0, buffers)];
  }
  const wider = madeBytes < summed && !hasGradients ? summed : 0;
  if (occasion === "weights") return [kinds(before, logits, cost.weights * ((products ? 0 : madeBytes) + wider), 0)];
  if (occasion === "reduce") {
    if (!units.summed) return [];
    const reducedUnits = [...(first && index === 0 ? [units.first] : []), units.block];
    if (!layout.zero) return [kinds(before, logits, 0, 0)]; // added up where they are reduced
    const unit = reducedUnits.reduce((a, b) => b.gradients - b.parameters > a.gradients - a.parameters ? b : a);
    return [kinds(before, logits, 0, unit.gradients, unit.parameters)];
  }
  if (occasion === "split") return [kinds(before, logits, cost.split, 0)];
  if (occasion === "embedding" || occasion === "end") {
    const {first: embedding, block} = units;
    const ownGradients = fullGradients * shares[index], after = hasGradients ? before : before + (early ? embedding.gradients : ownGradients);
    const rest = letsGo ? Math.max(0, state.parameters * shares[index] - embedding.parameters) : 0;
    if (apart) {
      const gathers = frees ? embedding.parameters : 0;
      return [kinds(fullGradients, logits, embedding.made, gathers + Math.max(embedding.gradients, block.gradients), rest)];
    }
    const unreduced = embedding.gradients + block.gradients + ownGradients / sharers;
    const added = hasGradients || units.tied || units.summed || madeBytes < summed || !alone; // else it becomes the gradient
    const beside = added ? embedding.made : 0;
    return [kinds(after - (final && layout.zero ? Math.max(0, ownGradients - unreduced) : 0), logits, beside, 0, rest)];
  }
  const end = ends ? units.last : {parameters: 0, gradients: 0, made: 0, share: 0}, {block} = units;
  const gone = ends ? cost.logits_kept - cost.logits_held : 0;
  const headless = ends && letsGo && !units.tied ? end.parameters : 0;
  const share = hasGradients ? 0 : end.share;
  const gradients = apart ? before + share : hasGradients ? before : Math.min(fullGradients, before + end.gradients);
  const candidates = [];
  if (ends) {
    const gathers = frees ? end.parameters + block.parameters : 0;
    candidates.push(kinds(before, logits, end.made, gathers));
    if (apart) candidates.push(kinds(gradients, logits - gone, end.made, gathers + end.gradients, headless));
    else {
      candidates.push(kinds(gradients, logits - gone, end.made, 0));
      const reduced = gradients + end.share;
      if (final && layout.zero && !units.tied) candidates.push(kinds(reduced, logits - gone, 0, end.gradients, headless));
    }
  }
  const leaves = products || (occasion === "inputs" && cost.made > 0); // gradients of weights, for later or for sums
  const inside = Math.max(cost.mlp - (leaves ? cost.made : 0), cost.attention);
  if (apart || (final && !hasGradients && shards && alone)) {
    const [beside, buffers] = layerPeakOf(rank, cost, Math.max(end.gradients, units.dense.gradients));
    candidates.push(kinds(before + share, logits - gone, beside, buffers, headless));
    if (frees && !hasGradients) { // the second layer of the model, where gradients of all behind it are there
      const [last, copies] = layerPeakOf(rank, cost, units.dense.gradients);
      const earlierGradients = Math.max(0, fullGradients - units.first.share - 2 * block.share);
      candidates.push({...kinds(earlierGradients, 0, last, copies), activations: Math.min(cost.kept, 2 * cost.largest_kept)});
    }
  } else candidates.push(kinds(gradients, logits - gone, inside, 0, headless));
  if (final && layout.zero && !apart) { // the last layer's gradients are reduced
    const unreduced = gradients - (units.tied ? 0 : end.gradients - end.share);
    candidates.push({...kinds(unreduced, logits - gone, 0, block.gradients, headless + block.parameters), activations: keptBytes - cost.largest_kept});
  }
  if (alone && !hasGradients && !units.summed) { // the first layer, where gradients of all others are there
    const last = block.gradients + (units.tied ? 0 : units.first.gradients);
    const laterGradients = Math.max(0, fullGradients * shares[index] - last);
    candidates.push({...kinds(laterGradients, 0, inside, 0), activations: cost.largest_kept});
  }
  return candidates;
}

// [temporaries, buffers] at the worst place of a layer whose gradients are reduced at once: engine_peak.py.
function layerPeakOf({layout, units}, cost, reduced) {
  const {block, experts, stack, dense} = units, frees = layout.zero === 3, gradientBytes = units.summed ? reduced : 0;
  let gathered = frees ? 2 * block.parameters : 0;
  if (!experts.made)
    return [Math.max(cost.mlp, Math.max(cost.after, cost.attention) + block.made), gathered + gradientBytes];
  if (frees && units.alone) gathered -= experts.parameters;
  const behind = gathered - (frees ? experts.parameters : 0) + experts.gradients * (units.alone ? 2 : 1);
  const outside = cost.outside - cost.inner;
  const peaks = [
    [Math.max(cost.mlp, cost.after + experts.made), gathered + gradientBytes], [outside + experts.made + stack, behind],
    [cost.attention + dense.made, behind]];
  if (frees && stack) peaks.push([outside > 0 ? outside : cost.outside, gathered + 2 * experts.parameters + gradientBytes]);
  return peaks.reduce((worst, peak) => peak[0] + peak[1] > worst[0] + worst[1] ? peak : worst);
}

// The same of other software, of which less is known: planner/memory/rank_memory.py. All gradients at every moment, and
// the worse of two: inside head and loss, or inside the layer behind them.
function otherPeakOf(rank, moments, m, border, logitBytes) {
  const {layout, costs, state, first, last, stack} = rank;
  const alive = moments.map(([, , stageAlive, queued]) => stageAlive.map((n, index) => n + queued[index]));
  const largestSum = (size) => Math.max(...alive.map((moment) => moment.reduce((sum, n, index) => sum + n * size(costs[index]), 0)));
  const largest = (size) => Math.max(...costs.map(size)), keptLogits = largestSum((cost) => cost.logits_kept);
  const head = {logits: keptLogits + largest((cost) => Math.max(cost.logits_chunk, cost.logits_matrix)), temporaries: 0};
  const layer = {
    logits: keptLogits - largest((cost) => cost.logits_kept - cost.logits_held),
    temporaries: largest((cost) => Math.max(cost.mlp, cost.attention)),
  };
  const worse = sumOf(head) >= sumOf(layer) ? head : layer, piped = layout.pp > 1;
  let buffers = gatheredBytes(rank);
  if (piped) buffers += 2 * border + (stack.outputs_kept ? border * largestSum(() => 1) : 0);
  if (piped && stack.step_buffers) {
    buffers += (2 * costs.length - first - last) * m * border;
    if (last) worse.logits += m * logitBytes;
  }
  return {when: WHEN.pass, kinds: {...state, activations: largestSum((cost) => cost.kept), ...worse, buffers}};
}

// Two blocks beside both ends, one's gradients and the buffer they are reduced from.
function gatheredBytes({layout, units: {block, ends, summed}, stack}) {
  if (!summed || layout.zero < 3 || layout.pp > 1 && stack.sharding !== "flat") return 0;
  return 2 * block.parameters + 2 * block.gradients + ends.parameters;
}
