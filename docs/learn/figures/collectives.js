figure("collectives", (data, view, {svg}) => {
  const collective = view.select({label: "collective", values: Object.keys(data), value: "all-reduce"});
  const ranks = view.slider({label: "ranks", values: [2, 3, 4, 5, 6], value: 4});
  const LEFT = 52;  // pixels, right of the names of ranks
  const run = () => data[collective.value].ranks[ranks.value];
  // Step 0 is before, then one for each round of sends, then after.
  const step = view.steps({label: "step", count: () => run().steps.length + 1, value: 1});

  const cells = (numbers, x, y, index) => (numbers ?? []).flatMap((value, column) => [
    svg("rect", {x: x + column * 25, y, width: 23, height: 18, rx: 3, style: `fill: var(--c${index + 1})`}),
    svg("text", {x: x + column * 25 + 11.5, y: y + 12.5, class: "on", "text-anchor": "middle"}, value),
  ]);

  view.draw(
    (width) => {
      const {before, after, steps} = run();
      const finished = step.value > steps.length;
      const sends = step.value > 0 && !finished ? steps[step.value - 1] : [];
      // Messages of a rank to several others may need more than one line. The height is that of the fullest step.
      const across = Math.max(1, Math.floor((width - LEFT) / 68));
      const messages = Math.max(...steps.flatMap((sent) => before.map((_, rank) => sent.filter(([from]) => from === rank).length)));
      const high = 31 + 15 * Math.ceil(messages / across);
      const drawing = svg("svg", {width, height: before.length * high + 4, role: "img", "aria-label": sentence()});
      before.forEach((numbers, rank) => {
        const y = rank * high;
        drawing.append(svg("text", {x: 0, y: y + 13}, `rank ${rank}`), ...cells(finished ? after[rank] : numbers, LEFT, y, rank));
        if (finished && !after[rank]) drawing.append(svg("text", {x: LEFT, y: y + 13, class: "faint"}, "nothing"));
        const moves = sends.filter(([from]) => from === rank);
        moves.forEach(([from, to, values], index) => {
          drawing.append(svg(
            "text", {x: LEFT + (index % across) * 68, y: y + 33 + 15 * Math.floor(index / across), "font-weight": 600},
            `→ ${to}: ${values.length > 3 ? `${values.slice(0, 2).join(" ")} …` : values.join(" ")}`,
          ));
        });
      });
      return drawing;
    },
    () => sentence(),
  );

  function sentence() {
    const {steps, sent} = run(), {formula, does, shares} = data[collective.value];
    if (step.value === 0) return `Before. ${collective.value}: ${does}.`;
    if (step.value > steps.length) {
      const whole = 4 * ranks.value;
      return `After ${steps.length} ${steps.length === 1 ? "step" : "steps"}. The busiest rank has sent ${Math.max(...sent)} bytes; `
        + `${formula} = ${Number((shares[ranks.value] * whole).toFixed(2))} with S = ${whole} bytes and n = ${ranks.value}.`;
    }
    const sends = steps[step.value - 1];
    return `Step ${step.value} of ${steps.length}: ${new Set(sends.map(([from]) => from)).size} of ${ranks.value} ranks send, ${sends[0][2].length} `
      + `${sends[0][2].length === 1 ? "number" : "numbers"} in a message.`;
  }
});
