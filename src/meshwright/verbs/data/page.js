"use strict";
// The panel beside rows of tokens: the pointer shows a token, a click or an arrow key pins it. ROWS comes from Python; a
// token's text enters the page as text, since a corpus may hold markup.
const panel = document.getElementById("said");
const rows = [...document.querySelectorAll(".row")];
const quoted = (text) => JSON.stringify(text);
const number = (count) => count.toLocaleString("en-US");
let pinned = null;

function trainingWords(row, index) {
  if (row.mark[index] === "padding") return "padding";
  if (row.mark[index] === "trained") return "trained: the token before it predicts it";
  if (row.mark[index] === "masked") return "read, not trained";
  return "";
}

function targetWords(row, index) {
  const target = row.target[index];
  if (target < 0) return "what follows is not predicted";
  const text = index + 1 < row.id.length && row.id[index + 1] === target ? ` ${quoted(row.text[index + 1])}` : "";
  return `predicts token ${number(target)}${text}`;
}

function makeElement(name, text) {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}

function showToken(span) {
  const row = ROWS[rows.indexOf(span.closest(".row"))];
  const index = Number(span.dataset.p);
  const role = row.roles[row.role[index]];
  const position = `place ${number(index)} of row ${number(row.row)}, ${row.names[row.document[index]]}, ` +
    `position ${number(row.position[index])}`;
  const lines = [role && `said by ${role}`, trainingWords(row, index), targetWords(row, index)].filter(Boolean);
  panel.replaceChildren(makeElement("b", `token ${number(row.id[index])} `), makeElement("code", quoted(row.text[index])),
    makeElement("div", position), makeElement("div", lines.join("; ")));
}

// The panel goes back to the pinned token when the pointer leaves a row, so that a reading is not lost by a twitch.
function choose(span) {
  if (pinned) pinned.classList.remove("here");
  pinned = span;
  span.classList.add("here");
  showToken(span);
}

for (const row of rows) {
  const spans = [...row.querySelectorAll(".k")];
  row.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".k");
    if (span) showToken(span);
  });
  row.addEventListener("pointerleave", () => { if (pinned) showToken(pinned); });
  row.addEventListener("click", (event) => {
    const span = event.target.closest(".k");
    if (span) choose(span);
  });
  row.addEventListener("keydown", (event) => {
    const at = pinned && row.contains(pinned) ? spans.indexOf(pinned) : -1;
    const next = { ArrowRight: at + 1, ArrowDown: at + 10, ArrowLeft: at - 1, ArrowUp: at - 10, Home: 0,
      End: spans.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(spans[Math.max(0, Math.min(spans.length - 1, next))]);
    pinned.scrollIntoView({ block: "nearest" });
  });
}
