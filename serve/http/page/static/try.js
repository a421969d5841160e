// The form that sends a request, and the answer.
import { ask, badge, h, number, shapeText, show } from "./dom.js";
import { OWN, PICTURE, TEXT, answered, classOf, colours, elements, fills, make, middle, pictureSize } from "./tensors.js";
import { proposed, request, textLines, textRequest, written } from "./tensors.js";

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
    const tensors = form(inputs.map((input) => input.element), () => send(model, inputs));
    if (!textRequest(model, "", "")) return [title, ...tensors];
    const query = model.task === "rerank" ? textarea("query", 1) : null;
    const text = textarea(query ? "texts, one in each line" : "text", 3);
    const fields = [query, text].map((field) => field && h("label", {}, field.getAttribute("aria-label"), field));
    const asked = form(fields.filter(Boolean), () => sendText(textRequest(model, text.value, query?.value)));
    return [title, ...asked, h("details", {}, h("summary", {}, "Send tokens"), ...tensors)];
  }
}

function textarea(label, rows) {
  return h("textarea", { rows, required: true, "aria-label": label, name: label });
}

// A form and the place of its answer.
function form(fields, ask) {
  const answer = h("div", { class: "answer", "aria-live": "polite" });
  const button = h("button", { class: "main", type: "submit" }, "Send");
  const element = h("form", {}, fields, h("div", { class: "row" }, button));
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      answer.replaceChildren(...(await ask()));
    } catch (error) {
      answer.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    } finally {
      button.disabled = false;
    }
  });
  return [element, answer];
}

class Input {
  constructor(spec) {
    this.spec = spec;
    const sizes = proposed(spec.shape);
    this.sizes = spec.shape.map((size, index) =>
      size >= 0 ? null : h("input", { type: "number", min: 0, value: sizes[index], required: true, name: `${spec.name}-${index}` }),
    );
    const open = this.sizes.map((field, index) => field && h("label", {}, `size of dimension ${index}`, field));
    this.fill = h("select", { name: `${spec.name}-fill` }, fills(spec).map((name) => h("option", {}, name)));
    this.picture = h("input", { type: "file", accept: "image/*", "aria-label": `picture for ${spec.name}`, name: `${spec.name}-picture` });
    this.own = h("textarea", { hidden: true, spellcheck: "false", "aria-label": `values of ${spec.name} as JSON`, name: `${spec.name}-own` });
    this.fill.addEventListener("change", () => this.#toggle());
    this.element = h(
      "fieldset",
      {},
      h("legend", {}, `${spec.name} `, h("span", { class: "quiet mono" }, `${spec.datatype} ${shapeText(spec.shape)}`)),
      h("div", { class: "row" }, h("label", {}, "values", this.fill), open.filter(Boolean), this.picture),
      this.own,
    );
    this.#toggle();
  }

  get shape() {
    return this.spec.shape.map((size, index) => (this.sizes[index] ? Number(this.sizes[index].value) : size));
  }

  #toggle() {
    const fill = this.fill.value;
    this.picture.hidden = fill !== PICTURE;
    this.own.hidden = fill !== OWN && fill !== TEXT;
    this.own.setAttribute("aria-label", fill === TEXT ? `text for ${this.spec.name}` : `values of ${this.spec.name} as JSON`);
    if (fill === OWN && !this.own.value && elements(this.shape) <= 10_000) {
      this.own.value = JSON.stringify(make("random", this.spec.datatype, this.shape));
    }
  }

  async tensor() {
    const { name, datatype } = this.spec;
    if (elements(this.shape) > MOST_ELEMENTS) throw new Error(`input ${name}: more than ${MOST_ELEMENTS} elements are too many for this form`);
    return { name, datatype, shape: this.shape, data: await this.#data() };
  }

  async #data() {
    const { name, datatype } = this.spec;
    const fill = this.fill.value;
    if (fill === OWN) return written(this.own.value, name);
    if (fill === TEXT) return JSON.stringify(Array(elements(this.shape)).fill(this.own.value));
    if (fill === PICTURE) return JSON.stringify(await pixels(this.picture.files[0], pictureSize(datatype, this.shape), name));
    return JSON.stringify(make(fill, datatype, this.shape));
  }
}

// The RGB bytes of a file's picture, cut around its middle to the ratio of the size, and scaled to it.
async function pixels(file, size, name) {
  if (!file) throw new Error(`input ${name}: choose a picture`);
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(`input ${name}: ${file.name} is no picture that this browser reads`);
  }
  const canvas = h("canvas", size);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  const part = middle(picture, size);
  context.drawImage(picture, part.left, part.top, part.width, part.height, 0, 0, size.width, size.height);
  return colours(context.getImageData(0, 0, size.width, size.height).data);
}

async function send(model, inputs) {
  const body = request(await Promise.all(inputs.map((input) => input.tensor())), model.outputs);
  const path = `/v2/models/${encodeURIComponent(model.name)}/versions/${model.version}/infer`;
  const { content, text, took } = await posted(path, body);
  const parameters = Object.entries(content.parameters ?? {}).map(([name, value]) => badge(`${name}: ${value}`, "warn"));
  const labelled = new Set(model.outputs.filter((one) => one.labelled).map((one) => one.name));
  const outputs = content.outputs.map((one) => (labelled.has(one.name) ? classes(one) : output(one)));
  return shown(path, body, text, took, outputs, parameters);
}

async function sendText({ path, content }) {
  const body = JSON.stringify(content);
  const { content: answer, text, took } = await posted(path, body);
  const vector = answer.data?.[0]?.embedding;
  const found = vector ? output({ name: "embedding", datatype: "FP32", shape: [vector.length], data: vector }) : ranking(textLines(answer));
  return shown(path, body, text, took, [found], []);
}

async function posted(path, body) {
  const started = performance.now();
  let response;
  try {
    response = await ask(path, { method: "POST", headers: { "content-type": "application/json" }, body });
  } catch {
    throw new Error("the server did not answer; it may be stopping, or the connection is lost");
  }
  const took = performance.now() - started;
  const text = await response.text();
  const content = answered(text);
  if (!response.ok) throw new Error(`${response.status}: ${content.error?.message ?? content.error}`);
  return { content, text, took };
}

function shown(path, body, text, took, outputs, parameters) {
  return [
    h("div", { class: "badges" }, badge("answered", "good"), badge(`${number(took)} ms to this page and back`), parameters),
    ...outputs,
    h("details", {}, h("summary", {}, "The request for curl"), h("pre", {}, curl(path, body))),
    h("details", {}, h("summary", {}, "The answer as JSON"), h("pre", {}, shortened(text))),
  ];
}

function shortened(text) {
  return text.length > 20_000 ? `${text.slice(0, 20_000)} … (${text.length} characters)` : text;
}

function curl(path, body) {
  const quoted = body.replaceAll("'", "'\\''");
  const address = `${location.origin}${path}`;
  return shortened(`curl -s ${path.includes("?") ? `'${address}'` : address} -d '${quoted}'`);
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

// The best classes of the first row, by name.
function classes({ name, shape, data }) {
  const title = h("h3", {}, `${name} `, h("span", { class: "quiet" }, "the best classes"));
  const lines = data.slice(0, shape.at(-1)).map(classOf);
  return h("div", {}, title, ranking(lines.map((one) => ({ ...one, name: one.name || `class ${one.index}` }))));
}

function ranking(lines) {
  const largest = Math.max(...lines.map(({ score }) => Math.abs(score)), 0);
  return h("div", { class: "values" }, lines.flatMap(({ score, name }, index) => line(name, score, score, largest, index === 0)));
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
