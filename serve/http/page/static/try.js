// The forms that send requests to a model.
import { classes, output, ranking, shown } from "./answers.js";
import { copyable, save } from "./copying.js";
import { badge, h, shapeText, show } from "./dom.js";
import { ask, curl, post } from "./requests.js";
import { OWN, PICTURE, SAMPLE, TEXT, colours, elements, fills, make, middle, pictureOf, pictureSize } from "./tensors.js";
import { proposed, request, textLines, textRequest, written } from "./tensors.js";

const MOST_ELEMENTS = 2_000_000;
const MOST_IN_COMMAND = 2_000; // elements of a request that stands in a command
const PREVIEW = 240; // pixels
const JSON_TYPE = "application/json";
const NONE = { sample: null, labels: {}, scores: "softmax" };

export class Try {
  constructor(element) {
    this.element = element;
  }

  async update(model) {
    const key = JSON.stringify([model.name, model.version, model.inputs, model.state, model.certificate?.created]);
    if (this.element.dataset.key === key) return;
    const title = h("h2", { id: "try-title" }, "Try it");
    show(this.element, key, () => [title, h("p", { class: "empty" }, model.inputs ? "loading" : "This version takes no requests.")]);
    if (!model.inputs) return;
    let examples = NONE;
    try {
      const response = await ask(`/ui/examples/${encodeURIComponent(model.name)}/${model.version}`);
      if (response.ok) examples = await response.json();
    } catch {
      // the server has gone; the page says so, and the form works once it is back
    }
    if (this.element.dataset.key === key) this.element.replaceChildren(title, ...forms(model, examples));
  }
}

function forms(model, examples) {
  const tensors = tensorForm(model, examples);
  const more = (title) => h("details", {}, h("summary", {}, title), ...tensors);
  if (model.classifies_pictures) return [...pictureForm(model), more("Send pixels")];
  return textRequest(model, "", "") ? [...textForm(model), more("Send tokens")] : tensors;
}

// A form, the command that does the same from a shell, and the place of the answer. `send` returns what to show and the body that
// was sent; `describe` returns the body that would be, null for one that is too long for a command, and `whole` makes that one.
function form(fields, path, { send, describe, whole = null }) {
  const answer = h("div", { class: "answer", "aria-live": "polite" });
  const button = h("button", { class: "main", type: "submit" }, "Send");
  const shell = h("div", { class: "shell" });
  const element = h("form", {}, fields, h("div", { class: "row" }, button), shell);
  const describeNow = async (sent) => {
    let body;
    try {
      body = sent === undefined ? await describe() : sent;
    } catch {
      shell.replaceChildren(); // what is missing is said when it is sent
      return;
    }
    const file = h("button", { class: "plain", type: "button", onclick: async () => save(await whole(), "request.json") }, "Save request.json");
    shell.replaceChildren(h("h3", {}, "From a shell"), copyable(curl(path, body), "the command"), ...(body === null ? [file] : []));
  };
  element.addEventListener("input", () => describeNow());
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      const { nodes, sent } = await send();
      answer.replaceChildren(...nodes);
      await describeNow(sent);
    } catch (error) {
      answer.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    } finally {
      button.disabled = false;
    }
  });
  describeNow();
  return [element, answer];
}

const pathOf = ({ name, version }, end) => `/v2/models/${encodeURIComponent(name)}/versions/${version}/${end}`;

function pictureForm(model) {
  const picture = new PictureField("picture");
  const path = pathOf(model, "classify");
  return form([picture.element], path, {
    describe: () => ({ file: picture.file?.name ?? "cat.jpg" }),
    send: async () => {
      if (!picture.file) throw new Error("choose a picture");
      const answer = await post(path, picture.file, picture.file.type || "application/octet-stream");
      const lines = textLines(answer.content);
      return { nodes: shown(answer, [h("div", {}, h("h3", {}, "the best classes, by score"), ranking(lines))]), sent: { file: picture.file.name } };
    },
  });
}

function textForm(model) {
  const query = model.task === "rerank" ? textarea("query", 1, "which animal flies?") : null;
  const text = query ? textarea("texts, one in each line", 3, "a bird in the sky\na dog on a lead") : textarea("text", 3, "what a lovely day");
  const fields = [query, text].filter(Boolean).map((field) => h("label", {}, field.getAttribute("aria-label"), field));
  const body = () => JSON.stringify(textRequest(model, text.value, query?.value).content);
  const { path } = textRequest(model, "", "");
  return form(fields, path, {
    describe: body,
    send: async () => {
      const sent = body();
      const answer = await post(path, sent, JSON_TYPE);
      const lines = textLines(answer.content);
      return { nodes: shown(answer, lines.length ? [ranking(lines)] : embedding(answer.content)), sent };
    },
  });
}

// The first numbers of an embedding, and how many there are.
function embedding({ data }) {
  const vector = data?.[0]?.embedding;
  return Array.isArray(vector) ? [output({ name: "embedding", datatype: "FP32", shape: [1, vector.length], data: vector })] : [];
}

function textarea(label, rows, value) {
  const field = h("textarea", { rows, required: true, "aria-label": label, name: label });
  field.value = value;
  return field;
}

function tensorForm(model, examples) {
  const recorded = new Map((examples.sample?.inputs ?? []).map((tensor) => [tensor.name, tensor]));
  const inputs = model.inputs.map((spec) => new Input(spec, recorded.get(spec.name)));
  const path = pathOf(model, "infer");
  // An output whose classes' names the page has comes as numbers, so that there are scores of all.
  const outputs = model.outputs.map((one) => ({ ...one, labelled: one.labelled && !examples.labels[one.name] }));
  const whole = async () => request(await Promise.all(inputs.map((input) => input.tensor())), outputs);
  return form(inputs.map((input) => input.element), path, {
    whole,
    describe: () => (inputs.reduce((sum, input) => sum + elements(input.shape), 0) > MOST_IN_COMMAND ? null : whole()),
    send: async () => {
      const isSample = inputs.every((input) => input.fill.value === SAMPLE);
      const body = await whole();
      const answer = await post(path, body, JSON_TYPE);
      const nodes = shown(answer, answer.content.outputs.map((one) => shownOutput(one, outputs, examples, isSample)), warnings(answer.content));
      return { nodes, sent: inputs.reduce((sum, input) => sum + elements(input.shape), 0) > MOST_IN_COMMAND ? null : body };
    },
  });
}

const warnings = ({ parameters }) => Object.entries(parameters ?? {}).map(([name, value]) => badge(`${name}: ${value}`, "warn"));

function shownOutput(one, outputs, { sample, labels, scores: how }, isSample) {
  const isRanked = outputs.some(({ name, labelled }) => labelled && name === one.name);
  if (isRanked && one.datatype === "BYTES") return classes(one);
  const expected = isSample ? sample.outputs.find(({ name }) => name === one.name) : null;
  const fits = expected && JSON.stringify(expected.shape) === JSON.stringify(one.shape) ? expected : null;
  return output(one, { labels: labels[one.name], how, expected: fits });
}

// A picture file, shown as it is.
class PictureField {
  constructor(name) {
    this.field = h("input", { type: "file", accept: "image/*", "aria-label": name, name, onchange: () => this.#preview() });
    this.preview = h("div", { class: "preview" });
    this.element = h("div", { class: "picture" }, h("label", {}, "picture file", this.field), this.preview);
  }

  get file() {
    return this.field.files[0];
  }

  async #preview() {
    this.preview.replaceChildren();
    if (!this.file) return;
    try {
      const bitmap = await createImageBitmap(this.file);
      const scale = Math.min(1, PREVIEW / Math.max(bitmap.width, bitmap.height));
      const size = { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) };
      const canvas = h("canvas", { ...size, role: "img", "aria-label": `the picture ${this.file.name}` });
      canvas.getContext("2d").drawImage(bitmap, 0, 0, size.width, size.height);
      this.preview.replaceChildren(canvas);
    } catch {
      this.preview.replaceChildren(h("p", { class: "quiet" }, "This browser cannot show the file."));
    }
  }
}

class Input {
  constructor(spec, sample) {
    this.spec = spec;
    this.sample = sample;
    const sizes = proposed(spec.shape);
    this.sizes = spec.shape.map((size, index) =>
      size >= 0 ? null : h("input", { type: "number", min: 0, value: sizes[index], required: true, name: `${spec.name}-${index}` }),
    );
    this.open = this.sizes.map((field, index) => field && h("label", {}, `size of dimension ${index}`, field)).filter(Boolean);
    this.fill = h("select", { name: `${spec.name}-fill` }, fills(spec, Boolean(sample)).map((name) => h("option", {}, name)));
    this.picture = new PictureField(`picture for ${spec.name}`);
    this.own = h("textarea", { hidden: true, spellcheck: "false", "aria-label": `values of ${spec.name} as JSON`, name: `${spec.name}-own` });
    this.drawn = h("div", { class: "preview" }, sample ? drawn(sample) : null);
    this.fill.addEventListener("change", () => this.#toggle());
    this.element = h(
      "fieldset",
      {},
      h("legend", {}, `${spec.name} `, h("span", { class: "quiet mono" }, `${spec.datatype} ${shapeText(spec.shape)}`)),
      h("div", { class: "row" }, h("label", {}, "values", this.fill), this.open),
      this.picture.element,
      this.drawn,
      this.own,
    );
    this.#toggle();
  }

  get shape() {
    if (this.fill.value === SAMPLE) return this.sample.shape;
    return this.spec.shape.map((size, index) => (this.sizes[index] ? Number(this.sizes[index].value) : size));
  }

  #toggle() {
    const fill = this.fill.value;
    this.picture.element.hidden = fill !== PICTURE;
    this.drawn.hidden = fill !== SAMPLE;
    this.open.forEach((label) => (label.hidden = fill === SAMPLE));
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
    if (fill === SAMPLE) return JSON.stringify(this.sample.data);
    if (fill === OWN) return written(this.own.value, name);
    if (fill === TEXT) return JSON.stringify(Array(elements(this.shape)).fill(this.own.value));
    if (fill === PICTURE) return JSON.stringify(await pixels(this.picture.file, pictureSize(datatype, this.shape), name));
    return JSON.stringify(make(fill, datatype, this.shape));
  }
}

// A sample that is a picture, such as of a digit.
function drawn(sample) {
  const found = pictureOf(sample);
  if (!found) return null;
  const { width, height, pixels: bytes } = found;
  const canvas = h("canvas", { width, height, class: width < PREVIEW ? "small" : null, role: "img", "aria-label": `the sample of ${sample.name}` });
  canvas.getContext("2d").putImageData(new ImageData(bytes, width, height), 0, 0);
  return canvas;
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
