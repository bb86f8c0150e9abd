figure("memory", (data, view, {number}) => {
  const models = Object.keys(data.models);
  const layouts = Object.keys(data.models[models[0]]);
  const attentions = Object.keys(data.models[models[0]][layouts[0]]);
  const model = view.select({label: "model", values: models, value: models[1]});
  const layout = view.select({label: "on", values: layouts, value: layouts[1]});
  const attention = view.select({label: "kernels", values: attentions});
  const sequence = view.slider({
    label: "sequence", values: data.sequences, value: 8192, show: (tokens) => tokens.toLocaleString("en"),
  });
  const batch = view.slider({label: "micro-batch", values: data.batches});
  const gib = (size) => number(size, "GiB");
  const total = (parts) => parts.reduce((sum, part) => sum + part, 0);
  const ACTIVATIONS = data.kinds.indexOf("activations");
  const cells = () => data.models[model.value][layout.value][attention.value][sequence.value][batch.value];

  view.draw(
    (width) => view.bars(
      data.policies.map((policy, index) => ({name: `recompute=${policy}`, parts: cells()[index]})),
      {names: data.kinds, limit: data.usable, limitName: "an H100 has", show: gib, width},
    ),
    () => {
      const [none, selective] = cells();
      const saved = 100 * (1 - selective[ACTIVATIONS] / none[ACTIVATIONS]);
      const fitting = data.policies.filter((_, index) => total(cells()[index]) <= data.usable);
      return `Activations are ${gib(none[ACTIVATIONS])} of ${gib(total(none))} without recomputation. `
        + (saved < 0.5 ? "Selective recomputation saves nothing: flash attention stores no S x S weights. "
          : `Selective recomputation saves ${number(saved)} % of them. `)
        + (fitting.length ? `Fits an H100: ${fitting.join(", ")}.` : "No policy fits an H100.");
    },
  );
});
