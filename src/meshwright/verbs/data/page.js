"use strict";
const panel = document.getElementById("said");
const rows = [...document.querySelectorAll(".row")];
const quoted = (text) => JSON.stringify(text);
const number = (value) => value.toLocaleString("en-US");
let kept = null;

function fate(row, place) {
  if (row.mark[place] === "padding") return "padding";
  if (row.mark[place] === "trained") return "trained: the token before it predicts it";
  if (row.mark[place] === "masked") return "read, not trained";
  return "";
}

function follows(row, place) {
  const target = row.target[place];
  if (target < 0) return "what follows is not predicted";
  const text = place + 1 < row.id.length && row.id[place + 1] === target ? ` ${quoted(row.text[place + 1])}` : "";
  return `predicts token ${number(target)}${text}`;
}

function part(name, text) {
  const found = document.createElement(name);
  found.textContent = text;
  return found;
}

function tell(span) {
  const row = ROWS[rows.indexOf(span.closest(".row"))];
  const place = Number(span.dataset.p);
  const role = row.roles[row.role[place]];
  const where = `place ${number(place)} of row ${number(row.row)}, ${row.names[row.document[place]]}, ` +
    `position ${number(row.position[place])}`;
  const lines = [role && `said by ${role}`, fate(row, place), follows(row, place)].filter(Boolean);
  panel.replaceChildren(part("b", `token ${number(row.id[place])} `), part("code", quoted(row.text[place])),
    part("div", where), part("div", lines.join("; ")));
}

function choose(span) {
  if (kept) kept.classList.remove("here");
  kept = span;
  span.classList.add("here");
  tell(span);
}

for (const row of rows) {
  const spans = [...row.querySelectorAll(".k")];
  row.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".k");
    if (span) tell(span);
  });
  row.addEventListener("pointerleave", () => { if (kept) tell(kept); });
  row.addEventListener("click", (event) => {
    const span = event.target.closest(".k");
    if (span) choose(span);
  });
  row.addEventListener("keydown", (event) => {
    const at = kept && row.contains(kept) ? spans.indexOf(kept) : -1;
    const next = { ArrowRight: at + 1, ArrowDown: at + 10, ArrowLeft: at - 1, ArrowUp: at - 10, Home: 0,
      End: spans.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(spans[Math.max(0, Math.min(spans.length - 1, next))]);
    kept.scrollIntoView({ block: "nearest" });
  });
}
