// The cluster as it is now: asked every two seconds, while somebody can see it and may. Rows are kept, so that a switch keeps the focus.

import * as api from "./api.js";
import { byId, el, refuse, say } from "./dom.js";

const EVERY_MS = 2000;
const rows = new Map();

// `onSwitched` is called after an engine was switched; `onProblem` with what went wrong then. Returns what looks at once, with another key.
export function watchCluster({ onSwitched, onProblem }) {
  let inView = false;
  let may = true;
  let timer = 0;
  let asked = 0;

  const cluster = async () => {
    if (inView && may) may = await showCluster(onSwitched, onProblem);
  };
  const visible = () => document.visibilityState === "visible";
  const look = async () => {
    clearTimeout(timer);
    const mine = ++asked;
    if (!visible()) return;
    await Promise.all([showReadiness(), cluster()]);
    if (mine === asked) timer = setTimeout(look, EVERY_MS);
  };

  const anew = () => {
    may = true;
    look();
  };

  document.addEventListener("visibilitychange", anew);
  new IntersectionObserver(([entry]) => {
    inView = entry.isIntersecting;
    if (inView) anew();
  }).observe(byId("cluster-panel"));
  return anew;
}

async function showReadiness() {
  const [ready, text] = await api.readiness().then(
    (answer) => [answer.ready, `${answer.ready ? "ready" : "not ready"} · ${answer.model_version}`],
    () => [false, "the service does not answer"],
  );
  byId("readiness").firstElementChild.className = `dot ${ready ? "good" : "bad"}`;
  say(byId("readiness-text"), text);
}

// Whether the key may operate: one that may not is not asked with again.
async function showCluster(onSwitched, onProblem) {
  const key = api.apiKey();
  try {
    const [backends, models, cache, gateway] = await Promise.all([api.backends(), api.models(), api.cache(), api.gateway()]);
    if (byId("cluster-panel").matches(":active")) return true; // a button that moves while it is pressed loses its click
    showFigures(figures(backends, models, cache, gateway));
    showStages(backends.stages, onSwitched, onProblem);
    say(byId("cluster-age"), "live, every two seconds");
    refuse(byId("cluster-panel"), "");
  } catch (error) {
    if (key !== api.apiKey()) return true;
    say(byId("cluster-age"), error.message);
    if (error.refused) refuse(byId("cluster-panel"), api.told(error));
    return !error.refused;
  }
  return true;
}

// Name -> value and what it is of.
export function figures({ stages }, models, cache, gateway) {
  const engines = stages.flatMap((stage) => stage.backends);
  const open = engines.filter((engine) => engine.breakers.open).length;
  const served = cache.tiers.reduce((sum, tier) => sum + tier.hits, 0);
  const rate = hitRate(cache.tiers[0]);
  return {
    ...Object.fromEntries(Object.entries(models.replicas).map(([kind, count]) => [`${kind} replicas`, [count, ""]])),
    Queue: [gateway.waiting, `${gateway.running} of ${gateway.places} places taken`],
    "Turned away": [Object.values(gateway.refused).reduce((sum, count) => sum + count, 0), "at the door"],
    "Hit rate": [rate == null ? "–" : `${Math.round(100 * rate)} %`, `${served} kept answers given`],
    "Open breakers": [open, `of ${engines.length} engines`],
  };
}

// Lately or, while little has been asked, since the start.
function hitRate(tier) {
  const asked = tier ? tier.hits + tier.misses : 0;
  return tier?.recent_hit_rate ?? (asked ? tier.hits / asked : null);
}

function showFigures(shown) {
  const place = byId("figures");
  for (const [name, [value, note]] of Object.entries(shown)) {
    let box = [...place.children].find((one) => one.dataset.name === name);
    if (!box) place.append((box = el("div", { "data-name": name }, el("dt", {}, name), el("dd", {}, el("span"), " ", el("small")))));
    say(box.querySelector("span"), String(value));
    say(box.querySelector("small"), note);
  }
  [...place.children].filter((box) => !(box.dataset.name in shown)).forEach((box) => box.remove());
}

// A stage that no replica reports is there no more.
function showStages(stages, onSwitched, onProblem) {
  stages.forEach((stage) => showStage(stage, onSwitched, onProblem));
  const reported = new Set(stages.map(idOf));
  for (const body of document.querySelectorAll("#engines tbody")) if (!reported.has(body.id)) body.parentElement.remove();
}

function showStage(stage, onSwitched, onProblem) {
  const body = table(stage);
  const ordered = [...stage.backends].sort((one, other) => (one.rank ?? Infinity) - (other.rank ?? Infinity));
  for (const engine of ordered) {
    const key = `${stage.stage}/${engine.name}`;
    if (!rows.has(key)) rows.set(key, row(stage.stage, engine.name, onSwitched, onProblem));
    update(rows.get(key), engine);
  }
  const wanted = ordered.map((engine) => rows.get(`${stage.stage}/${engine.name}`).line);
  if (body.children.length !== wanted.length || wanted.some((line, at) => body.children[at] !== line)) body.replaceChildren(...wanted);
}

const idOf = (stage) => `engines-${stage.stage}`;

function table(stage) {
  const id = idOf(stage);
  if (!byId(id)) {
    const heads = ["Asked", "Engine", "Order", "Breaker", "Calls", "p50", "p95", "per s", "Why not"];
    const head = el("thead", {}, el("tr", {}, heads.map((name) => el("th", { scope: "col" }, name))));
    byId("engines").append(el("table", {}, el("caption", {}, stage.stage, " ", el("small")), head, el("tbody", { id })));
  }
  const body = byId(id);
  say(body.parentElement.querySelector("caption small"), `${stage.replicas} replicas · ${stage.explanations.join(" | ")}`);
  return body;
}

function row(stage, name, onSwitched, onProblem) {
  const toggle = el("input", { type: "checkbox", "aria-label": `Ask ${name} in the stage ${stage}` });
  const first = el("button", { type: "button", class: "plain", "aria-label": `Ask ${name} first in the stage ${stage}` }, "ask first");
  const put = async (control, to, undo) => {
    control.disabled = true;
    try {
      await api.switchEngine(stage, name, to);
      onSwitched(stage, name, to);
    } catch (error) {
      undo();
      onProblem(error);
    } finally {
      control.disabled = false;
      if ([document.body, control].includes(document.activeElement)) control.focus();
    }
  };
  toggle.addEventListener("change", () => put(toggle, toggle.checked ? "enable" : "disable", () => (toggle.checked = !toggle.checked)));
  first.addEventListener("click", () => put(first, "first", () => {}));
  const place = el("span", { class: "place" });
  const cells = Object.fromEntries(["breaker", "calls", "p50", "p95", "throughput", "reason"].map((cell) => [cell, el("td", { class: cell })]));
  const line = el("tr", { "data-engine": `${stage}/${name}` }, el("td", {}, toggle), el("th", { scope: "row" }, name), el("td", {}, place, " ", first), Object.values(cells));
  return { line, toggle, first, place, cells };
}

function update({ toggle, first, place, cells }, engine) {
  if (!toggle.disabled) toggle.checked = engine.enabled;
  say(place, engine.rank == null ? "–" : `${engine.rank + 1}.`);
  first.hidden = engine.rank === 0 && first !== document.activeElement;
  say(cells.breaker, Object.entries(engine.breakers).map(([state, count]) => `${state} ${count}`).join(", ") || "–");
  say(cells.calls, engine.failures ? `${engine.calls} (${engine.failures} broke)` : String(engine.calls));
  say(cells.p50, inMs(engine.p50_ms));
  say(cells.p95, inMs(engine.p95_ms));
  say(cells.throughput, engine.throughput_per_s.toFixed(1));
  say(cells.reason, [...engine.reasons, ...engine.last_errors].join("; "));
}

const inMs = (value) => (value == null ? "–" : `${value.toFixed(1)} ms`);
