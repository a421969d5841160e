// Plots as SVG: lines over the last minutes, and columns.
import { clock, h, s } from "./dom.js";

const HEIGHT = 160;
const LEFT = 46;
const BOTTOM = 20;
const TOP = 8;
const RIGHT = 6;
const NARROWEST = 240;
const COLUMNS_WIDTH = 460;
const CARD_EDGES = 70; // pixels of a window that a card does not have for a chart
const LABEL = 52; // pixels of a column's name
const NOTHING = "no requests in this time";
const SHORTEST = 60; // seconds that a plot shows at least
const TICKS = [10, 30, 60, 120]; // seconds between two marks of the time

// A round number of at least `value`, so that the scale's steps are round too.
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}

const y = (value, top) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);

function frame(width, top, format, label) {
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    const at = y(share * top, top);
    svg.append(
      s("line", { class: share ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
      s("text", { x: LEFT - 7, y: at + 4, "text-anchor": "end" }, format(share * top)),
    );
  }
  return svg;
}

export class LinePlot {
  // lines: [{label, index, className}], the index being that of a sample's value.
  constructor(title, lines, format, { interval, kept }) {
    Object.assign(this, { title, lines, format, interval, kept, pointer: null });
    this.body = h("div");
    this.tip = h("div", { class: "tip", hidden: true });
    const legend = lines.length > 1 ? lines.map((line) => h("span", { class: line.className ?? "" }, line.label)) : [];
    this.element = h(
      "div",
      { class: "card plot" },
      h("div", { class: "head" }, h("h3", {}, title), h("div", { class: "legend" }, legend)),
      this.body,
      this.tip,
    );
  }

  draw(samples, now) {
    // As wide as it is shown, so that its text has the size of other text; as long as there is something to see.
    const width = Math.max(this.body.clientWidth, NARROWEST);
    const known = samples.length ? now - samples[0][0] : 0;
    const seconds = Math.min(Math.max(known, SHORTEST), this.interval * this.kept);
    const x = (time) => width - RIGHT - ((now - time) / seconds) * (width - LEFT - RIGHT);
    const seen = samples.filter((sample) => now - sample[0] <= seconds);
    const values = seen.flatMap((sample) => this.lines.map((line) => sample[line.index] ?? 0));
    const top = niceTop(Math.max(...values, 0));
    const last = seen.length ? this.lines.map((line) => `${line.label} ${this.format(seen.at(-1)[line.index])}`) : ["no samples"];
    const svg = frame(width, top, this.format, `${this.title}; now ${last.join(", ")}`);
    const step = TICKS.find((tick) => seconds / tick <= 4) ?? TICKS.at(-1);
    for (let ago = 0; ago < seconds * 0.95; ago += step) {
      const anchor = ago ? "middle" : "end";
      svg.append(s("text", { x: x(now - ago), y: HEIGHT - 4, "text-anchor": anchor }, agoText(ago)));
    }
    if (!seen.some((sample) => this.lines.some((line) => sample[line.index]))) {
      svg.append(s("text", { class: "none", x: (width + LEFT) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, NOTHING));
    }
    for (const line of this.lines) this.#line(svg, seen, line, x, top);
    const point = this.#cursor(svg, width, seen, x);
    this.body.replaceChildren(svg);
    if (this.pointer !== null) point(); // the plot is new, the pointer where it was
  }

  #line(svg, samples, line, x, top) {
    for (const piece of pieces(samples, line.index, this.interval)) {
      const points = piece.map((sample) => `${x(sample[0]).toFixed(1)},${y(sample[line.index], top).toFixed(1)}`);
      if (this.lines.length === 1 && points.length > 1) {
        const [from, to] = [x(piece[0][0]), x(piece.at(-1)[0])].map((at) => at.toFixed(1));
        svg.append(s("path", { class: "area", d: `M${from},${y(0, top)}L${points.join("L")}L${to},${y(0, top)}Z` }));
      }
      if (points.length > 1) svg.append(s("path", { class: line.className, d: `M${points.join("L")}` }));
    }
    // A value with nothing beside it becomes a dot: a line of no length, with round ends.
    const isAlone = (index) => samples[index][line.index] && !samples[index - 1]?.[line.index] && !samples[index + 1]?.[line.index];
    const dots = samples.filter((_, index) => isAlone(index)).map((sample) => `M${x(sample[0]).toFixed(1)},${y(sample[line.index], top).toFixed(1)}h0.01`);
    if (dots.length) svg.append(s("path", { class: `spot ${line.className ?? ""}`, d: dots.join("") }));
  }

  #cursor(svg, width, samples, x) {
    const mark = s("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    const hide = () => {
      this.pointer = null;
      mark.setAttribute("visibility", "hidden");
      this.tip.hidden = true;
    };
    const move = () => {
      const box = svg.getBoundingClientRect();
      const at = ((this.pointer - box.left) / box.width) * width;
      const nearest = samples.reduce((a, b) => (a && Math.abs(x(a[0]) - at) <= Math.abs(x(b[0]) - at) ? a : b), null);
      if (!nearest || Math.abs(x(nearest[0]) - at) > 20) return hide();
      mark.setAttribute("x1", x(nearest[0]));
      mark.setAttribute("x2", x(nearest[0]));
      mark.setAttribute("visibility", "visible");
      const values = this.lines.map((line) => `${line.label} ${this.format(nearest[line.index])}`);
      this.tip.textContent = `${clock(nearest[0])}  ${values.join("  ")}`;
      this.tip.hidden = false;
      const left = (x(nearest[0]) / width) * box.width + svg.parentElement.offsetLeft;
      const most = this.element.clientWidth - this.tip.offsetWidth - 4;
      this.tip.style.left = `${Math.max(4, Math.min(left - this.tip.offsetWidth / 2, most))}px`;
      this.tip.style.top = "1.9rem";
      return undefined;
    };
    const hit = s("rect", { class: "hit", x: LEFT, y: 0, width: width - LEFT, height: HEIGHT, onpointerleave: hide });
    hit.addEventListener("pointermove", (event) => {
      this.pointer = event.clientX;
      move();
    });
    svg.append(mark, hit);
    return move;
  }
}

function agoText(seconds) {
  if (!seconds) return "now";
  return seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`;
}

// Runs of samples that have a value and follow each other.
function pieces(samples, index, interval) {
  const found = [];
  let before = null;
  for (const sample of samples) {
    if (sample[index] === null) before = null;
    else {
      if (before === null || sample[0] - before > interval * 3) found.push([]);
      found.at(-1).push(sample);
      before = sample[0];
    }
  }
  return found;
}

// Columns: entries of [label, value]; `over` colours those beyond a limit.
export function columns(entries, format, label, { over = () => false, limit = null, width: wanted = COLUMNS_WIDTH } = {}) {
  const top = niceTop(Math.max(...entries.map(([, value]) => value), 0));
  const wide = Math.max(Math.min(wanted, innerWidth - CARD_EDGES), NARROWEST); // text keeps its size on a phone
  const svg = frame(wide, top, format, label);
  const step = (wide - LEFT - RIGHT) / Math.max(entries.length, 1);
  const every = Math.ceil((entries.length * LABEL) / (wide - LEFT));
  entries.forEach(([name, value], index) => {
    const at = LEFT + index * step;
    const width = Math.min(step - 2, 40);
    const height = Math.max(y(0, top) - y(value, top), value ? 1 : 0);
    const column = { class: over(index) ? "column over" : "column", x: at + (step - width) / 2, y: y(0, top) - height, width, height, rx: 2 };
    svg.append(s("rect", column, s("title", {}, `${name}: ${format(value)}`)));
    if (index % every === 0) svg.append(s("text", { x: at + step / 2, y: HEIGHT - 4, "text-anchor": "middle" }, name));
  });
  if (!entries.some(([, value]) => value)) {
    svg.append(s("text", { class: "none", x: (wide + LEFT) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, NOTHING));
  }
  if (limit !== null) {
    const at = LEFT + limit * step;
    svg.append(s("line", { class: "limit", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
  }
  return svg;
}
