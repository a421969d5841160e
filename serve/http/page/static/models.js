// The list of models, and what one of them is and does.
import { LinePlot, columns } from "./charts.js";
import { badge, clock, count, h, mark, milliseconds, number, parts, shapeText, show, span } from "./dom.js";

const SERIES = ["time_s", "requests", "failures", "rows", "batch_rows", "median_ms", "p99_ms", "waiting"];
export const AT = Object.fromEntries(SERIES.map((name, index) => [name, index]));
const WINDOW = 5; // samples that "now" is the mean of, so that figures can be read

export const idOf = (model) => `${model.name}/${model.version}`;

function mean(samples, name) {
  const values = samples.slice(-WINDOW).map((sample) => sample[AT[name]]).filter((value) => value !== null);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

// A type of numbers without the remark behind it.
export function shortPrecision(precision) {
  return precision.split(" (")[0];
}

export function short(provider) {
  return provider.replace(/ExecutionProvider$/, "");
}

function certificateBadge(certificate) {
  if (!certificate) return null;
  return certificate.passed ? badge("certificate ✓", "good") : badge("certificate: over budget", "bad");
}

export function cards(element, models, selected, choose) {
  if (!models.length) {
    show(element, "none", () => h("p", { class: "card empty" }, "No models are served yet."));
    return;
  }
  const key = JSON.stringify([selected, models.map((m) => [m.name, m.version, m.state, m.reason, m.provider, m.precision, m.certificate, m.guard?.degraded, m.answers])]);
  show(element, key, () => models.map((model) => card(model, idOf(model) === selected, choose)));
  element.querySelectorAll(".rate").forEach((rate, index) => {
    const now = mean(models[index].samples ?? [], "requests");
    rate.textContent = now === null ? "" : `${number(now)}/s`;
  });
}

// Whether a model is not loaded now, and a request would load it.
const isOnDemand = (model) => (model.reason ?? "").startsWith("available on demand");

function stateBadge(model) {
  if (isOnDemand(model)) return badge("on demand");
  return badge(model.state.toLowerCase(), { READY: "good", UNAVAILABLE: "bad" }[model.state] ?? "warn");
}

function card(model, pressed, choose) {
  const state = model.state === "READY" ? null : stateBadge(model);
  return h(
    "button",
    { class: "card model", type: "button", "aria-pressed": String(pressed), onclick: () => choose(idOf(model)) },
    h(
      "span",
      { class: "top" },
      h("span", { class: "dot", "data-state": model.state }),
      h("span", { class: "name", title: model.name }, model.name),
      model.version ? h("span", { class: "quiet" }, `v${model.version}`) : null,
      h("span", { class: "rate number" }),
    ),
    h(
      "span",
      { class: "badges" },
      state,
      model.answers === false ? badge("not ready", "bad") : null,
      model.provider ? [badge(short(model.provider)), badge(shortPrecision(model.precision))] : null,
      certificateBadge(model.certificate),
      model.guard?.degraded ? badge("drifting", "bad") : null,
    ),
    model.reason ? h("span", { class: isOnDemand(model) ? "quiet" : "reason" }, model.reason) : null,
  );
}

export function heading(element, model) {
  const key = JSON.stringify([model.name, model.version, model.state, model.reason, model.provider, model.precision, model.measured, model.answers]);
  show(element, key, () => [
    h("h2", {}, model.name, model.version ? h("span", { class: "quiet" }, ` version ${model.version}`) : null),
    h(
      "div",
      { class: "badges" },
      stateBadge(model),
      model.answers === false ? badge("not ready: no copy is up, or the guard stopped it", "bad") : null,
      model.provider ? [badge(model.provider), badge(model.precision)] : null,
      model.provider ? badge(model.max_batch_size ? `batches of up to ${model.max_batch_size}` : "no batching") : null,
    ),
    model.measured ? h("p", { class: "quiet" }, `measured when it was loaded: ${model.measured}`) : null,
    model.reason ? h("p", { class: isOnDemand(model) ? "quiet" : "reason" }, model.reason) : null,
  ]);
}

export function figures(element, model) {
  const samples = model.samples ?? [];
  const tile = (label, [value, unit = ""], bad = false) =>
    h("div", { class: bad ? "figure bad" : "figure" }, h("div", { class: "value" }, value, unit ? h("small", {}, unit) : null), h("div", { class: "label" }, label));
  const failures = mean(samples, "failures") ?? 0;
  element.replaceChildren(
    tile("requests answered", [number(mean(samples, "requests") ?? 0), "/s"]),
    tile("median latency", milliseconds(mean(samples, "median_ms"))),
    tile("p99 latency", milliseconds(mean(samples, "p99_ms"))),
    tile("rows in a batch", [number(mean(samples, "batch_rows"))]),
    tile("waiting now", [count(model.waiting ?? 0)]),
    tile("failed or refused", [number(failures), "/s"], failures > 0),
  );
}

export class Plots {
  constructor(element, timing) {
    const ms = (value) => milliseconds(value).join(" ").trim();
    const shape = { interval: timing.interval_s, kept: timing.kept_samples };
    this.lines = [
      new LinePlot("Requests answered per second", [{ label: "", index: AT.requests }], number, shape),
      new LinePlot(
        "Latency",
        [{ label: "median", index: AT.median_ms }, { label: "p99", index: AT.p99_ms, className: "second" }],
        ms,
        shape,
      ),
      new LinePlot("Rows in a batch", [{ label: "", index: AT.batch_rows }], number, shape),
    ];
    this.edges = timing.latency_edges_ms;
    const minutes = Math.round((timing.interval_s * timing.kept_samples) / 60);
    this.title = `Requests by latency, last ${minutes} min`;
    this.histogram = h("div");
    const spread = h("div", { class: "card plot" }, h("div", { class: "head" }, h("h3", {}, this.title)), this.histogram);
    element.replaceChildren(...this.lines.map((plot) => plot.element), spread);
  }

  update(model, now) {
    for (const plot of this.lines) plot.draw(model.samples ?? [], now);
    const width = this.histogram.clientWidth;
    show(this.histogram, JSON.stringify([model.latencies ?? [], width]), () => columns(this.#latencies(model.latencies ?? []), number, this.title, { width }));
  }

  // From the first bucket with a request to the last one.
  #latencies(counts) {
    const used = counts.flatMap((times, index) => (times ? [index] : []));
    const [first, last] = used.length ? [used[0], used.at(-1)] : [9, 12];
    const edge = (index) => (index < this.edges.length ? `≤${milliseconds(this.edges[index]).join(" ")}` : "more");
    return Array.from({ length: last - first + 1 }, (_, at) => [edge(first + at), counts[first + at] ?? 0]);
  }
}

const STAGES = { queue: "waiting in the queue", input: "putting the batch together", compute: "computing", output: "taking it apart" };

export function facts(element, model) {
  const key = JSON.stringify([model.name, model.version, Boolean(model.inputs)]);
  const { title, now, times, sizes } = parts(element, key, ["title", "now", "times", "sizes"]);
  show(title, "title", () => h("h2", { id: "facts-title" }, "Since it was loaded"));
  if (!model.inputs) {
    show(now, "none", () => h("p", { class: "empty" }, "Nothing: it is not served."));
    return;
  }
  const counts = JSON.stringify([model.requests, model.failures, model.batches, model.last_inference_ms, model.copies, model.steps]);
  show(now, counts, () => totals(model));
  show(times, counts, () => stages(model) ?? []);
  if (model.batch_sizes.length) batchSizes(sizes, model);
}

function totals(model) {
  const failures = Object.entries(model.failures).map(([reason, times]) => `${count(times)} ${reason.replaceAll("_", " ")}`);
  const tensors = (specs) => specs.map((spec) => h("div", { class: "mono" }, `${spec.name} ${spec.datatype} ${shapeText(spec.shape)}`));
  const entries = [
    ["inputs", tensors(model.inputs)],
    ["outputs", tensors(model.outputs)],
    model.steps.length ? ["steps", model.steps.map((step) => h("div", { class: "mono" }, step))] : ["copies", copies(model.copies)],
    ["answered", `${count(model.requests)} requests, ${count(model.rows)} rows in ${count(model.batches)} batches`],
    ["failed", failures.length ? failures.join(", ") : "none"],
    ["last one", model.last_inference_ms ? clock(model.last_inference_ms / 1000) : "not yet"],
  ];
  return h("dl", {}, entries.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

// How many are up, and what happened to those to which something did.
function copies(all) {
  const up = all.filter((copy) => copy.up).length;
  const told = all.flatMap((copy, index) => [
    copy.restarts ? `copy ${index} was restarted ${count(copy.restarts)} times` : [],
    copy.fault ? `copy ${index}: ${copy.fault}` : [],
    copy.most_rows === null ? [] : `copy ${index} has memory for ${count(copy.most_rows)} rows at once`,
  ]);
  const lines = told.flat().map((text) => h("div", { class: "reason" }, text));
  return [up === all.length ? `${count(up)} up` : h("span", { class: "reason" }, `${count(up)} of ${count(all.length)} up`), lines].flat();
}

function stages(model) {
  const times = Object.entries(model.stages_ns);
  const all = times.reduce((sum, [, ns]) => sum + ns, 0);
  if (!all) return null;
  const text = times.map(([name, ns]) => `${STAGES[name]} ${Math.round((ns / all) * 100)} %`);
  const bar = times.map(([name, ns]) => {
    const part = h("span", { class: name });
    part.style.flexGrow = String(ns / all);
    return part;
  });
  return [
    h("h3", { class: "above" }, "Where a request's time goes"),
    h("div", { class: "share", role: "img", "aria-label": text.join(", ") }, bar),
    h("div", { class: "keys" }, times.map(([name], index) => h("span", { class: `key ${name}` }, text[index]))),
  ];
}

function batchSizes(element, model) {
  show(element, "sizes", () => h("details", {}, h("summary", {}, "Batches by size"), h("figure")));
  const entries = model.batch_sizes.map(([size, times]) => [String(size), times]);
  show(element.querySelector("figure"), JSON.stringify(entries), () => columns(entries, number, "batches by their number of rows"));
}

export function guard(element, model, events) {
  const own = events.filter((event) => event.model === idOf(model));
  const key = JSON.stringify([model.name, model.version]);
  const { title, counts, latest } = parts(element, key, ["title", "counts", "latest"]);
  show(title, "title", () => h("h2", { id: "guard-title" }, "Precision guard"));
  show(counts, JSON.stringify(model.guard ?? null), () =>
    model.guard ? [verdict(model.guard), counters(model.guard), drift(model.guard)].flat() : h("p", { class: "empty" }, "Off for this model."),
  );
  if (model.guard) show(latest, JSON.stringify(own), () => list(own));
}

function verdict(state) {
  const calm = state.degraded ? badge("drifts from float32", "bad") : badge(state.shadow_runs ? "agrees with float32" : "watching", "good");
  return h("div", { class: "badges" }, calm, badge(`policy: ${state.policy}`));
}

function counters(state) {
  const entries = [
    ["answers with NaN or infinity", count(state.non_finite_requests)],
    ["… because the request had some", count(state.from_inputs)],
    ["rejected", count(state.rejected)],
    ["answered from float32", count(state.fallbacks)],
    ["compared with float32", count(state.shadow_runs)],
    ["same class", state.agreement === null ? "–" : `${(state.agreement * 100).toFixed(2)} %`],
  ];
  return h("dl", {}, entries.flatMap(([name, value]) => [h("dt", {}, name), h("dd", { class: "number" }, value)]));
}

function drift(state) {
  const known = state.drift.filter((entry) => entry.counts.some((times) => times > 0));
  return known.map((entry) => {
    const labels = entry.counts.map((times, index) => [entry.bounds[index] === undefined ? "more" : mark(entry.bounds[index]), times]);
    const at = state.threshold === null ? -1 : entry.bounds.findIndex((bound) => bound !== null && bound > state.threshold);
    const chart = columns(labels, number, "distance from float32, relative to the output's scale", { over: (index) => at >= 0 && index >= at });
    return h("figure", {}, chart, h("figcaption", { class: "quiet" }, "Distance from float32, relative to the output's scale"));
  });
}

function list(events) {
  if (!events.length) return h("p", { class: "empty above" }, "No events.");
  const kinds = { degraded: "bad", rejected: "bad", non_finite: "warn", fallback: "warn", recovered: "good" };
  const lines = events.map((event) =>
    h("li", {}, h("time", { class: "number" }, clock(event.time_s)), badge(event.kind.replaceAll("_", " "), kinds[event.kind] ?? ""), h("span", {}, event.text)),
  );
  return h("ul", { class: "events", tabindex: 0, "aria-label": "Events, newest first" }, lines);
}

export function uptime(seconds) {
  return `up ${span(seconds)}`;
}
