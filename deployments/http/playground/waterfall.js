// The stages of an answer, one after the other, by the engines that served them; under each, who was passed over and why.

import { el } from "./dom.js";
import { milliseconds } from "./state.js";

// Where each stage's bar begins and how long it is, in percent of all of them.
export function spans(stages) {
  const whole = stages.reduce((sum, stage) => sum + stage.duration_ms, 0) || 1;
  let before = 0;
  return stages.map(({ duration_ms }) => {
    const span = { left: (100 * before) / whole, width: (100 * duration_ms) / whole };
    before += duration_ms;
    return span;
  });
}

export function showWaterfall(place, { stages }) {
  const bars = spans(stages);
  place.replaceChildren(el("div", { role: "list" }, stages.map((stage, at) => row(stage, bars[at]))));
}

function row(stage, { left, width }) {
  const broke = stage.backend === "none" || stage.fallback_from.some((skipped) => skipped.failed);
  const bar = el("div", { class: broke ? "bar fallen" : "bar" });
  bar.style.left = `${Math.min(left, 99)}%`;
  bar.style.width = `${width}%`;
  const skipped = stage.fallback_from.map((one) => el("li", {}, `${one.failed ? "broke" : "not"} ${one.backend}: ${one.reason}`));
  return el(
    "div",
    { class: "stage", role: "listitem", "data-stage": stage.stage, "data-backend": stage.backend },
    el("span", {}, stage.stage),
    el("div", { class: "track", "aria-hidden": "true" }, bar),
    el("span", { class: "time" }, milliseconds(stage.duration_ms)),
    el("div", { class: "who" }, `by ${stage.backend}`, skipped.length ? el("ul", {}, skipped) : null),
  );
}
