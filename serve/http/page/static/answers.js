// What a model answered, beside what was expected where that is known.
import { copyable } from "./copying.js";
import { badge, h, number, shapeText } from "./dom.js";
import { best, classOf, distance, scores } from "./tensors.js";

const MOST_SHOWN = 24;
const MOST_CLASSES = 5;

export function shown({ text, took }, outputs, parameters = []) {
  return [
    h("div", { class: "badges" }, badge("answered", "good"), badge(`${number(took)} ms to this page and back`), parameters),
    ...outputs,
    h("details", {}, h("summary", {}, "The answer as JSON"), copyable(text, "the answer")),
  ];
}

// One output of a model; `labels` are the names of its classes, `how` is what makes scores of them, `expected` is the output that
// was recorded for the same input.
export function output({ name, datatype, shape, data }, { labels = null, how = "softmax", expected = null } = {}) {
  const row = shape.length > 1 ? shape.at(-1) : data.length;
  const first = data.slice(0, row);
  const wanted = expected ? expected.data.slice(0, row) : null;
  const isNamed = labels?.length === row;
  const lines = isNamed ? named(first.map(Number), labels, how, wanted?.map(Number)) : plain(first, wanted);
  const title = h("h3", {}, `${name} `, isNamed ? "the best classes, by score" : h("span", { class: "mono" }, `${datatype} ${shapeText(shape)}`));
  const left = isNamed ? 0 : data.length - lines.length;
  return h(
    "div",
    {},
    title,
    expected ? verdict(data, expected.data, row) : null,
    table(lines, Boolean(wanted)),
    left > 0 ? h("p", { class: "quiet" }, `and ${left.toLocaleString("en")} more`) : null,
  );
}

function plain(values, expected) {
  const shownValues = values.slice(0, MOST_SHOWN);
  const first = shownValues.length > 1 ? best(values.map(Number)) : -1;
  return shownValues.map((value, index) => ({ name: index, value, size: Number(value), expected: expected?.[index], isBest: index === first }));
}

function named(logits, labels, how, expected) {
  const [given, wanted] = [scores(logits, how), expected && scores(expected, how)];
  const order = [...given.keys()].sort((a, b) => given[b] - given[a]).slice(0, MOST_CLASSES);
  return order.map((at, index) => ({
    name: labels[at] || `class ${at}`,
    value: given[at],
    size: given[at],
    expected: wanted?.[at],
    isBest: index === 0,
  }));
}

function verdict(served, expected, row) {
  const share = distance(served, expected);
  const isSame = best(served.slice(0, row).map(Number)) === best(expected.slice(0, row).map(Number));
  const text = `differs by at most ${number(share * 100, 2)} % of the largest expected value`;
  const classes = row > 1 ? badge(isSame ? "same largest value as expected" : "another largest value than expected", isSame ? "good" : "bad") : null;
  return h("div", { class: "badges" }, classes, badge(text));
}

// The best classes, where the server named them: the texts of its classification.
export function classes({ name, shape, data }) {
  const lines = data.slice(0, shape.at(-1)).map(classOf);
  return h("div", {}, h("h3", {}, `${name} `, "the best classes"), ranking(lines.map((one) => ({ ...one, name: one.name || `class ${one.index}` }))));
}

export function ranking(lines) {
  return table(lines.map(({ score, name }, index) => ({ name, value: score, size: score, isBest: index === 0 })), false);
}

// Lines of a name, a bar and a value; bars start in the middle where some value is below zero.
function table(lines, isCompared) {
  const sizes = lines.flatMap(({ size, expected }) => [size, Number(expected ?? 0)]).filter(Number.isFinite);
  const largest = Math.max(...sizes.map(Math.abs), 0);
  const from = sizes.some((size) => size < 0) ? 50 : 0;
  const heads = isCompared ? ["", "", "served", "expected"].map((text) => h("span", { class: "quiet value" }, text)) : [];
  return h("div", { class: isCompared ? "values compared" : "values" }, heads, lines.flatMap((line) => cells(line, largest, from, isCompared)));
}

function cells({ name, value, size, expected, isBest }, largest, from, isCompared) {
  const bar = h("div", { class: size < 0 ? "fill below" : "fill" });
  const share = Number.isFinite(size) && largest ? (size / largest) * (100 - from) : 0;
  bar.style.width = `${Math.abs(share)}%`;
  bar.style.marginLeft = `${share < 0 ? from + share : from}%`;
  const special = typeof value === "string" && /^(NaN|-?Infinity)$/.test(value);
  return [
    h("span", { class: isBest ? "name best" : "name" }, name),
    h("div", { class: "track" }, bar),
    h("span", { class: `value number ${special ? "special" : ""} ${isBest ? "best" : ""}` }, written(value)),
    isCompared ? h("span", { class: "value number quiet" }, written(expected)) : null,
  ];
}

const written = (value) => (typeof value === "number" ? number(value, 4) : String(value).slice(0, 60));
