// The precision certificate of a model: the verdict, its figures, and how far off the outputs were.
import { columns } from "./charts.js";
import { copyable } from "./copying.js";
import { badge, h, number, show } from "./dom.js";
import { ask } from "./requests.js";

const NAMES = { rounded: "as a GPU rounds", runtime: "as the CPU computes", cuda: "on CUDA" };

export class CertificateCard {
  constructor(element) {
    this.element = element;
  }

  async update(model) {
    const key = JSON.stringify([model.name, model.version, model.certificate, model.steps]);
    if (this.element.dataset.key === key) return;
    const title = h("h2", { id: "certificate-title" }, "Precision certificate");
    if (!model.certificate) {
      show(this.element, key, () => [title, ...missing(model)]);
      return;
    }
    show(this.element, key, () => [title, h("p", { class: "empty" }, "loading")]);
    const path = `/ui/certificates/${encodeURIComponent(model.name)}/${model.version}`;
    try {
      const response = await ask(path);
      const content = await response.json();
      if (this.element.dataset.key !== key) return;
      const parts = response.ok ? card(content) : [h("p", { class: "error" }, content.error)];
      this.element.replaceChildren(title, ...parts);
    } catch {
      delete this.element.dataset.key;
    }
  }
}

function missing(model) {
  if (model.steps?.length) {
    const text = "An ensemble has no certificate of its own. Each step's is on the page of its model:";
    const step = (line) => h("dd", { class: "mono" }, /, certificate (\w+)$/.exec(line)?.[1] ?? "none");
    const entries = model.steps.flatMap((line) => [h("dt", {}, stepLink(line)), step(line)]);
    return [h("p", { class: "empty" }, text), h("dl", {}, entries)];
  }
  const text = "None. halfserve convert and halfserve export write one beside the model: the proof that fp16 answers as float32 does.";
  return [h("p", { class: "empty" }, text)];
}

// A line begins with the model and its version, behind the ensembles around it.
function stepLink(line) {
  const id = line.split("  ")[0].split(" > ").at(-1);
  return h("a", { href: `#${encodeURIComponent(id)}` }, id);
}

function card(certificate) {
  const conversion = certificate.conversion ?? {};
  const nodes = conversion.float_nodes ? badge(`${conversion.fp16_nodes} of ${conversion.float_nodes} nodes in fp16`) : null;
  const verdict = certificate.passed ? badge("within budget", "good") : badge("over budget", "bad");
  const outputs = certificate.outputs ?? [];
  const plotted = outputs.find((output) => output.plot && output.execution === "rounded") ?? outputs.find((output) => output.plot);
  return [
    h("div", { class: "badges" }, verdict, badge(`${certificate.samples} samples`), nodes, badge(String(certificate.created_utc ?? "").slice(0, 10))),
    certificate.accuracy ? accuracy(certificate.accuracy) : null,
    table(outputs),
    plotted ? histogram(plotted, certificate.budget) : null,
    h("details", {}, h("summary", {}, "All of it, as JSON"), copyable(JSON.stringify(certificate, null, 2), "the certificate")),
  ].filter(Boolean);
}

function accuracy({ reference, rounded }) {
  const share = (value) => (typeof value === "number" ? `${(value * 100).toFixed(2)} %` : value);
  return h("p", {}, `Accuracy ${share(reference)} in float32, ${share(rounded)} in fp16.`);
}

const COLUMNS = ["output", "computed", "largest error", "of scale", "cosine", "same class"];

function table(outputs) {
  const rows = outputs.map(({ name, execution, figures, violations }) => {
    const texts = [
      h("span", { class: "mono" }, name),
      NAMES[execution] ?? execution,
      number(figures.max_abs_error),
      number(figures.max_scaled_error),
      typeof figures.cosine === "number" ? figures.cosine.toFixed(6) : String(figures.cosine),
      agreement(figures),
    ];
    const cells = texts.map((text, index) => h("td", { class: index > 1 ? "number" : null, "data-label": COLUMNS[index] }, text));
    return h("tr", { class: violations.length ? "bad" : null }, cells);
  });
  const head = h("tr", {}, COLUMNS.map((text, index) => h("th", { scope: "col", class: index > 1 ? "number" : null }, text)));
  return h("div", { class: "figures-table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
}

// "none": the rows are no evidence, such as where float32 makes the same choice in all of them.
function agreement(figures) {
  if (figures.agreement === null) return figures.constant_rows ? "none" : "–";
  return `${(figures.agreement * 100).toFixed(2)} %`;
}

// The bins' edges are log10 of the error in units of the output's scale.
function histogram({ name, plot }, budget) {
  const limit = budget?.max_scaled_error;
  const edges = plot.edges;
  const at = limit > 0 ? edges.findIndex((edge) => edge >= Math.log10(limit)) : -1;
  const entries = plot.counts.map((value, index) => [`1e${Math.round(edges[index])}`, value]);
  const text = `Errors of ${name}, relative to its scale`;
  const chart = columns(entries, number, text, { over: (index) => at >= 0 && index >= at, limit: at >= 0 ? at : null });
  return h("figure", {}, chart, h("figcaption", { class: "quiet" }, at >= 0 ? `${text}; the line is the budget` : text));
}
