figure("roofline", (data, view, {svg, number}) => {
  const {rows, widths, edges, devices} = data;
  const device = view.select({label: "device", values: Object.keys(devices), value: "h100", show: (name) => devices[name].title});
  const dtype = view.select({label: "numbers", values: ["bf16", "fp8"]});
  const m = view.slider({label: "m, rows (tokens)", values: rows, value: 256, show: (value) => number(value)});
  const n = view.slider({label: "n, width of the answer", values: widths, value: 4096, show: (value) => number(value)});
  const k = view.slider({label: "k, inner width", values: widths, value: 4096, show: (value) => number(value)});
  const roof = () => devices[device.value].roofs[dtype.value];
  const product = () => roof().products[`${m.value} ${n.value} ${k.value}`];
  const tera = (value) => number(value / 1e12, "TFLOP/s");

  view.draw(
    (width) => {
      const high = 240, left = 8, top = 18, bottom = 34, lowest = 1e11, highest = 1e16;
      const label = sentence();
      const drawing = svg("svg", {width, height: high, role: "img", "aria-label": label});
      if (!roof()) return svg("svg", {width, height: 24, role: "img", "aria-label": label}, svg("text", {x: 0, y: 14}, "no such products"));
      const x = (value) => left + (width - 2 * left) * Math.log(value / edges[0]) / Math.log(edges[1] / edges[0]);
      const y = (value) => top + (high - top - bottom) * (1 - Math.log(value / lowest) / Math.log(highest / lowest));
      const [, , intensity, computing, moving] = product();
      for (const mark of [1, 16, 256, 4096]) {
        drawing.append(
          svg("line", {x1: x(mark), x2: x(mark), y1: 0, y2: high - bottom, style: "stroke: var(--faint)", "stroke-dasharray": "2 4"}),
          svg("text", {x: x(mark), y: high - bottom + 13, class: "faint", "text-anchor": "middle"}, number(mark)),
        );
      }
      for (const mark of [1e12, 1e13, 1e14, 1e15]) {
        drawing.append(
          svg("line", {x1: left, x2: width - left, y1: y(mark), y2: y(mark), class: "rule"}),
          svg("text", {x: left, y: y(mark) - 3, class: "faint"}, mark === 1e15 ? tera(mark) : number(mark / 1e12)),
        );
      }
      drawing.append(svg("text", {x: width - left, y: high - 4, class: "faint", "text-anchor": "end"}, "FLOP per byte"));
      drawing.append(svg("polyline", {
        points: roof().line.map(([across, up]) => `${x(across)},${y(up)}`).join(" "), fill: "none",
        style: "stroke: var(--c1)", "stroke-width": 2.5,
      }));
      drawing.append(svg("text", {x: width - left, y: y(roof().peak) - 6, "text-anchor": "end"}, tera(roof().peak)));
      const reached = product()[0] / Math.max(computing, moving) * 1e6;
      drawing.append(
        svg("line", {x1: x(intensity), x2: x(intensity), y1: y(reached), y2: high - bottom, style: "stroke: var(--c2)"}),
        svg("circle", {cx: x(intensity), cy: y(reached), r: 6, style: "fill: var(--c2)"}),
      );
      return drawing;
    },
    () => sentence(),
  );

  function sentence() {
    if (!roof()) return `${devices[device.value].title} has no ${dtype.value} products.`;
    const [flop, moved, intensity, computing, moving, planned] = product();
    const bound = computing > moving ? "computing" : "memory";
    return `${number(flop / 1e9)} GFLOP over ${number(moved / 1e6)} MB are ${number(intensity)} FLOP per byte; the ridge is at `
      + `${number(roof().ridge)}. Computing alone takes ${number(computing)} µs, moving alone ${number(moving)} µs: bound by ${bound}.`
      + (planned === null ? "" : ` The planner says ${number(planned)} µs, with its launch and its tiles.`);
  }
});
