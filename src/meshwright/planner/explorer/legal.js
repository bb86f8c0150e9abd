// Which layouts are legal: spec/legal.py and Layout.micro_batches, ported word for word.
// A layout has the fields of spec/layout.py; a recipe here is {sequence, global_batch}.

function violations(model, recipe, layout) {
  return [
    ...tensorRules(model, recipe, layout), ...contextRules(recipe, layout), ...pipelineRules(model, recipe, layout),
    ...expertRules(model, layout), ...dataRules(layout), ...dropoutRules(model, layout), ...batchRules(recipe, layout),
    ...positionRules(model, recipe),
  ];
}

const degreeOfData = (layout) => layout.dp_replicate * layout.dp_shard;

function microBatchOf(layout, batch) {
  const perRank = Math.floor(batch / degreeOfData(layout));
  return layout.micro_batch ? Math.min(layout.micro_batch, perRank) : perRank;
}

// Forward passes of a rank in a step; of a legal layout.
const microBatches = (layout, batch) => Math.floor(batch / degreeOfData(layout) / microBatchOf(layout, batch));

function nearestDivisor(number, wanted) {
  let best = 1;
  for (let d = 2; d <= number; d++)
    if (number % d === 0 && Math.abs(d - wanted) < Math.abs(best - wanted)) best = d;
  return best;
}

// As Python rounds: halves to the even neighbour.
function roundEven(value) {
  const low = Math.floor(value);
  if (value - low !== 0.5) return Math.round(value);
  return low % 2 ? low + 1 : low;
}

const unitOf = ({cp, tp, sp}) => (cp === 1 ? 1 : 2 * cp) * (sp ? tp : 1);
const nearestMultiple = (number, unit) => Math.max(1, roundEven(number / unit)) * unit;

// Whether tp ranks can have equally many key heads, or equally many ranks each of them.
const dealsKeyHeads = (model, tp) => model.mla || model.kv_heads % tp === 0 || tp % model.kv_heads === 0;

// The nearest degree that no rule refuses, as words for the command line.
function nearestTp(model, recipe, layout) {
  const others = layout.dp_shard * layout.cp, local = Math.floor(recipe.sequence / layout.cp);
  const narrow = model.experts && layout.ep === 1;
  const widest = Math.min(model.ffn, model.vocab, narrow ? model.expert_ffn : model.ffn, model.heads);
  const legal = [...Array(widest).keys()].map((n) => n + 1).filter((tp) => model.heads % tp === 0 &&
    dealsKeyHeads(model, tp) && (tp === 1 || !layout.sp || local % tp === 0) && others * tp % layout.ep === 0);
  const away = (tp) => Math.abs(tp - layout.tp);
  const tp = legal.reduce((best, one) => (best === null || away(one) < away(best) ? one : best), null) || 1;
  return `layout.tp=${tp}` + (tp === 1 && layout.sp ? " layout.sp=false" : "") + (legal.length ? "" : " layout.ep=1");
}

function* tensorRules(model, recipe, layout) {
  const {tp, sp, cp} = layout, refused = [];
  if (model.heads % tp) refused.push(`layout.tp=${tp} does not divide the ${model.heads} attention heads`);
  else if (!dealsKeyHeads(model, tp))
    refused.push(`layout.tp=${tp} and the ${model.kv_heads} key heads: one must divide the other`);
  if (tp > model.ffn || tp > model.vocab)
    refused.push(`layout.tp=${tp} exceeds model.ffn=${model.ffn} or model.vocab=${model.vocab}`);
  if (model.experts && layout.ep === 1 && tp > model.expert_ffn)
    refused.push(`layout.tp=${tp} exceeds model.moe.ffn=${model.expert_ffn}, and layout.ep=1 spreads no experts`);
  for (const sentence of refused)
    yield `${sentence}${sentence.includes(":") ? "; " : ": "}take ${nearestTp(model, recipe, layout)}`;
  if (sp && tp === 1)
    yield "layout.sp=true shares the sequence among tp ranks, and layout.tp=1: take layout.sp=false or a larger tp";
  const local = Math.floor(recipe.sequence / cp);
  if (sp && local % tp)
    yield `layout.sp=true cuts a rank's ${local} positions into layout.tp=${tp} equal parts: take recipe.sequence=` +
      `${nearestMultiple(recipe.sequence, unitOf(layout))}${layout.ep > 1 ? "" : " or layout.sp=false"}`;
}

function* contextRules(recipe, layout) {
  const {cp} = layout;
  if (recipe.sequence % (cp === 1 ? 1 : 2 * cp))
    yield `recipe.sequence=${recipe.sequence} cannot be cut into two chunks for each of layout.cp=${cp} ranks: ` +
      `take recipe.sequence=${nearestMultiple(recipe.sequence, unitOf(layout))}`;
}

function* pipelineRules(model, recipe, layout) {
  const {pp, vp} = layout, name = layout.schedule;
  if (pp === 1) {
    if (vp > 1) yield `layout.vp=${vp} cuts a pipeline rank's layers, and layout.pp=1: take layout.vp=1`;
    return;
  }
  if (pp * vp > model.layers)
    yield `layout.pp=${pp} x layout.vp=${vp} stages exceed the model's ${model.layers} layers: ` +
      `take ${fewerStages(model, recipe, layout)}`;
  if (model.tied && V_PLACED.includes(name) && degreeOfData(layout) * layout.cp > 1)
    yield `layout.schedule=${name} puts both ends of the model, with their tied matrix, on one rank, which data ` +
      "parallelism cannot share yet: take layout.schedule=interleaved, or layout.schedule=zb-h1 layout.vp=1";
  const count = wholeMicroBatches(layout, recipe.global_batch);
  const sentence = count ? refusal(name, pp, count, vp) : null;
  if (sentence) yield sentence;
}

// Of a rank in a step; 0 where they do not come out even, which batchRules says.
function wholeMicroBatches(layout, batch) {
  const perRank = Math.floor(batch / degreeOfData(layout)), size = microBatchOf(layout, batch);
  return !size || perRank % size ? 0 : perRank / size;
}

// The most pipeline ranks that the model has layers for and the schedule takes, as words for the command line.
function fewerStages(model, recipe, layout) {
  const count = wholeMicroBatches(layout, recipe.global_batch);
  const alone = V_PLACED.includes(layout.schedule) ? "zb-h1" : layout.schedule;
  let found = {pp: 1, vp: 1};
  search: for (const [schedule, vp] of [[layout.schedule, layout.vp], [alone, 1]])
    for (let pp = Math.min(layout.pp, Math.floor(model.layers / vp)); pp > 1; pp--)
      if (!count || !refusal(schedule, pp, count, vp)) {
        found = {pp, vp, schedule};
        break search;
      }
  const changed = Object.entries(found).filter(([key, value]) => layout[key] !== value);
  return changed.map(([key, value]) => `layout.${key}=${value}`).join(" ");
}

function* expertRules(model, layout) {
  const {ep, tp} = layout;
  if (ep === 1) return;
  if (!model.experts) {
    yield `layout.ep=${ep} spreads experts, and the model has none: take layout.ep=1`;
    return;
  }
  const ranks = layout.dp_shard * layout.cp * tp;
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);
  const near = nearestDivisor(gcd(model.experts, ranks), ep);
  if (model.experts % ep)
    yield `layout.ep=${ep} does not divide the ${model.experts} experts: take layout.ep=${near}`;
  if (ranks % ep)
    yield `layout.ep=${ep} is carved out of dp_shard x cp x tp = ${ranks} ranks and does not divide them: ` +
      `take layout.ep=${near}`;
  if (tp > 1 && !layout.sp)
    yield `layout.ep=${ep} with layout.tp=${tp}: each rank needs tokens of its own; take layout.sp=true`;
}

function* dataRules(layout) {
  if (layout.zero && layout.dp_shard * layout.cp === 1)
    yield `layout.zero=${layout.zero} shards over dp_shard x cp, which is one rank: ` +
      `take layout.zero=0${layout.dp_replicate > 1 ? ", or dp_shard instead of dp_replicate" : ""}`;
}

function* dropoutRules(model, layout) {
  if (model.dropout && layout.tp * layout.cp > 1)
    yield `recipe.dropout=${model.dropout} would draw otherwise with layout.tp=${layout.tp} and ` +
      `layout.cp=${layout.cp} than on one device: take recipe.dropout=0`;
  if (model.state_blocks[layout.tp]) yield model.state_blocks[layout.tp];
}

function* batchRules(recipe, layout) {
  const batch = recipe.global_batch, dp = degreeOfData(layout);
  const perRank = Math.floor(batch / dp), size = microBatchOf(layout, batch);
  if (size * dp !== 0 && perRank * dp === batch && perRank % size === 0) return;
  const micro = Math.max(1, layout.micro_batch);
  yield `recipe.global_batch=${batch} is not micro_batch=${micro} x accumulation x ` +
    `dp=${dp} for any whole accumulation: take recipe.global_batch=${nearestMultiple(batch, micro * dp)}`;
}

function* positionRules(model, recipe) {
  if (model.learned_positions && recipe.sequence > model.learned_positions)
    yield `recipe.sequence=${recipe.sequence} exceeds the ${model.learned_positions} learned positions ` +
      `of the model: take recipe.sequence=${model.learned_positions}`;
}
