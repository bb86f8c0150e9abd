// Which states are legal: looked up in tables that Python made by its own rules (planner/explorer/legal_tables.py).
// A layout has the fields of spec/layout/layout.py; a recipe here is {sequence, global_batch}.

// The answer that a table has for these values of its axes.
function lookUp({nodes}, root, values) {
  let node = nodes[root];
  while (node.by) node = nodes[node.to[values[node.by]] ?? node.else];
  return node.is;
}

const fillIn = (sentence, values) => sentence.replace(/\{(\w+)\}/g, (_, name) => values[name]);
const degreeOfData = (layout) => layout.dp_replicate * layout.dp_shard;
const valuesOf = (recipe, layout) => ({...layout, ...recipe, dp: degreeOfData(layout)});

// Why a layout is illegal, in sentences; none: legal.
function violations({legal}, recipe, layout) {
  const values = valuesOf(recipe, layout);
  values.count = lookUp(legal, legal.count, values);
  return legal.rules.flatMap((root) => lookUp(legal, root, values).map((sentence) => fillIn(sentence, values)));
}

// Sequences of a forward pass of a rank, and how many such passes are in a step.
const microBatchOf = ({legal}, layout, recipe) => lookUp(legal, legal.size, valuesOf(recipe, layout));
const microBatches = ({legal}, layout, recipe) => lookUp(legal, legal.count, valuesOf(recipe, layout));
