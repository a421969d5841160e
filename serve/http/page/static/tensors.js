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

// What people wrote, as data; an Error says what is wrong with it.
export function written(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`input ${name}: this is no JSON (${error.message}); expected a list of values, such as [1, 2, 3]`);
  }
}
