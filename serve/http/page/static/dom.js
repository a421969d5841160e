// Elements, and numbers as people read them. Text goes in as text: a model's name is never markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, attributes, children);
  return element;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) element.append(child);
  }
}

// Replace an element's content, unless it is what it was: what is being read or clicked stays.
export function show(element, key, make) {
  if (element.dataset.key === key) return;
  element.dataset.key = key;
  element.replaceChildren(...[make()].flat().filter((child) => child !== null));
}

// Parts of an element that are shown anew one by one, so that what is open, scrolled or focused in the others stays so.
export function parts(element, key, names) {
  show(element, key, () => names.map((name) => h("div", { "data-part": name })));
  return Object.fromEntries([...element.children].map((part) => [part.dataset.part, part]));
}

// A text whose parts between backticks are code.
export function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 10 ** (digits - 1)) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

// As short as a mark on an axis must be.
export function mark(value) {
  const short = Number(value.toPrecision(1));
  return short !== 0 && Math.abs(short) < 1e-2 ? short.toExponential(0) : String(short);
}

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function milliseconds(value) {
  if (value === null || value === undefined) return ["–", ""];
  if (value < 1) return [number(value * 1000), "µs"];
  return value < 1000 ? [number(value), "ms"] : [number(value / 1000), "s"];
}

export function span(seconds) {
  const whole = Math.floor(seconds);
  const days = Math.floor(whole / 86400);
  const hours = Math.floor(whole / 3600) % 24;
  const minutes = Math.floor(whole / 60) % 60;
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

export function shapeText(shape) {
  return `[${shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`;
}
