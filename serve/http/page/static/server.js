// The server as a whole, from its metrics: members, processor, memory, connections, and what was refused.
import { badge, count, h, number } from "./dom.js";
import { ask } from "./requests.js";

const INTERVAL_MS = 5000;
const SECOND_LOOK_MS = 2000; // a processor's share is that of the time between two looks
const SHARE = 50; // the metrics of many models take long: they are asked for in at most a fiftieth of the time
const LINE = /^(\w+)(?:\{(.*)\})? (\S+)$/;

export class ServerCard {
  constructor(element) {
    this.element = element;
    this.reset();
  }

  async update() {
    const started = performance.now();
    if (document.hidden || started < this.next) return;
    this.next = Infinity; // one at a time
    const round = this.round;
    let response;
    let text;
    try {
      response = await ask("/metrics");
      text = await response.text();
    } catch {
      this.next = started + INTERVAL_MS;
      return;
    }
    if (round !== this.round) return;
    this.element.hidden = false;
    const title = h("h2", { id: "server-title" }, "The whole server");
    if (!response.ok) {
      // Not asked again: each refusal counts in the server's metrics.
      this.element.replaceChildren(title, h("p", { class: "empty" }, refusal(response.status)));
      return;
    }
    const now = { at: started / 1000, figures: read(text) };
    this.element.replaceChildren(title, h("dl", { class: "server" }, lines(now, this.before)));
    this.next = started + (this.before ? Math.max(INTERVAL_MS, SHARE * (performance.now() - started)) : SECOND_LOOK_MS);
    this.before = now;
  }

  // Forget what another token saw.
  reset() {
    this.next = -Infinity;
    this.before = null;
    this.round = {};
    this.element.hidden = true;
  }
}

function refusal(status) {
  return status === 403 ? "The token may not read metrics: it needs the role metrics." : `The metrics cannot be read: ${status}.`;
}

// The figures of the server itself: those without labels by name, and the refusals by reason.
export function read(text) {
  const found = { refused: {} };
  for (const line of text.split("\n")) {
    const [, name, labels, value] = LINE.exec(line) ?? [];
    if (name === "halfserve_requests_refused_total") found.refused[/reason="(\w+)"/.exec(labels)?.[1]] = Number(value);
    else if (name && labels === undefined) found[name] = Number(value);
    else if (name?.startsWith("nv_gpu_")) found[name] = (found[name] ?? 0) + Number(value);
  }
  return found;
}

const gigabytes = (bytes) => `${number(bytes / 1e9)} GB`;
const percent = (share) => `${Math.round(share * 100)} %`;

function lines({ at, figures: now }, before) {
  const spent = before ? Math.max(0, now.process_cpu_seconds_total - before.figures.process_cpu_seconds_total) / (at - before.at) : null;
  const machine = now.nv_cpu_utilization === undefined ? "" : `; the machine is ${percent(now.nv_cpu_utilization)} busy`;
  const memory = now.nv_cpu_memory_total_bytes === undefined ? "" : `; the machine has ${gigabytes(now.nv_cpu_memory_total_bytes)}, ${gigabytes(now.nv_cpu_memory_used_bytes)} of it in use`;
  const refused = Object.entries(now.refused).filter(([, times]) => times > 0);
  const entries = [
    ["members", now.halfserve_processes > 1 ? `${count(now.halfserve_processes)} serve together; the figures below are their sums` : "this process alone"],
    ["processor", spent === null ? "–" : `${number(spent, 2)} cores${machine}`],
    ["memory", `${gigabytes(now.process_resident_memory_bytes)}${memory}`],
    now.nv_gpu_memory_total_bytes ? ["GPU", `${percent(now.nv_gpu_utilization)} busy, ${gigabytes(now.nv_gpu_memory_used_bytes)} of ${gigabytes(now.nv_gpu_memory_total_bytes)} in use`] : null,
    ["connections", `${count(now.halfserve_http_connections ?? 0)} HTTP, ${count(now.halfserve_connections ?? 0)} gRPC`],
    ["refused before any queue", refused.length ? h("div", { class: "badges" }, refused.map(([reason, times]) => badge(`${reason.replaceAll("_", " ")} ${count(times)}`, "warn"))) : "none"],
  ];
  return entries.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}
