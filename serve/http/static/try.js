// The form that sends a request, and the answer.
import { badge, h, number, shapeText, show } from "./dom.js";
import { FILLS, answered, elements, make, proposed, request, written } from "./tensors.js";

const MOST_ELEMENTS = 2_000_000;
const MOST_SHOWN = 24;

export class Try {
  constructor(element) {
    this.element = element;
  }

  update(model) {
    const key = JSON.stringify([model.name, model.version, model.inputs, model.state]);
    show(this.element, key, () => this.#form(model));
  }

  #form(model) {
    const title = h("h2", { id: "try-title" }, "Try it");
    if (!model.inputs) return [title, h("p", { class: "empty" }, "This version takes no requests.")];
    const inputs = model.inputs.map((input) => new Input(input));
    const answer = h("div", { class: "answer", "aria-live": "polite" });
    const button = h("button", { class: "main", type: "submit" }, "Send");
    const form = h("form", {}, inputs.map((input) => input.element), h("div", { class: "row" }, button));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      button.disabled = true;
      try {
        answer.replaceChildren(...(await send(model, inputs)));
      } catch (error) {
        answer.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
      } finally {
        button.disabled = false;
      }
    });
    return [title, form, answer];
  }
}

class Input {
  constructor(spec) {
    this.spec = spec;
    const sizes = proposed(spec.shape);
    this.sizes = spec.shape.map((size, index) =>
      size >= 0 ? null : h("input", { type: "number", min: 0, value: sizes[index], required: true, name: `${spec.name}-${index}` }),
    );
    const open = this.sizes.map((field, index) => field && h("label", {}, `size of dimension ${index}`, field));
    this.fill = h("select", { name: `${spec.name}-fill` }, FILLS.map((name) => h("option", {}, name)));
    this.own = h("textarea", { hidden: true, spellcheck: "false", "aria-label": `values of ${spec.name} as JSON`, name: `${spec.name}-own` });
    this.fill.addEventListener("change", () => this.#toggle());
    this.element = h(
      "fieldset",
      {},
      h("legend", {}, `${spec.name} `, h("span", { class: "quiet mono" }, `${spec.datatype} ${shapeText(spec.shape)}`)),
      h("div", { class: "row" }, h("label", {}, "values", this.fill), open.filter(Boolean)),
      this.own,
    );
  }

  get shape() {
    return this.spec.shape.map((size, index) => (this.sizes[index] ? Number(this.sizes[index].value) : size));
  }

  #toggle() {
    this.own.hidden = this.fill.value !== FILLS.at(-1);
    if (!this.own.hidden && !this.own.value && elements(this.shape) <= 10_000) {
      this.own.value = JSON.stringify(make("random", this.spec.datatype, this.shape));
    }
  }

  tensor() {
    const { name, datatype } = this.spec;
    if (elements(this.shape) > MOST_ELEMENTS) throw new Error(`input ${name}: more than ${MOST_ELEMENTS} elements are too many for this form`);
    const own = this.fill.value === FILLS.at(-1);
    const data = own ? written(this.own.value, name) : JSON.stringify(make(this.fill.value, datatype, this.shape));
    return { name, datatype, shape: this.shape, data };
  }
}

async function send(model, inputs) {
  const body = request(inputs.map((input) => input.tensor()));
  const path = `/v2/models/${encodeURIComponent(model.name)}/versions/${model.version}/infer`;
  const started = performance.now();
  let response;
  try {
    response = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body });
  } catch {
    throw new Error("the server did not answer; it may be stopping, or the connection is lost");
  }
  const took = performance.now() - started;
  const text = await response.text();
  const content = answered(text);
  if (!response.ok) throw new Error(`${response.status}: ${content.error}`);
  const parameters = Object.entries(content.parameters ?? {}).map(([name, value]) => badge(`${name}: ${value}`, "warn"));
  return [
    h("div", { class: "badges" }, badge("answered", "good"), badge(`${number(took)} ms to this page and back`), parameters),
    ...content.outputs.map(output),
    h("details", {}, h("summary", {}, "The request for curl"), h("pre", {}, curl(path, body))),
    h("details", {}, h("summary", {}, "The answer as JSON"), h("pre", {}, shortened(text))),
  ];
}

function shortened(text) {
  return text.length > 20_000 ? `${text.slice(0, 20_000)} … (${text.length} characters)` : text;
}

function curl(path, body) {
  const quoted = body.replaceAll("'", "'\\''");
  return shortened(`curl -s ${location.origin}${path} -d '${quoted}'`);
}

function output({ name, datatype, shape, data }) {
  const title = h("h3", {}, `${name} `, h("span", { class: "mono" }, `${datatype} ${shapeText(shape)}`));
  const numbers = data.map(Number);
  const largest = Math.max(...numbers.filter(Number.isFinite).slice(0, 10_000).map(Math.abs), 0);
  const row = shape.length > 1 ? shape.at(-1) : data.length;
  const shown = data.slice(0, Math.min(row, MOST_SHOWN));
  const best = numbers.slice(0, shown.length).reduce((at, value, index, all) => (value > all[at] ? index : at), 0);
  const lines = shown.flatMap((value, index) => line(index, value, numbers[index], largest, shown.length > 1 && index === best));
  const left = data.length - shown.length;
  const rest = left > 0 ? h("p", { class: "quiet" }, `and ${left.toLocaleString("en")} more below`) : null;
  return h("div", {}, title, h("div", { class: "values" }, lines), rest);
}

function line(index, value, size, largest, best) {
  const bar = h("div", { class: size < 0 ? "fill below" : "fill" });
  // From the middle: to the right what is above zero, to the left what is below.
  const share = Number.isFinite(size) && largest ? (size / largest) * 50 : 0;
  bar.style.width = `${Math.abs(share)}%`;
  bar.style.marginLeft = `${share < 0 ? 50 + share : 50}%`;
  const special = typeof value === "string" && /^(NaN|-?Infinity)$/.test(value);
  const text = typeof value === "number" ? number(value, 4) : String(value).slice(0, 60);
  const kind = `value number ${special ? "special" : ""} ${best ? "best" : ""}`;
  return [h("span", { class: "quiet number" }, index), h("div", { class: "track" }, bar), h("span", { class: kind }, text)];
}
