figure("distillation", (data, view, {svg}) => {
  const kind = view.select({label: "loss", values: data.betas, value: "forward KL"});
  const heat = view.slider({label: "temperature T", values: data.temperatures, value: 1});
  const centre = view.slider({label: "the student's hill is at", values: data.centres, value: 2, show: place});
  const width = view.slider({label: "its width", values: data.widths, value: 1});
  const student = (name = kind.value, at = centre.value, wide = width.value) =>
    data.students[`${at}|${wide}|${heat.value}|${name}`];

  function place(at) {
    const left = Math.floor(at);
    return at === left ? data.tokens[left] : `${data.tokens[left]} / ${data.tokens[left + 1]}`;
  }

  view.draw(
    (wide) => {
      const theirs = data.teacher[heat.value], [ours, , gradient] = student();
      const LEFT = 46, high = 44, mid = LEFT + (wide - LEFT) * 0.6, room = mid - LEFT - 44;
      const most = Math.max(...gradient.map(Math.abs), 0.01), half = (wide - mid) / 2 - 4, zero = mid + (wide - mid) / 2;
      const drawing = svg("svg", {width: wide, height: data.tokens.length * high + 22, role: "img", "aria-label": sentence()});
      drawing.append(
        svg("text", {x: LEFT, y: 11, class: "faint"}, "probability"),
        svg("text", {x: zero, y: 11, class: "faint", "text-anchor": "middle"}, "gradient"),
        svg("line", {x1: zero, x2: zero, y1: 18, y2: data.tokens.length * high + 14, style: "stroke: var(--ink)"}),
      );
      data.tokens.forEach((token, row) => {
        const y = 20 + row * high;
        drawing.append(svg("text", {x: 0, y: y + 19}, token));
        [theirs[row], ours[row]].forEach((share, line) => {
          drawing.append(
            svg("rect", {x: LEFT, y: y + line * 15, width: Math.max(1, share * room), height: 13, style: `fill: var(--c${line + 1})`}),
            svg("text", {x: LEFT + share * room + 4, y: y + line * 15 + 11, class: "faint"}, `${(100 * share).toFixed(1)} %`),
          );
        });
        const long = Math.abs(gradient[row]) / most * half;
        drawing.append(svg("rect", {
          x: gradient[row] < 0 ? zero - long : zero, y: y + 5, width: long, height: 18, style: "fill: var(--c3)",
        }, svg("title", {}, gradient[row].toFixed(4))));
      });
      return [drawing, view.legend(["teacher", "student", "gradient by the student's logit: right = it must fall"])];
    },
    () => sentence(),
  );

  function sentence() {
    const losses = data.betas.map((name) => `${name} ${student(name)[1].toFixed(2)}`).join(", ");
    let best = [Infinity];
    for (const at of data.centres) for (const wide of data.widths) {
      const loss = student(kind.value, at, wide)[1];
      if (loss < best[0]) best = [loss, at, wide];
    }
    return `T² times each divergence, in nats: ${losses}. By ${kind.value} at this T the best of these students is at ${place(best[1])}, `
      + `${best[2]} wide, with ${best[0].toFixed(2)}.`;
  }
});
