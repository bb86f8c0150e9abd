// What the model answered while it was trained: the prompts of one step, the last one first shown.

function drawSamples() {
  const samples = chosenRun().samples;
  byId("samples").hidden = !samples.length;
  if (!samples.length) return;
  const steps = samples.map((sample) => sample.step), at = steps.includes(state.sample) ? steps.indexOf(state.sample) : samples.length - 1;
  byId("sample-step").innerHTML = steps.map((step, n) =>
    `<option value="${step}"${n === at ? " selected" : ""}>step ${step.toLocaleString("en")}</option>`).join("");
  byId("answers").innerHTML = samples[at].items.map(({prompt, text, held_out}) =>
    `<div class="answer"><pre><span class="asked">${escaped(prompt)}</span>${escaped(text) || "<i>nothing</i>"}</pre>` +
    (held_out ? `<details><summary>held out</summary><pre>${escaped(held_out)}</pre></details>` : "") + "</div>").join("") +
    (samples[at].problem ? `<p class="none">${escaped(samples[at].problem)}</p>` : "");
}
