// Two settings side by side.

import { byId, el } from "./dom.js";
import { compared, milliseconds } from "./state.js";

export function showComparing(comparing) {
  byId("pane-b").hidden = byId("comparison").hidden = !comparing;
  if (!comparing) showComparison({});
}

export function showComparison({ a, b }) {
  byId("comparison").textContent = "";
  document.querySelectorAll(".tag.only").forEach((tag) => tag.remove());
  if (!a || !b) return;
  const { both, of, slower_ms: slower } = compared(a, b);
  const pace = Math.abs(slower) < 0.05 ? "both took as long" : `B took ${milliseconds(Math.abs(slower))} ${slower > 0 ? "longer" : "less"} in its stages`;
  byId("comparison").textContent = `${both} of ${of} items are in both lists; ${pace}.`;
  mark("items-a", b, "only A");
  mark("items-b", a, "only B");
}

// Tags the rows of items that the other answer has not.
function mark(listId, other, text) {
  const there = new Set(other.items.map((item) => item.item_id));
  for (const row of byId(listId).querySelectorAll("[data-item]")) {
    if (there.has(row.dataset.item)) continue;
    row.querySelector(".title").after(" ", el("span", { class: "tag only" }, text));
  }
}
