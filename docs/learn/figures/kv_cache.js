figure("kv_cache", (data, view, {bytes, number}) => {
  const model = view.select({label: "model", values: Object.keys(data.bytes)});
  const width = view.select({label: "format", values: Object.keys(data.bytes[model.value])});
  const tokens = view.slider({label: "tokens of a sequence", values: data.tokens, value: 8192, show: (count) => number(count)});
  const sequences = view.slider({label: "sequences", values: data.sequences, value: 16});
  const sizes = () => data.bytes[model.value][width.value][data.tokens.indexOf(tokens.value)][data.sequences.indexOf(sequences.value)];
  view.draw(
    () => {
      const shown = sizes(), fits = Math.max(...shown) > data.gpu.bytes / 8;
      return view.bars(
        data.kinds[model.value].map((name, index) => ({name, parts: [shown[index]]})),
        {names: ["keys and values"], show: bytes, ...(fits ? {limit: data.gpu.bytes, limitName: `${data.gpu.name}, all its memory`} : {})},
      );
    },
    () => `${number(tokens.value)} ${tokens.value === 1 ? "token" : "tokens"} in ${sequences.value} ${sequences.value === 1 ? "sequence" : "sequences"}: `
      + `${bytes(sizes()[0])} with every head its own key, ${bytes(sizes()[1])} with groups, ${bytes(sizes()[2])} with one, ${bytes(sizes()[3])} as a latent. The weights come on top: ${bytes(data.weights[model.value])} in bf16.`,
  );
});
