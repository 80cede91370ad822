// Whose history: a stored user, an example, or one composed by searching titles.

import * as api from "./api.js";
import { byId, el } from "./dom.js";

const PAUSE_MS = 150;

export function showExamples({ users, histories }, { onUser, onCompose }) {
  byId("examples").replaceChildren(
    ...users.map((user) => chip(`${user.user_id} · ${user.events} events`, () => onUser(user.user_id))),
    ...histories.map((one) => chip(one.name, () => onCompose(one.items))),
  );
}

export function showActions(actions) {
  byId("action").replaceChildren(...actions.map((action) => el("option", { value: action }, action === "rating" ? "rating of 5" : action)));
}

export function showHistory({ user, history }, onRemove) {
  const stored = user !== null;
  byId("history-title").textContent = stored ? `History of ${user}` : "Composed history";
  byId("title-hint").textContent = stored ? "Stored as an event of this user." : "Stays in this page; nothing is stored.";
  const rows = (history ?? []).map((past, place) => ({ past, place })).reverse();
  byId("history").replaceChildren(...rows.map(({ past, place }) => row(past, stored ? null : () => onRemove(place))));
  if (history?.length === 0) byId("history").append(el("li", { class: "quiet" }, "Empty: what is popular will be recommended."));
}

// The combobox of WAI-ARIA's authoring practices: the focus stays in the field, arrows move through the list. Returns what closes the list.
export function titleFinder(onPick, onProblem) {
  const field = byId("title");
  const list = byId("title-options");
  let found = [];
  let active = -1;
  let timer = 0;
  let asking = null;

  // What is found is of another text: nothing of it is picked by a key.
  const outdate = () => {
    clearTimeout(timer);
    asking?.abort();
    found = [];
    active = -1;
    [...list.children].forEach((option) => option.setAttribute("aria-selected", "false"));
    field.removeAttribute("aria-activedescendant");
  };
  const close = () => {
    outdate();
    list.hidden = true;
    field.setAttribute("aria-expanded", "false");
  };
  const pick = (item) => {
    field.value = "";
    close();
    onPick(item);
  };
  const activate = (place) => {
    active = found.length ? (place + found.length) % found.length : -1;
    [...list.children].forEach((option, at) => option.setAttribute("aria-selected", String(at === active)));
    if (active < 0) return;
    field.setAttribute("aria-activedescendant", list.children[active].id);
    list.children[active].scrollIntoView({ block: "nearest" });
  };
  const show = (items) => {
    found = items;
    list.replaceChildren(...items.map((item, place) => option(item, place, () => pick(item))));
    if (!items.length) list.append(el("li", { role: "option", "aria-disabled": "true", class: "quiet" }, "No title says that."));
    list.hidden = false;
    field.setAttribute("aria-expanded", "true");
    activate(0);
  };
  const search = async (query) => {
    asking?.abort();
    const mine = (asking = new AbortController());
    try {
      const { items } = await api.search(query, mine.signal);
      if (!mine.signal.aborted) show(items);
    } catch (error) {
      if (error.name !== "AbortError") onProblem(error);
    }
  };

  field.addEventListener("input", () => {
    const query = field.value.trim();
    if (!query) return close();
    outdate();
    timer = setTimeout(search, PAUSE_MS, query);
  });
  field.addEventListener("blur", close);
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || event.keyCode === 229) return; // of an input method, whose text it confirms; 229 is Safari's word for that
    const steps = { ArrowDown: active + 1, ArrowUp: active - 1 };
    if (event.key in steps && found.length) activate(steps[event.key]);
    else if (event.key === "Enter" && active >= 0) pick(found[active]);
    else if (event.key === "Escape") close();
    else return;
    event.preventDefault();
  });
  return close;
}

const chip = (text, onclick) => el("button", { type: "button", onclick }, text);

function row(past, onRemove) {
  const name = past.title ?? `${past.item_id} (not in the catalogue)`;
  const what = past.value == null ? past.action : `${past.action} ${past.value}`;
  const when = new Date(past.timestamp * 1000).toLocaleDateString();
  return el(
    "li",
    {},
    el("span", {}, name, el("small", {}, `${what} · ${when}`)),
    onRemove && el("button", { type: "button", class: "plain", "aria-label": `Remove ${name}`, onclick: onRemove }, "✕"),
  );
}

function option(item, place, onPick) {
  // before the field loses the focus, which closes the list
  const onmousedown = (event) => {
    event.preventDefault();
    onPick();
  };
  const about = Object.values(item.attributes).join(" · ");
  return el("li", { role: "option", id: `title-option-${place}`, "aria-selected": "false", onmousedown }, item.title, " ", el("small", {}, about));
}
