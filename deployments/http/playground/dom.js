// Elements, made of text and other elements only: whatever a title holds, it is never markup.

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  return fill(element, ...children);
}

// Children that are not there are left out; replaceChildren itself would write "null".
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

// A panel that may not ask for what it shows says why instead, until it may.
export function refuse(panel, why) {
  panel.classList.toggle("refused", why !== "");
  say(panel.querySelector(".missing"), why);
}

// Touch the page only where it changes, so that nobody's focus or selection is lost.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
