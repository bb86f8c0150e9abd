// What the model answered while it was trained: the prompts of one step, the last one first shown.

function drawSamples() {
  const found = chosen().samples;
  element("samples").hidden = !found.length;
  if (!found.length) return;
  const steps = found.map((one) => one.step), at = steps.includes(state.sample) ? steps.indexOf(state.sample) : found.length - 1;
  element("sample-step").innerHTML = steps.map((step, n) =>
    `<option value="${step}"${n === at ? " selected" : ""}>step ${step.toLocaleString("en")}</option>`).join("");
  element("answers").innerHTML = found[at].items.map(({prompt, text, held_out}) =>
    `<div class="answer"><pre><span class="asked">${escaped(prompt)}</span>${escaped(text) || "<i>nothing</i>"}</pre>` +
    (held_out ? `<details><summary>held out</summary><pre>${escaped(held_out)}</pre></details>` : "") + "</div>").join("") +
    (found[at].problem ? `<p class="none">${escaped(found[at].problem)}</p>` : "");
}
