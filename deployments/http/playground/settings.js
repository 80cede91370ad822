// A pane's settings as a form; what the model cannot do is not offered.

import { el, fill } from "./dom.js";

const STRATEGIES = { unified: "unified: both lists", retrieval: "retrieval: nearest items", generative: "generative: the decoder's" };
const CACHE = { use: "use a kept answer", refresh: "refresh it", bypass: "bypass it" };
const LAST_STAGE = { "": "as trained", ranker: "the ranker", blend: "no ranker" };

export function showSettings(form, pane, settings, options, onChange) {
  const [usual, ...others] = options.strategies;
  const strategies = Object.fromEntries([["", `default (${usual})`], ...[usual, ...others].map((name) => [name, STRATEGIES[name]])]);
  const put = (name, value) => {
    settings[name] = value;
    onChange(pane);
  };
  fill(
    form,
    select(pane, "strategy", "Strategy", strategies, settings, put),
    options.ranker ? select(pane, "rank", "Last stage", LAST_STAGE, settings, put) : null,
    labelled(pane, "k", "Items", number(pane, settings, options.max_k, put)),
    slider(pane, "diversity", "Diversity", settings, put),
    slider(pane, "freshness", "Freshness", settings, put),
    select(pane, "cache", "Cache", CACHE, settings, put),
    unseen(pane, settings, put),
  );
  form.onsubmit = (event) => event.preventDefault();
}

const labelled = (pane, name, text, input) => el("div", {}, el("label", { for: `${name}-${pane}` }, text), input);

function select(pane, name, text, choices, settings, put) {
  const entries = Object.entries(choices).map(([value, shown]) => el("option", { value, selected: settings[name] === value }, shown));
  return labelled(pane, name, text, el("select", { id: `${name}-${pane}`, onchange: (event) => put(name, event.target.value) }, entries));
}

function number(pane, settings, most, put) {
  const onchange = ({ target }) => {
    target.value = Math.min(most, Math.max(1, Math.round(target.valueAsNumber) || 10));
    put("k", target.valueAsNumber);
  };
  return el("input", { id: `k-${pane}`, type: "number", min: 1, max: most, value: settings.k, onchange });
}

function slider(pane, name, text, settings, put) {
  const id = `${name}-${pane}`;
  const shown = el("output", { for: id }, ` ${settings[name]}`);
  const onchange = ({ target }) => put(name, target.valueAsNumber);
  const oninput = ({ target }) => (shown.textContent = ` ${target.value}`);
  const input = el("input", { id, type: "range", min: 0, max: 1, step: 0.1, value: settings[name], onchange, oninput });
  return el("div", {}, el("label", { for: id }, text, shown), input);
}

function unseen(pane, settings, put) {
  const onchange = ({ target }) => put("exclude_seen", target.checked);
  return el("label", { class: "switch" }, el("input", { id: `exclude_seen-${pane}`, type: "checkbox", checked: settings.exclude_seen, onchange }), "Only unseen");
}
