// Recommended items with their attributes, why they are there, and what to do with them.

import { el, fill } from "./dom.js";
import { duration, milliseconds } from "./state.js";

const EVENTS = [
  ["View", "view"],
  ["Like", "like"],
  ["Rate 5", "rating"],
];
const SCORES = {
  retrieval: "cosine with the user's state",
  generation: "log-probability that the decoder names it",
  blended: "both, blended",
  ranking: "the ranker's worth of showing it",
  popularity: "share of all events",
  freshness: "how new it is",
};
const TIERS = { l1: "kept in this gateway", l2: "kept in the cluster", joined: "joined another's computation", computed: "computed now" };

export function showItems(list, answer, change, onEvent) {
  const shown = answer.items.map((item) => row(item, change?.marks.get(item.item_id), onEvent));
  list.replaceChildren(...(shown.length ? shown : [el("li", { class: "quiet" }, "Nothing may be recommended with these settings.")]));
}

export function showMeta(place, answer) {
  const { cache, degraded, model_version: version, unknown_items: unknown } = answer;
  fill(
    place,
    tag(`${milliseconds(duration(answer))} in its stages`),
    cache && tag(`${TIERS[cache.tier]}${cache.stale ? ", stale" : ""}`, cache.tier === "computed" ? "" : "good"),
    tag(`model ${version}`),
    degraded && tag("degraded", "bad"),
    unknown.length > 0 && tag(`not in the catalogue: ${unknown.join(", ")}`, "bad"),
  );
}

export function summary(answer, change) {
  const count = `${answer.items.length} recommendations in ${milliseconds(duration(answer))}`;
  if (!change) return `${count}.`;
  const fresh = [...change.marks.values()].filter((mark) => mark === "new").length;
  const moved = [...change.marks.values()].filter((mark) => mark !== "new" && mark !== 0).length;
  return fresh || moved || change.gone.length ? `${count}: ${fresh} new, ${moved} moved, ${change.gone.length} gone.` : `${count}, as before.`;
}

function row(item, mark, onEvent) {
  return el(
    "li",
    { class: mark === "new" ? "new" : null, "data-item": item.item_id },
    el("span", {}, el("span", { class: "title" }, item.title), " ", moved(mark), " ", about(item)),
    el("span", { class: "score", title: `score of the stage "${item.stage}"` }, `${item.stage} ${item.score?.toPrecision(4) ?? ""}`),
    el("div", { class: "acts" }, EVENTS.map(([label, action]) => act(label, item, () => onEvent(item, action)))),
    item.explanation ? explanation(item) : null,
  );
}

function moved(mark) {
  if (mark === "new") return tag("new", "good");
  if (!mark) return null;
  return tag(mark > 0 ? `up ${mark}` : `down ${-mark}`);
}

function about(item) {
  return el("small", {}, Object.entries(item.attributes).map(([name, value]) => `${name} ${value.replaceAll("|", ", ")}`).join(" · "));
}

const act = (label, item, onclick) => el("button", { type: "button", class: "plain", "aria-label": `${label}: ${item.title}`, onclick }, label);

function explanation({ title, explanation: why }) {
  const scores = Object.entries(SCORES).filter(([name]) => why[name] != null);
  const rows = scores.map(([name, meaning]) => [name, why[name].toPrecision(4), meaning]);
  const similar = why.similar.map((one) => `${one.title} (${one.similarity.toFixed(2)})`).join(", ");
  return el(
    "details",
    {},
    el("summary", { "aria-label": `Why ${title}` }, "Why"),
    el("table", {}, rows.map(([name, value, meaning]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value), el("td", {}, meaning)))),
    similar ? el("p", {}, `Most like: ${similar}`) : null,
  );
}

const tag = (text, kind = "") => el("span", { class: `tag ${kind}` }, text);
