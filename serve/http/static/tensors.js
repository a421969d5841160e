// Make tensors for a form, and check those that people write.

export const FILLS = ["random", "zeros", "ones", "own JSON"];

const RANGES = { INT8: 127, UINT8: 255 };

export function elements(shape) {
  return shape.reduce((product, size) => product * size, 1);
}

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

// The body for inputs whose data is JSON already.
export function request(inputs) {
  const entries = inputs.map(({ data, ...head }) => `${JSON.stringify(head).slice(0, -1)},"data":${data}}`);
  return `{"inputs":[${entries.join(",")}]}`;
}

// An answer; whole numbers that are none for JavaScript stay exact, in a browser that says how a number was written.
export function answered(text) {
  if (!/\d{16}/.test(text)) return JSON.parse(text);
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value,
  );
}
