// Seconds of a step of any legal layout, about: tables of planner/explorer/time_tables.py added up as
// planner/time/timeline.py does. Layouts of the map keep the times that Python played.

const NOTHING = {forward: 0, input: 0, weight: 0, exchange: 0};

function plus(one, other, times = 1) {
  return Object.fromEntries(Object.keys(NOTHING).map((key) => [key, one[key] + times * other[key]]));
}

// Where a value lies in a grid: [place of the one below it, share of the way to the next]; beyond the ends the line goes on.
function placeIn(grid, value) {
  const n = Math.max(0, Math.min(grid.length - 2, grid.findLastIndex((at) => at <= value)));
  return [n, (value - grid[n]) / (grid[n + 1] - grid[n])];
}

// Seconds of one layer and of both ends: {dense, routed, embedding, head}.
function passesOf(time, recipe, layout, tokens) {
  const {tp, sp, cp, ep} = layout, cut = `${tp},${Number(sp)}`, found = {};
  const [t, share] = placeIn(time.tokens, tokens), [s, along] = placeIn(time.sequences, recipe.sequence);
  const line = (low, high, part) => low + part * (high - low);
  const ofLength = (row) => typeof row === "number" ? row : line(row[s], row[s + 1], along);
  const seconds = (rows) => Math.max(0, line(ofLength(rows[t]), ofLength(rows[t + 1]), share)) / 1e6;
  for (const [part, tables] of Object.entries(time.layers)) {
    const [forward, weight, input, exchange, ...added] =
      tables[`${cut},${cp},${part === "dense" ? 1 : ep}`].map(seconds);
    const policy = 2 * (time.policies.indexOf(layout.recompute) - 1);
    const [again, sent] = policy < 0 ? [0, 0] : added.slice(policy, policy + 2);
    found[part] = {forward, weight, input: input + again, exchange: exchange + sent};
  }
  for (const [part, rows] of Object.entries(time.ends[`${cut},1,1`])) {
    const [forward, weight, input, exchange] = rows[0].map((_, n) => seconds(rows.map((row) => row[n])));
    found[part] = {forward, weight, input, exchange};
  }
  return found;
}

// Seconds of each pipeline stage for one micro-batch.
function stageSeconds(data, recipe, layout, tokens, split, sends) {
  const parts = passesOf(data.time, recipe, layout, tokens), last = split.length - 1;
  return split.map((range, stage) => {
    const routed = routedOf(data.model, range);
    let found = plus(NOTHING, parts.dense ?? NOTHING, range.end - range.start - routed);
    found = plus(found, parts.routed ?? NOTHING, routed);
    if (stage === 0) found = plus(found, parts.embedding);
    if (stage === last) found = plus(found, parts.head);
    return plus(found, {forward: sends, input: sends, weight: 0, exchange: 2 * sends});
  });
}

const work = ({forward, input, weight}) => forward + input + weight;
const total = (values) => values.reduce((a, b) => a + b, 0);

// Least seconds of all passes: planner/time/timeline.py, least_s.
function pipelineSeconds(kind, layout, m, stages, owned, send) {
  const {pp, vp} = layout, splits = kind.splits === "all";
  const borders = kind.in_v ? 2 * (pp - 1) : pp * vp - 1;
  let ahead = 0, behind = 0;
  let longest = total(stages.map((one) => work(one) - (splits ? one.weight : 0))) + 2 * borders * send;
  owned.forEach((own, rank) => {
    const weights = own.map((stage) => stages[stage].weight);
    const left = !splits ? 0 : kind.in_v ?
      total(weights.map((seconds, place) => Math.min(m, rank + 1 - place) * seconds)) :
      Math.min(m * weights.length, rank + 1) * Math.max(...weights);
    longest = Math.max(longest,
      ahead + m * total(own.map((stage) => work(stages[stage]))) + Math.max(0, behind - left));
    ahead += stages[rank].forward + send;
    behind += stages[rank].input + send + (splits ? 0 : stages[rank].weight);
  });
  return longest;
}

// Seconds of data parallelism by its collectives, of the rank that takes longest.
function sharingSeconds(data, layout, held) {
  const {tp, cp, ep, zero} = layout;
  const rows = data.time.sharing[`${tp},${ep},${layout.dp_shard * cp},${layout.dp_replicate}`];
  const sums = held.map(({dense, routed, first, last}) => {
    const ends = first && last ? 4 : last ? 3 : 2;
    return [0, 1, 2, 3].map((n) => dense * rows[0][n] + routed * rows[1][n] + (first || last ? rows[ends][n] : 0));
  });
  const most = [0, 1, 2, 3].map((n) => Math.max(...sums.map((one) => one[n])));
  return zero ? {reduce: most[1], gather: most[2], copies: most[3]} : {reduce: most[0], gather: 0, copies: 0};
}

// Share of the reductions that a split schedule leaves no work to hide behind.
function afterPasses(kind, layout, m) {
  if (kind.splits !== "all") return 0;
  const last = new Map();
  const own = schedule(kind, layout.pp, Math.min(m, 3 * layout.pp - layout.pp % 1), layout.vp)[0];
  for (const action of own) if (action.kind === "W" || action.kind === "BW") last.set(action.stage, action.kind);
  return [...last.values()].filter((kind) => kind === "W").length / last.size;
}

// Seconds that gathers and reductions of data parallelism add: planner/time/timeline.py, _data_parallel.
function exposedSeconds(data, layout, m, own, sharing, hidden, edges) {
  const {stack} = data.time, {reduce, gather, copies} = sharing, final = reduce + copies;
  const forward = stack.hides_weights * total(own.map((one) => one.forward));
  if (layout.zero === 3 && layout.pp === 1) {
    const backward = stack.hides_weights * total(own.map((one) => one.input + one.weight));
    const share = edges.first || 1 / 50, again = gather * (1 - edges.kept);
    return {
      weights: m * Math.max(share * gather, gather - forward) + (m - 1) * Math.max(0, again + reduce - backward) +
        Math.max(0, again + final - backward),
      gradients: share * final,
      whole: m * ((2 - edges.kept) * gather + reduce) + copies,
    };
  }
  const share = stack.hides_gradients ? edges.first || 1 / 20 : 1, times = layout.zero === 2 && layout.pp === 1 ? m : 1;
  return {
    weights: layout.zero ? Math.max(0, gather - forward) : 0,
    gradients: (times - 1) * Math.max(share * reduce, reduce - hidden) + Math.max(share * final, final - hidden),
    whole: times * reduce + copies + (layout.zero ? gather : 0),
  };
}

// Shares of the parameters at both ends, without a pipeline.
function edgesOf(data, layout) {
  if (layout.pp > 1 || degreeOfData(layout) * layout.cp === 1) return {first: 0, kept: 0};
  const all = [{start: 0, end: data.model.layers}], {tied} = data.model;
  const size = (ranges, first, last) => countOf(data, {...layout, zero: 0}, ranges, first, last).whole;
  const whole = size(all, true, true), first = size([], true, tied), last = size([], tied, true);
  if (data.time.ends_apart) return {first: first / whole, kept: last / whole};
  return {first: 0, kept: (tied ? last : first + last) / whole};
}

// Parts of a step in seconds, in the order of planner/time/timeline.py's StepTime, of a legal layout.
function stepParts(data, recipe, layout) {
  const {pp, vp, tp, cp} = layout, {stack, per_node: perNode} = data.time, kind = data.schedules[layout.schedule];
  const m = microBatches(data.model, layout, recipe);
  const tokens = microBatchOf(data.model, layout, recipe) * recipe.sequence / cp;
  const split = stageLayers(data.model, pp * vp);
  const wire = (layout.sp ? tokens / tp : tokens) * data.model.hidden * data.model.activation_bytes;
  const send = pp > 1 ? data.time.send[0] + data.time.send[1] * wire : 0;
  const stages = stageSeconds(data, recipe, layout, tokens, split,
    pp > 1 ? send * (1 - stack.hides_sends) + stack.send_s : 0);
  const owned = [...Array(pp).keys()].map((rank) => pp === 1 ? [0] : stagesOf(kind, pp, vp, rank));
  const each = owned.map((own) => total(own.map((stage) => work(stages[stage]))));
  const own = owned[each.indexOf(Math.max(...each))].map((stage) => stages[stage]), busy = m * Math.max(...each);
  const exchange = m * total(own.map((one) => one.exchange));
  let bubble = pp === 1 ? 0 : pipelineSeconds(kind, layout, m, stages, owned, send) - busy;
  const shares = data.time.ranks_per_core;
  if (shares > 1 && pp > 1) bubble = Math.max((busy + bubble) / shares, m * total(each) / each.length) - busy;

  const ranges = owned.map((places) => places.map((stage) => split[stage]));
  const held = owned.map((places, rank) => {
    const routed = total(ranges[rank].map((range) => routedOf(data.model, range)));
    const layers = total(ranges[rank].map(({start, end}) => end - start));
    return {dense: layers - routed, routed, first: places.includes(0), last: places.includes(pp * vp - 1)};
  });
  const ranks = degreeOfData(layout) * cp;
  const inside = tp < perNode ? Math.max(1, Math.min(ranks, Math.floor(perNode / tp))) : 1;
  const shared = ranks > 1 && (inside > 1 || tp > perNode) ? 0.5 : 0;
  const backward = own.map((one) => one.input + one.weight - shared * one.exchange);
  const hidden = stack.hides_gradients * Math.max(0, total(backward)) * (pp > 1 && data.stack.own ? 1 - afterPasses(kind, layout, m) : 1);
  const {weights, gradients, whole} = exposedSeconds(
    data, layout, m, own, sharingSeconds(data, layout, held), hidden, edgesOf(data, layout));
  const slowed = stack.contention * Math.max(0, whole - weights - gradients);
  const updates = held.map((one, rank) => {
    const {updated, learned, moments} = countOf(data, layout, ranges[rank], one.first, one.last);
    const {update_s: update, moment_s: moment, widened_s: widened, added_s: added, shards_s: shards} = data.time;
    const sums = layout.zero < 2 || pp > 1 ? learned * (widened + (m - 1) * added)
      : m * learned * widened + (m - 1) * updated * shards;
    return updated * update + sums + moments * moment + matrixSeconds(data, layout, one.dense, one.routed);
  });
  return [
    busy - exchange + slowed, exchange, bubble, weights, gradients, Math.max(...updates),
    stack.step_s + m * stack.micro_batch_s,
  ];
}
