"use strict";
// A conversation. What the model says goes into the page as text, never as HTML.
const byId = (id) => document.getElementById(id);
let turns = [], model = null, running = null;

function headers() {
  const key = byId("key").value.trim();
  return key ? {"Content-Type": "application/json", "Authorization": "Bearer " + key} : {"Content-Type": "application/json"};
}

function notice(text, bad = false) {
  byId("notice").textContent = text;
  byId("notice").classList.toggle("bad", bad);
}

function addTurn(role, text) {
  const turn = document.createElement("div"), name = document.createElement("b"), words = document.createElement("span");
  turn.className = "turn " + role;
  name.textContent = role === "user" ? "You" : "Model";
  words.textContent = text;
  turn.append(name, words);
  byId("talk").append(turn);
  turn.scrollIntoView({block: "end"});
  return words;
}

async function errorMessage(answer) {
  try {
    return (await answer.json()).error.message;
  } catch (error) {
    return "the server answered with " + answer.status;
  }
}

async function connect() {
  model = null;
  try {
    const answer = await fetch("v1/models", {headers: headers()});
    if (!answer.ok) {
      byId("model").textContent = "no model yet";
      if (answer.status === 401) {
        settings(true);
        notice("This server asks for an API key.", true);
      } else notice(await errorMessage(answer), true);
      return;
    }
    model = (await answer.json()).data[0].id;
    byId("model").textContent = model;
    notice("");
  } catch (error) {
    notice("The server cannot be reached.", true);
  }
}

function settings(open) {
  byId("settings").hidden = !open;
  byId("settings-open").setAttribute("aria-expanded", String(open));
}

// Events of a stream: each is "data: JSON", and a blank line ends it.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value: chunk, done} = await reader.read();
    if (done) return;
    held += chunk;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function requestBody() {
  const system = byId("system").value.trim();
  return JSON.stringify({
    model, messages: system ? [{role: "system", content: system}, ...turns] : turns, stream: true,
    temperature: Number(byId("temperature").value), max_completion_tokens: Number(byId("tokens").value),
    stream_options: {include_usage: true},
  });
}

async function send(text) {
  if (model === null) await connect();
  if (model === null) return;
  const mine = turns; // Clear replaces the list while an answer streams; that answer then ends in the old one
  mine.push({role: "user", content: text});
  const question = addTurn("user", text);
  byId("said").value = "";
  busy(true);
  const reply = addTurn("assistant", ""), began = performance.now();
  let answerText = "", first = 0, reason = "", usage = null;
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: requestBody(), signal: running.signal,
    });
    if (!answer.ok) throw new Error(await errorMessage(answer));
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      if (!event.choices.length) continue;
      first = first || performance.now();
      answerText += event.choices[0].delta.content || "";
      reason = event.choices[0].finish_reason || reason;
      reply.textContent = answerText;
      reply.parentElement.scrollIntoView({block: "end"});
    }
    notice(summary(usage, reason, first - began, performance.now() - began));
  } catch (error) {
    notice(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  }
  if (answerText) mine.push({role: "assistant", content: answerText});
  else {
    mine.pop();
    reply.parentElement.remove();
    question.parentElement.remove();
    if (mine === turns) byId("said").value = byId("said").value || text;
  }
  busy(false);
}

function summary(usage, reason, first, total) {
  if (!usage) return "";
  const tokens = usage.completion_tokens + " tokens in " + (total / 1000).toFixed(1) + " s";
  const firstWords = ", the first after " + (first / 1000).toFixed(2) + " s";
  return tokens + firstWords + (reason === "length" ? "; cut off at the most tokens" : "");
}

function busy(isBusy) {
  running = isBusy ? new AbortController() : null;
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (!isBusy) byId("said").focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("said").value.trim();
  if (text && !running) send(text);
});
byId("said").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (running) running.abort();
  else if (!byId("settings").hidden) {
    settings(false);
    byId("settings-open").focus();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  byId("talk").replaceChildren();
  notice("");
});
byId("settings-open").addEventListener("click", () => settings(byId("settings").hidden));
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("key").addEventListener("change", connect);
connect();
