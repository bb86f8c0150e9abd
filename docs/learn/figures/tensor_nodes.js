figure("tensor_nodes", (data, view, {number}) => {
  const model = view.select({label: "model", values: Object.keys(data.models), value: "llama-3.1-70b"});
  const recompute = view.select({label: "recompute", values: ["none", "full"], value: "full"});
  const tp = view.slider({label: "tp", values: data.tensor, value: 16});
  const rows = () => data.models[model.value][recompute.value];
  const place = (degree) => degree <= data.gpus ? "inside a node" : `over ${degree / data.gpus} nodes`;

  view.draw(
    (width) => view.bars(
      data.tensor.map((degree) => {
        const row = rows()[degree];
        return {
          name: `${degree === tp.value ? "▶ " : ""}tp = ${degree}, ${place(degree)}`,
          parts: [row.tokens],
          note: `${number(row.tokens)} tokens/s${row.fits ? "" : `, does not fit (${number(row.gib)} GiB)`}`,
        };
      }),
      {names: ["tokens per second and GPU, planned"], width},
    ),
    () => {
      const row = rows()[tp.value], before = rows()[Math.max(1, tp.value / 2)];
      const change = tp.value === 1 ? "" : ` Its tokens/s are ${number(Math.abs(100 * (1 - row.tokens / before.tokens)))} % `
        + `${row.tokens < before.tokens ? "fewer" : "more"} than those of tp = ${tp.value / 2}.`;
      return `tp = ${tp.value}, ${place(tp.value)}: ${number(row.tokens)} tokens/s per GPU, MFU ${number(100 * row.mfu)} %, `
        + `exposed communication ${number(100 * row.exposed)} % of the step, ${number(row.gib)} GiB.${change}`;
    },
  );
});
