// What the movable figures of the Learn pages share: controls, drawing, and the numbers that Python has computed.
//
// A figure calls figure("name", (data, view) => ...) once. It adds controls to the view, then view.draw(function).
// The function runs at the start, after each change of a control, and when the width of the page changes.
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  const fill = (element, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== undefined && child !== null));
    return element;
  };
  const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  // Three significant digits, or all of a whole number, with commas between thousands; the unit follows.
  const number = (value, unit = "") => {
    const digits = Math.abs(value) >= 100 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: 3};
    const written = value.toLocaleString("en", digits);
    return unit ? `${written} ${unit}` : written;
  };
  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (value >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
    return number(value, units[power]);
  };
  const colour = (index) => `var(--c${(index % 6) + 1})`;

  class View {
    constructor(element, title) {
      this.controls = html("div", {class: "controls"});
      this.stage = html("div", {class: "stage"});
      this.told = html("p", {class: "told", "aria-live": "polite"});
      element.setAttribute("role", "group");
      element.setAttribute("aria-label", title);
      element.append(html("h4", {}, title), this.controls, this.stage, this.told);
      this.element = element;
      this.redraw = () => {};
    }

    // Pixels that a drawing may be wide.
    get width() { return Math.max(240, Math.floor(this.stage.getBoundingClientRect().width)); }

    // Whether a drawing may write the text on one line.
    fits(text) {
      const ruler = document.createElement("canvas").getContext("2d");
      const root = parseFloat(getComputedStyle(document.documentElement).fontSize);
      ruler.font = `${0.62 * root}px ${getComputedStyle(this.element).fontFamily}`;
      return ruler.measureText(text).width < this.width;
    }

    // A control has `value`, and `set(value)`, which draws anew. A slider also has `enable(whether)`.
    add(label, input, {wide = false} = {}) {
      this.controls.append(html("label", {class: wide ? "control wide" : "control"}, label, input));
    }

    slider({label, values, value = values[0], show = String, wide = false}) {
      const input = html("input", {type: "range", min: 0, max: values.length - 1, step: 1});
      const output = html("output");
      const control = {
        value,
        set: (chosen) => {
          control.value = chosen;
          input.value = values.indexOf(chosen);
          input.setAttribute("aria-valuetext", show(chosen));
          output.textContent = show(chosen);
          this.redraw();
        },
        enable: (whether) => { input.disabled = !whether; },
      };
      input.addEventListener("input", () => control.set(values[Number(input.value)]));
      this.add(html("span", {}, `${label}: `, output), input, {wide});
      control.set(value);
      return control;
    }

    select({label, values, value = values[0], show = String}) {
      const options = values.map((each, index) => html("option", {value: index}, show(each)));
      const input = html("select", {}, options);
      const control = {
        value,
        set: (chosen) => { control.value = chosen; input.value = values.indexOf(chosen); this.redraw(); },
      };
      input.addEventListener("change", () => control.set(values[Number(input.value)]));
      this.add(html("span", {}, label), input);
      control.set(value);
      return control;
    }

    text({label, value, wide = true}) {
      const input = html("input", {type: "text", spellcheck: "false", autocomplete: "off"});
      const control = {value, set: (chosen) => { control.value = chosen; input.value = chosen; this.redraw(); }};
      input.addEventListener("input", () => { control.value = input.value; this.redraw(); });
      this.add(html("span", {}, label), input, {wide});
      control.set(value);
      return control;
    }

    // Steps 0 to count() with buttons to go back, on, and to play. `count` may depend on other controls.
    steps({label, count, value = 0, milliseconds = 900}) {
      const input = html("input", {type: "range", min: 0, step: 1});
      const output = html("output");
      const play = html("button", {type: "button"}, "Play");
      let timer = null;
      const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
      const control = {
        value,
        set: (step) => {
          control.value = Math.max(0, Math.min(step, count()));
          this.redraw();
        },
        refresh: () => {
          input.max = count();
          control.value = Math.min(control.value, count());
          input.value = control.value;
          output.textContent = `${control.value} of ${count()}`;
          input.setAttribute("aria-valuetext", output.textContent);
        },
      };
      const go = (step) => { stop(); control.set(step); };
      input.addEventListener("input", () => go(Number(input.value)));
      play.addEventListener("click", () => {
        if (timer) { stop(); return; }
        if (control.value >= count()) control.set(0);
        play.textContent = "Pause";
        timer = setInterval(() => {
          control.set(control.value + 1);
          if (control.value >= count()) stop();
        }, milliseconds);
      });
      const button = (text, name, by) => html(
        "button", {type: "button", "aria-label": name, onclick: () => go(control.value + by)}, text,
      );
      this.controls.append(html(
        "div", {class: "control wide"}, html("label", {}, html("span", {}, `${label}: `, output), input),
        html("div", {class: "row"}, button("◀", "one step back", -1), play, button("▶", "one step on", 1)),
      ));
      (this.refreshed ??= []).push(control);
      return control;
    }

    // `paint(width)` returns what the stage shows. `sentence()` returns the line below it.
    draw(paint, sentence = () => "") {
      this.redraw = () => {
        for (const control of this.refreshed ?? []) control.refresh();
        this.stage.replaceChildren(...[paint(this.width)].flat());
        this.told.replaceChildren(...[sentence()].flat());
      };
      this.redraw();
      let width = this.width;
      new ResizeObserver(() => {
        // In the next frame: a drawing that changes its own width here would be reported as a loop.
        if (this.width !== width) { width = this.width; requestAnimationFrame(() => this.redraw()); }
      }).observe(this.element);
    }

    legend(names, colours = names.map((_, index) => colour(index))) {
      return html("div", {class: "legend"}, names.map((name, index) => html(
        "span", {}, html("i", {style: `background: ${colours[index]}`}), name,
      )));
    }

    // Horizontal bars. rows: [{name, parts: [number, ...], note}]; limit: a line, such as a device's memory.
    bars(rows, {names, limit, limitName = "", show = number, width = this.width}) {
      const total = (row) => row.parts.reduce((sum, part) => sum + part, 0);
      const most = Math.max(...rows.map(total), limit ?? 0) || 1;
      // Where one is too long for a line, every row has its note on a second line.
      const second = rows.every((row) => this.fits(`${row.name}: ${row.note ?? show(total(row))}`)) ? 0 : 13;
      const high = 34 + second, across = (value) => (value / most) * (width - 8);
      const top = limit === undefined ? 0 : 16;
      const drawing = svg("svg", {width, height: rows.length * high + top + 4, role: "img", "aria-label":
        rows.map((row) => `${row.name}: ${show(total(row))}`).join("; ")});
      rows.forEach((row, line) => {
        let left = 0;
        const y = top + line * high;
        const note = row.note ?? show(total(row));
        drawing.append(svg("text", {x: 0, y: y + 10}, second ? `${row.name}:` : `${row.name}: ${note}`));
        if (second) drawing.append(svg("text", {x: 0, y: y + 10 + second}, note));
        row.parts.forEach((part, index) => {
          drawing.append(svg("rect", {
            x: left, y: y + 15 + second, width: Math.max(0, across(part)), height: 14, style: `fill: ${colour(index)}`,
          }, svg("title", {}, `${names[index]}: ${show(part)}`)));
          left += across(part);
        });
      });
      if (limit !== undefined) {
        const x = across(limit), end = x > width / 2;
        drawing.append(
          svg("line", {x1: x, x2: x, y1: 2, y2: rows.length * high + top, style: "stroke: var(--ink)", "stroke-dasharray": "3 3"}),
          svg("text", {x: end ? x - 4 : x + 4, y: 10, class: "faint", "text-anchor": end ? "end" : "start"},
            `${limitName} ${show(limit)}`),
        );
      }
      return [drawing, this.legend(names)];
    }

    table(head, rows, chosen = -1) {
      // With a class, the site's own style for tables and its frame around them leave it alone.
      return html(
        "table", {class: "numbers"},
        html("thead", {}, html("tr", {}, head.map((cell) => html("th", {scope: "col"}, cell)))),
        html("tbody", {}, rows.map((row, index) => html(
          "tr", index === chosen ? {class: "chosen"} : {}, row.map((cell) => html("td", {}, cell)),
        ))),
      );
    }
  }

  window.figure = (name, build) => {
    for (const element of document.querySelectorAll(`.movable[data-figure="${name}"]`)) {
      const data = JSON.parse(element.querySelector("script").textContent);
      build(data, new View(element, element.dataset.title), {html, svg, number, bytes, colour});
    }
  };
})();
