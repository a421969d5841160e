// Make tensors for a form, and check those that people write.

export const [SAMPLE, PICTURE, TEXT, OWN] = ["the model's own sample", "a picture", "text", "own JSON"];
export const FILLS = ["random", "zeros", "ones", OWN];
const BEST = 5; // classes, of an output whose classes have names

const RANGES = { INT8: 127, UINT8: 255 };

export function elements(shape) {
  return shape.reduce((product, size) => product * size, 1);
}

// What a form offers for an input, the best first: the recorded sample, a picture for pixels of three colours, text for bytes.
export function fills({ datatype, shape }, hasSample = false) {
  const own = pictureSize(datatype, shape) ? [PICTURE] : datatype === "BYTES" ? [TEXT] : [];
  return [...(hasSample ? [SAMPLE] : []), ...own, ...FILLS];
}

// The size of an input that takes one picture of RGB bytes; null for any other input.
export function pictureSize(datatype, shape) {
  const [height, width, colours] = shape.slice(-3);
  if (datatype !== "UINT8" || colours !== 3 || height < 1 || width < 1 || elements(shape.slice(0, -3).map(Math.abs)) !== 1) return null;
  return { height, width };
}

// The part of a picture that fills a size of another ratio: the largest one around its middle.
export function middle(picture, size) {
  const scale = Math.min(picture.width / size.width, picture.height / size.height);
  const [width, height] = [size.width * scale, size.height * scale];
  return { left: (picture.width - width) / 2, top: (picture.height - height) / 2, width, height };
}

// The three colours of each pixel, from the four values that a canvas has for it.
export function colours(pixels) {
  return Array.from({ length: (pixels.length / 4) * 3 }, (_, index) => pixels[Math.floor(index / 3) * 4 + (index % 3)]);
}

const SMALLEST = 8; // rows and columns of what is shown as a picture
const BACKGROUND = 0.2; // share of equal darkest values that makes a picture of a list of numbers

// What a tensor of one picture shows, as {width, height, pixels} with RGBA bytes; null for a tensor that is none.
export function pictureOf({ datatype, shape, data }) {
  if (datatype === "BYTES" || datatype === "BOOL" || (/INT/.test(datatype) && datatype !== "UINT8")) return null;
  const sizes = shape.slice(shape.findIndex((size) => size !== 1));
  const values = data.map(Number);
  const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  if (!(most > least) || !Number.isFinite(most - least)) return null;
  const side = Math.sqrt(values.length);
  const isSquare = sizes.length === 1 && Number.isInteger(side) && values.filter((value) => value === least).length >= BACKGROUND * values.length;
  const planes = sizes.length === 3 && sizes[0] === 3; // the three colours one after the other
  const [height, width] = isSquare ? [side, side] : planes ? sizes.slice(1) : sizes;
  const isColoured = planes || (sizes.length === 3 && sizes[2] === 3);
  if (!isSquare && !isColoured && sizes.length !== 2) return null;
  if (Math.min(height, width) < SMALLEST || Math.max(height, width) > 2 * Math.min(height, width)) return null;
  const pixels = new Uint8ClampedArray(width * height * 4).fill(255);
  for (let at = 0; at < width * height; at += 1) {
    for (let colour = 0; colour < 3; colour += 1) {
      const from = planes ? colour * width * height + at : isColoured ? at * 3 + colour : at;
      pixels[at * 4 + colour] = ((values[from] - least) / (most - least)) * 255;
    }
  }
  return { width, height, pixels };
}

// The scores of classes from the numbers of a row, as the server's own paths give them; numbers that are scores stay as they are.
export function scores(numbers, how) {
  if (how === "sigmoid" || numbers.length === 1) return numbers.map((value) => 1 / (1 + Math.exp(-value)));
  const sum = numbers.reduce((all, value) => all + value, 0);
  if (Math.abs(sum - 1) < 1e-2 && numbers.every((value) => value >= 0)) return numbers;
  const most = Math.max(...numbers);
  const powers = numbers.map((value) => Math.exp(value - most));
  const whole = powers.reduce((all, value) => all + value, 0);
  return powers.map((value) => value / whole);
}

// How far an answer is from the expected one, relative to that one's largest value. NaN and infinities say nothing of distance.
export function distance(served, expected) {
  let [most, scale] = [0, 0];
  expected.forEach((text, index) => {
    const [wanted, given] = [Number(text), Number(served[index])];
    if (!Number.isFinite(wanted) || !Number.isFinite(given)) return;
    most = Math.max(most, Math.abs(given - wanted));
    scale = Math.max(scale, Math.abs(wanted));
  });
  return most / (scale || 1);
}

export const best = (numbers) => numbers.reduce((at, value, index) => (value > numbers[at] ? index : at), 0);

// Sizes for a shape with open ones: the batch is 1, others are asked for.
export function proposed(shape) {
  return shape.map((size) => (size < 0 ? 1 : size));
}

function normal() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}

function random(datatype) {
  if (datatype === "BOOL") return Math.random() < 0.5;
  if (datatype === "BYTES") return Math.random().toString(36).slice(2, 8);
  if (/^(FP|BF)/.test(datatype)) return Number(normal().toFixed(4));
  return Math.floor(Math.random() * Math.min(RANGES[datatype] ?? 2, 2));
}

function constant(datatype, value) {
  if (datatype === "BOOL") return value === 1;
  return datatype === "BYTES" ? String(value) : value;
}

export function make(fill, datatype, shape) {
  const one = fill === "random" ? () => random(datatype) : () => constant(datatype, fill === "ones" ? 1 : 0);
  return Array.from({ length: elements(shape) }, one);
}

// What people wrote, as JSON, which is sent as it is: read as numbers, whole ones over 2^53 would be others. An Error says what is
// wrong with it.
export function written(text, name) {
  try {
    JSON.parse(text);
  } catch (error) {
    throw new Error(`input ${name}: this is no JSON (${error.message}); expected a list of values, such as [1, 2, 3]`);
  }
  return text.trim();
}

// The body for inputs whose data is JSON already. Of outputs whose classes have names that the page does not know, it asks for the
// best ones.
export function request(inputs, outputs = []) {
  const entries = inputs.map(({ data, ...head }) => `${JSON.stringify(head).slice(0, -1)},"data":${data}}`);
  const wanted = outputs.map(({ name, labelled }) => (labelled ? { name, parameters: { classification: BEST } } : { name }));
  const named = outputs.some(({ labelled }) => labelled) ? `,"outputs":${JSON.stringify(wanted)}` : "";
  return `{"inputs":[${entries.join(",")}]${named}}`;
}

// A class as a server writes it: score, index and name, between colons.
export function classOf(text) {
  const [score, index, ...name] = text.split(":");
  return { score: Number(score), index: Number(index), name: name.join(":") };
}

// The path and body that ask a text model; null for a model of another task.
export function textRequest({ name, task }, text, query) {
  const model = `?model=${encodeURIComponent(name)}`;
  if (task === "embeddings" || task === "text-embeddings") return { path: "/v1/embeddings", content: { model: name, input: text } };
  if (task === "sparse-embeddings") return { path: `/embed_sparse${model}`, content: { inputs: text } };
  if (task === "feature-extraction") return { path: `/embed_all${model}`, content: { inputs: text } };
  if (task === "text-classification") return { path: `/predict${model}`, content: { inputs: text } };
  if (task === "rerank") return { path: `/rerank${model}`, content: { query, texts: text.split("\n").filter(Boolean), return_text: true } };
  return null;
}

// The answer of such a path as lines of a score and a name; none for embeddings.
export function textLines(answer) {
  if (!Array.isArray(answer)) return [];
  return answer.filter((one) => one?.score !== undefined).slice(0, BEST).map(({ score, label, text }) => ({ score, name: label ?? text }));
}

// An answer; whole numbers that are none for JavaScript stay exact, in a browser that says how a number was written.
export function answered(text) {
  if (!/\d{16}/.test(text)) return JSON.parse(text);
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value,
  );
}
