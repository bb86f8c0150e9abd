figure("linear_quantization", (data, view, {html}) => {
  const list = view.text({label: "numbers, with spaces", value: data.example.join(" ")});
  const method = view.select({label: "method", values: Object.keys(data.methods)});
  const bits = view.slider({label: "bits", values: [2, 3, 4, 8], value: 8});

  const even = (x) => {
    const low = Math.floor(x), rest = x - low;
    return rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low;
  };
  const show = (number) => String(Number(number.toPrecision(4)));
  // Spaces, semicolons, or a comma at the end of a number separate.
  const read = () => list.value.split(/[\s;]+|,(?:\s+|$)/).filter((word) => word).map(Number);
  // A product in fp32 that is off in its last bit has lost nothing.
  const lost = (x, back) => Math.abs(x - back) < 1e-6 * Math.abs(x) ? 0 : Math.abs(x - back);

  // The reader's own list is computed here; the example's codes come from the package.
  function quantize(numbers) {
    const known = numbers.length === data.example.length && numbers.every((x, index) => x === data.example[index]);
    if (known) return data.methods[method.value][bits.value];
    const count = bits.value;
    if (method.value === "absmax") {
      const most = 2 ** (count - 1) - 1, scale = Math.max(...numbers.map(Math.abs)) / most || 1;
      return {scale, zero: 0, codes: numbers.map((x) => Math.max(-most, Math.min(most, even(x / scale))))};
    }
    const low = Math.min(0, ...numbers), high = Math.max(0, ...numbers), most = 2 ** count - 1;
    const scale = (high - low) / most || 1, zero = even(-low / scale);
    return {scale, zero, codes: numbers.map((x) => Math.max(0, Math.min(most, even(x / scale) + zero)))};
  }
  const wrong = () => !read().length || read().some((x) => !(Math.abs(x) < 1e30));

  view.draw(
    () => {
      if (wrong()) return html("p", {}, "Write numbers with spaces between them, such as 15 0.1 0.02.");
      const numbers = read(), {scale, zero, codes} = quantize(numbers);
      const rows = numbers.map((x, index) => {
        const back = scale * (codes[index] - zero);
        return [show(x), show(x / scale), String(codes[index]), show(back), show(lost(x, back))];
      });
      return view.table(["r", "r / S", "q = round(r / S) + Z", "S (q - Z)", "lost"], rows);
    },
    () => {
      if (wrong()) return "";
      const numbers = read(), {scale, zero, codes} = quantize(numbers);
      const most = Math.max(...numbers.map((x, index) => lost(x, scale * (codes[index] - zero))));
      const rule = method.value === "absmax"
        ? `S = max |r| / ${2 ** (bits.value - 1) - 1} = ${show(scale)}, Z = 0`
        : `S = (max - min) / ${2 ** bits.value - 1} = ${show(scale)}, Z = round(-min / S) = ${zero}`;
      return `${rule}. The most that a number lost is ${show(most)}; half a step is ${show(scale / 2)}.`;
    },
  );
});
