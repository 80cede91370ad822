// What the page knows, and the request that follows from it. No DOM here.
//
//   user     a stored user's id, or null for a composed history
//   history  [{item_id, title, action, value, timestamp}], oldest first, or null while a stored user's is not read

export const NOBODY = "playground";
export const DEFAULTS = { strategy: "", rank: "", k: 10, diversity: 0, freshness: 0, cache: "use", exclude_seen: true };

export function createState() {
  return {
    user: null,
    history: [],
    options: null,
    comparing: false,
    settings: { a: { ...DEFAULTS }, b: { ...DEFAULTS } },
    answers: { a: null, b: null },
  };
}

export function requestOf({ user, history }, settings) {
  const { strategy, rank, ...rest } = settings;
  const request = { user_id: user ?? NOBODY, explain: true, ...rest };
  if (strategy) request.strategy = strategy;
  if (rank) request.rank = rank === "ranker";
  if (user !== null) return request;
  request.behaviours = history.map(({ item_id, action, value, timestamp }) => ({ item_id, action, value, timestamp }));
  // by the clock that dated the behaviours: the service's own may be behind it
  if (history.length) request.request_time = Math.max(...history.map((past) => past.timestamp)) + 60;
  return request;
}

// A rating without a value tells nothing.
export function behaviourOf(item, action, now = Date.now()) {
  return { item_id: item.item_id, title: item.title, action, value: action === "rating" ? 5 : null, timestamp: Math.floor(now / 1000) };
}

// The last `most` of the items, an hour apart, the last of them an hour ago.
export function composed(items, most, now = Date.now()) {
  const last = items.slice(Math.max(0, items.length - most));
  return last.map((item, place) => behaviourOf(item, "view", now - (last.length - place) * 3_600_000));
}

// What became of a list: item id -> "new" or by how many places it rose, and the titles that are gone. Null where there was none before.
export function changes(before, after) {
  if (!before) return null;
  const places = new Map(before.items.map((item, place) => [item.item_id, place]));
  const now = new Set(after.items.map((item) => item.item_id));
  const marks = new Map(after.items.map(({ item_id }, place) => [item_id, places.has(item_id) ? places.get(item_id) - place : "new"]));
  return { marks, gone: before.items.filter((item) => !now.has(item.item_id)).map((item) => item.title) };
}

export function compared(a, b) {
  const ids = new Set(a.items.map((item) => item.item_id));
  const both = b.items.filter((item) => ids.has(item.item_id)).length;
  return { both, of: Math.max(a.items.length, b.items.length), slower_ms: duration(b) - duration(a) };
}

export const duration = (answer) => answer.stages.reduce((sum, stage) => sum + stage.duration_ms, 0);
export const milliseconds = (value) => `${value < 10 ? value.toFixed(2) : value.toFixed(0)} ms`;
