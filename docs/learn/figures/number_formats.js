figure("number_formats", (data, view, {html}) => {
  const typed = view.text({label: "a number", value: "3.14159"});
  const scale = view.select({label: "scale S of int8 and NF4", values: [0.01, 0.1, 1, 10], value: 1});

  // Ties go to the even code, as every format here rounds.
  const even = (x) => {
    const low = Math.floor(x), rest = x - low;
    return rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low;
  };
  const bits = (code, count) => code.toString(2).padStart(count, "0");

  // Sign, exponent and mantissa of the nearest number of a format, and the number.
  function encode(x, {exponent, mantissa, largest, infinite}) {
    const sign = x < 0 || Object.is(x, -0) ? "1" : "0", size = Math.abs(x), bias = 2 ** (exponent - 1) - 1;
    const top = 2 ** exponent - 1;
    const special = (fraction, number) => ({sign, exponent: bits(top, exponent), mantissa: fraction, number});
    if (Number.isNaN(x)) return special("1".repeat(mantissa), NaN);
    let power = size === 0 ? 1 - bias : Math.floor(Math.log2(size));
    if (size !== 0 && 2 ** power > size) power -= 1;
    if (size !== 0 && 2 ** (power + 1) <= size) power += 1;
    power = Math.max(power, 1 - bias);
    const rounded = size === Infinity ? Infinity : even(size / 2 ** (power - mantissa)) * 2 ** (power - mantissa);
    if (rounded > largest) {
      const missing = infinite ? "0".repeat(mantissa) : "1".repeat(mantissa);
      return special(missing, infinite ? (x < 0 ? -Infinity : Infinity) : NaN);
    }
    let units = Math.round(rounded / 2 ** (power - mantissa));
    if (units === 2 ** (mantissa + 1)) { units /= 2; power += 1; }
    const normal = units >= 2 ** mantissa;
    return {
      sign, exponent: bits(normal ? power + bias : 0, exponent), mantissa: bits(units % 2 ** mantissa, mantissa),
      number: x < 0 ? -rounded : rounded,
    };
  }

  const show = (number) => Number.isFinite(number) ? String(Number(number.toPrecision(8))) : String(number);
  const lost = (x, number) => Number.isFinite(number) && Number.isFinite(x) ? String(Number(Math.abs(x - number).toPrecision(4))) : "no number";

  function nf4(x, step) {
    const share = x / step;
    let code = 0;
    data.nf4.forEach((number, index) => {
      if (Math.abs(number - share) < Math.abs(data.nf4[code] - share)) code = index;
    });
    return {code, number: data.nf4[code] * step};
  }

  function read() {
    const text = typed.value.trim().replace(",", ".");
    return text === "" ? NaN : text.toLowerCase().startsWith("-inf") ? -Infinity : text.toLowerCase().startsWith("inf") ? Infinity : Number(text);
  }

  const coloured = ({sign, exponent, mantissa}) => html(
    "code", {style: "overflow-wrap: anywhere"},
    html("span", {style: "color: var(--c2)"}, sign), " ",
    html("span", {style: "color: var(--c1)"}, exponent), " ", html("span", {style: "color: var(--c3)"}, mantissa),
  );

  view.draw(
    () => {
      const x = read(), rows = Object.entries(data.floats).map(([name, format]) => {
        const coded = encode(x, format);
        return [name, coloured(coded), show(coded.number), lost(x, coded.number)];
      });
      if (!Number.isNaN(x)) {
        const code = Math.max(-127, Math.min(127, even(x / scale.value))), normal = nf4(Math.max(-scale.value, Math.min(scale.value, x)), scale.value);
        const clipped = (largest) => Math.abs(x) > largest ? ", clipped" : "";
        rows.push(["int8", html("code", {}, bits(code & 255, 8)), `${show(code * scale.value)} (${code} S${clipped(127.5 * scale.value)})`, lost(x, code * scale.value)]);
        rows.push(["NF4", html("code", {}, bits(normal.code, 4)), `${show(normal.number)}${clipped(scale.value)}`, lost(x, normal.number)]);
      }
      return view.table(["format", "sign, exponent, mantissa", "number", "lost"], rows);
    },
    () => Number.isNaN(read())
      ? "This is not a number. Every floating-point format has codes for that, NaN. Whole numbers have none."
      : `int8 holds whole multiples of S = ${scale.value} up to 127 S, and NF4 sixteen numbers between -S and S.`,
  );
});
