// The API, as everybody calls it. Addresses are relative to this file, so that a prefix in front of the service does not matter.

const ROOT = new URL("..", import.meta.url);
const KEY = "genrec-api-key";
const LOOK_MS = 10_000;

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// The key of an address that ends in `#key=...`, as `make demo` prints one, is kept for this tab and goes from the address. Whether there was one.
export function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key === null) return false;
  useKey(key.trim());
  window.history.replaceState(null, "", location.pathname + location.search);
  return true;
}

// `status`: 0 where no answer came, or not all of it. `problem`: the body of RFC 9457, which says what to do. `challenge`: the service asks for a key, or for another.
export class ApiError extends Error {
  constructor(status, problem, challenge) {
    super(problem.detail || problem.title || `the service answered ${status}`);
    this.status = status;
    this.problem = problem;
    this.refused = status === 401 || status === 403;
    this.challenge = challenge;
  }
}

const CURE = 'Give it under "API key", or open the address that make demo printed, which ends in #key=...';
export const told = (error) => (error.challenge ? `${error.message}. ${CURE}` : error.message);

const NO_JSON = "What answers here is not the service: its answer is not JSON. Is there a proxy that wants you to log in?";
const NO_KEY = "The API key has characters that no key has, such as typographic quotes: give it anew.";

function unanswered(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, { detail: error instanceof SyntaxError ? NO_JSON : `The service does not answer (${error.message}).` }, false);
}

async function call(method, path, { query = {}, body, headers = {}, signal, accepted = [] } = {}) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  const key = apiKey();
  if (!/^[\x21-\x7e]*$/.test(key)) throw new ApiError(401, { detail: NO_KEY }, false); // fetch would refuse it
  const response = await fetch(url, {
    method,
    signal,
    credentials: "same-origin",
    headers: {
      ...(key && { Authorization: `Bearer ${key}` }),
      ...(body !== undefined && { "Content-Type": "application/json" }),
      ...headers,
    },
    body: body === undefined ? undefined : JSON.stringify(body),
  }).catch(unanswered);
  // a proxy's own page is no JSON
  const answer = await response.json().catch((error) => (error instanceof SyntaxError && !response.ok ? {} : unanswered(error)));
  if (!response.ok && !accepted.includes(response.status)) throw new ApiError(response.status, answer, response.headers.has("WWW-Authenticate"));
  return answer;
}

// Browsers resolve a part of a path that is "." or "..", also where it is written %2E.
export const mayName = (id) => id !== "." && id !== "..";
function user(id) {
  if (!mayName(id)) throw new ApiError(0, { detail: `Browsers cannot ask for the history of the user "${id}": they take the id for a step of the path.` }, false);
  return `v1/users/${encodeURIComponent(id)}/history`;
}

export const options = (signal) => call("GET", "v1/options", { signal });
export const examples = (signal) => call("GET", "v1/examples", { query: { limit: 4 }, signal });
export const search = (query, signal) => call("GET", "v1/items", { query: { query, limit: 8 }, signal });
export const recommend = (body, signal) => call("POST", "v1/recommend", { body, signal });
export const history = (id, limit, signal) => call("GET", user(id), { query: { limit }, signal });
export const post = (event) => call("POST", "v1/events", { body: event, headers: { "Idempotency-Key": newKey() } });

// What is looked at again and again: a look that has no answer within LOOK_MS is given up, for the page to say so.
const look = (path, more) => call("GET", path, { signal: AbortSignal.timeout(LOOK_MS), ...more });
export async function readiness() {
  const answer = await look("readyz", { accepted: [503] });
  if (!("ready" in answer)) throw new ApiError(503, answer, false); // of a proxy, in place of a gateway
  return answer;
}
export const backends = () => look("v1/backends");
export const models = () => look("v1/models");
export const cache = () => look("v1/cache");
export const gateway = () => look("v1/gateway");
// `to`: enable, disable or first
export const switchEngine = (stage, name, to) => call("POST", `v1/backends/${encodeURIComponent(stage)}/${encodeURIComponent(name)}:${to}`);

// crypto.randomUUID is there over https and on localhost only
function newKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
