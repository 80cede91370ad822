// The page: a history and settings -> recommend -> items, waterfall, comparison. Whatever changes, `run` asks anew.

import * as api from "./api.js";
import { watchCluster } from "./cluster.js";
import { showComparing, showComparison } from "./compare.js";
import { byId, refuse } from "./dom.js";
import { showActions, showExamples, showHistory, titleFinder } from "./history.js";
import { showItems, showMeta, summary } from "./results.js";
import { showSettings } from "./settings.js";
import { behaviourOf, changes, composed, createState, requestOf } from "./state.js";
import { showWaterfall } from "./waterfall.js";

const state = createState();
// What a run has to do: "history", or a pane -> whether a kept answer will not do. A pane without an answer is due.
const due = new Map([["a", false], ["b", false]]);
let running = new AbortController();
let loading = new AbortController();
// Whether the history is the visitor's choice, made with the key in use: no example takes its place then.
let chosen = false;
// The promise that the options of the key in use are there; null: they are to be asked for.
let loaded = null;

// What needs the options asks for them again where they could not be had.
const ready = () => (loaded ??= load());

// A key that may not read leaves the options empty, and the panels that need it say so.
async function load() {
  loading.abort();
  const { signal } = (loading = new AbortController());
  const readers = [byId("who-panel"), byId("results-panel")];
  try {
    state.options = await api.options(signal);
  } catch (error) {
    if (signal.aborted) throw error;
    if (error.refused) state.options = null;
    else loaded = null;
    readers.forEach((panel) => refuse(panel, error.refused ? api.told(error) : ""));
    if (error.status !== 403) throw error;
    return;
  }
  readers.forEach((panel) => refuse(panel, ""));
  showActions(state.options.actions);
  for (const pane of ["a", "b"]) {
    const settings = state.settings[pane];
    settings.k = Math.min(settings.k, state.options.max_k);
    showSettings(byId(`settings-${pane}`), pane, settings, state.options, (changed) => run({ only: changed }));
  }
  guarded(() => offer(signal));
}

async function offer(signal) {
  const examples = await api.examples(signal);
  showExamples(examples, { onUser: openUser, onCompose: compose });
  if (chosen || byId("user").value !== (state.user ?? "")) return; // another was chosen meanwhile, or is being typed
  const user = examples.users.find((one) => api.mayName(one.user_id));
  const [history] = examples.histories;
  if (user) await openUser(user.user_id);
  else await compose(history?.items ?? []);
}

function begin() {
  running.abort();
  byId("key").placeholder = api.apiKey() ? "one is in use" : "none";
  lookAnew();
  chosen = false;
  loaded = null;
  guarded(ready);
}

function wire() {
  const submitted = (id, work) =>
    byId(id).addEventListener("submit", (event) => {
      event.preventDefault();
      work();
    });
  submitted("user-form", () => byId("user").value.trim() && openUser(byId("user").value.trim()));
  submitted("key-form", () => {
    api.useKey(byId("key").value.trim());
    byId("key").value = "";
    byId("key-panel").open = false;
    begin();
  });
  window.addEventListener("hashchange", () => api.takeKey() && begin());
  byId("clear").addEventListener("click", () => compose([]));
  byId("compare").addEventListener("change", ({ target }) => {
    state.comparing = target.checked;
    showComparing(state.comparing);
    if (state.comparing) run({ only: "b" });
  });
}

const openUser = (user) => become({ user, history: null });
const compose = (items) => become({ user: null, history: composed(items, state.options?.max_behaviours ?? 0) });

async function become(who) {
  chosen = true;
  closeFinder();
  Object.assign(state, who, { answers: { a: null, b: null } });
  byId("user").value = state.user ?? "";
  showHistory(state, forget);
  showNoAnswers();
  await run();
}

// An event of a stored user is stored; a composed history only grows here. Without an action: the one that titles are added as.
async function happen(item, action) {
  chosen = true;
  const { user } = state;
  await guarded(async () => {
    await ready();
    if (state.options === null) return;
    const behaviour = behaviourOf(item, action ?? byId("action").value);
    const { title, timestamp, ...event } = behaviour;
    if (user !== null) await api.post({ user_id: user, ...event });
    else if (state.user === null) state.history = [...state.history, behaviour].slice(-state.options.max_behaviours);
    await run();
  });
}

function act(item, action) {
  byId("results-title").focus(); // the button that was pressed is about to go
  happen(item, action);
}

function forget(place) {
  chosen = true;
  state.history = state.history.filter((_, at) => at !== place);
  byId("clear").focus(); // as above
  run();
}

// `only`: the pane whose settings changed; `refresh`: kept answers tell of engines that served before.
async function run({ only, refresh = false } = {}) {
  running.abort();
  const { signal } = (running = new AbortController());
  for (const what of only ? [only] : ["history", "a", "b"]) due.set(what, refresh || due.get(what) === true);
  await guarded(async () => {
    await ready();
    if (signal.aborted || state.options === null) return;
    const errors = [];
    if (state.user !== null) await settle("history", signal, readHistory, errors);
    showHistory(state, forget);
    for (const pane of state.comparing ? ["a", "b"] : ["a"]) await settle(pane, signal, ask, errors);
    if (state.comparing) showComparison(due.has("a") || due.has("b") ? {} : state.answers);
    if (errors.length) throw errors[0];
  });
}

// Does what is due. What fails, or is given up for a later run, is due in that one.
async function settle(what, signal, work, errors) {
  if (!due.has(what)) return;
  try {
    await work(what, due.get(what), signal);
    if (!signal.aborted) due.delete(what);
  } catch (error) {
    if (signal.aborted) throw error;
    errors.push(error);
  }
}

async function readHistory(_, __, signal) {
  state.history = (await api.history(state.user, Math.min(50, state.options.max_behaviours), signal)).events;
}

// One pane after the other, so that neither waits for the other's engines.
async function ask(pane, refresh, signal) {
  const settings = state.settings[pane];
  const request = requestOf(state, refresh && settings.cache === "use" ? { ...settings, cache: "refresh" } : settings);
  const answer = await api.recommend(request, signal);
  signal.throwIfAborted();
  const change = changes(state.answers[pane], answer);
  state.answers[pane] = answer;
  showItems(byId(`items-${pane}`), answer, change, act);
  showMeta(byId(`meta-${pane}`), answer);
  showWaterfall(byId(`waterfall-${pane}`), answer);
  byId("announcement").textContent = `${state.comparing ? `${pane.toUpperCase()}: ` : ""}${summary(answer, change)}`;
}

function showNoAnswers() {
  byId("announcement").textContent = "";
  showComparison({});
  for (const part of ["items", "meta", "waterfall"]) ["a", "b"].forEach((pane) => byId(`${part}-${pane}`).replaceChildren());
}

async function guarded(work) {
  byId("problem").hidden = true;
  try {
    await work();
  } catch (error) {
    if (error.name !== "AbortError") showProblem(error);
  }
}

function showProblem(error) {
  byId("problem").textContent = api.told(error);
  byId("problem").hidden = false;
  if (error.status === 401) {
    byId("key-panel").open = true;
    byId("key").focus();
  }
}

api.takeKey();
wire();
const closeFinder = titleFinder((item) => happen(item), showProblem);
const lookAnew = watchCluster({ onSwitched: () => run({ refresh: true }), onProblem: showProblem });
begin();
