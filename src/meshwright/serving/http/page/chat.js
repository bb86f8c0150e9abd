"use strict";
// A conversation. What the model says goes into the page as text, never as HTML.
const at = (id) => document.getElementById(id);
let turns = [], model = null, running = null;

function headers() {
  const key = at("key").value.trim();
  return key ? {"Content-Type": "application/json", "Authorization": "Bearer " + key} : {"Content-Type": "application/json"};
}

function notice(text, bad = false) {
  at("notice").textContent = text;
  at("notice").classList.toggle("bad", bad);
}

function shown(role, text) {
  const turn = document.createElement("div"), name = document.createElement("b"), said = document.createElement("span");
  turn.className = "turn " + role;
  name.textContent = role === "user" ? "You" : "Model";
  said.textContent = text;
  turn.append(name, said);
  at("talk").append(turn);
  turn.scrollIntoView({block: "end"});
  return said;
}

async function explained(answer) {
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
      at("model").textContent = "no model yet";
      if (answer.status === 401) {
        settings(true);
        notice("This server asks for an API key.", true);
      } else notice(await explained(answer), true);
      return;
    }
    model = (await answer.json()).data[0].id;
    at("model").textContent = model;
    notice("");
  } catch (error) {
    notice("The server cannot be reached.", true);
  }
}

function settings(open) {
  at("settings").hidden = !open;
  at("settings-open").setAttribute("aria-expanded", String(open));
}

// Events of a stream: each is "data: JSON", and a blank line ends it.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function asked() {
  const system = at("system").value.trim();
  return JSON.stringify({
    model, messages: system ? [{role: "system", content: system}, ...turns] : turns, stream: true,
    temperature: Number(at("temperature").value), max_completion_tokens: Number(at("tokens").value),
    stream_options: {include_usage: true},
  });
}

async function send(text) {
  if (model === null) await connect();
  if (model === null) return;
  const mine = turns;
  mine.push({role: "user", content: text});
  const question = shown("user", text);
  at("said").value = "";
  busy(true);
  const said = shown("assistant", ""), began = performance.now();
  let made = "", first = 0, reason = "", usage = null;
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: asked(), signal: running.signal,
    });
    if (!answer.ok) throw new Error(await explained(answer));
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      if (!event.choices.length) continue;
      first = first || performance.now();
      made += event.choices[0].delta.content || "";
      reason = event.choices[0].finish_reason || reason;
      said.textContent = made;
      said.parentElement.scrollIntoView({block: "end"});
    }
    notice(summary(usage, reason, first - began, performance.now() - began));
  } catch (error) {
    notice(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  }
  if (made) mine.push({role: "assistant", content: made});
  else {
    mine.pop();
    said.parentElement.remove();
    question.parentElement.remove();
    if (mine === turns) at("said").value = at("said").value || text;
  }
  busy(false);
}

function summary(usage, reason, first, whole) {
  if (!usage) return "";
  const tokens = usage.completion_tokens + " tokens in " + (whole / 1000).toFixed(1) + " s";
  const begun = ", the first after " + (first / 1000).toFixed(2) + " s";
  return tokens + begun + (reason === "length" ? "; cut off at the most tokens" : "");
}

function busy(now) {
  running = now ? new AbortController() : null;
  at("send").hidden = now;
  at("stop").hidden = !now;
  if (!now) at("said").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("said").value.trim();
  if (text && !running) send(text);
});
at("said").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (running) running.abort();
  else if (!at("settings").hidden) {
    settings(false);
    at("settings-open").focus();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  at("talk").replaceChildren();
  notice("");
});
at("settings-open").addEventListener("click", () => settings(at("settings").hidden));
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("key").addEventListener("change", connect);
connect();
