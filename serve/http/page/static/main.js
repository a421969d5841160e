// Asks the server once a second what it does, and shows it.
import { CertificateCard } from "./certificate.js";
import { ask, h } from "./dom.js";
import { Plots, cards, facts, figures, guard, heading, idOf, uptime } from "./models.js";
import { Try } from "./try.js";

const at = (id) => document.getElementById(id);
const samples = new Map(); // by a model's id: all that are kept, oldest first
const tryCard = new Try(at("try"));
const certificateCard = new CertificateCard(at("certificate"));
let state = null;
let latest = 0;
let selected = fromHash();
let plots = null;

async function poll() {
  try {
    const response = await ask(`/ui/state?since=${latest}`, { signal: AbortSignal.timeout(5000) });
    if (!response.ok) throw new Error(String(response.status));
    take(await response.json());
    draw();
  } catch {
    status("lost", "no answer from the server; trying again");
  }
  setTimeout(poll, document.hidden ? 5000 : (state?.interval_s ?? 1) * 1000);
}

function take(content) {
  state = content;
  const ids = new Set(content.models.map(idOf));
  for (const id of samples.keys()) if (!ids.has(id)) samples.delete(id);
  for (const model of content.models) {
    if (!model.samples) continue;
    const known = samples.get(idOf(model)) ?? [];
    known.push(...model.samples);
    samples.set(idOf(model), known.slice(-content.kept_samples));
    latest = Math.max(latest, known.at(-1)?.[0] ?? 0);
    model.samples = samples.get(idOf(model));
  }
}

function draw() {
  const { models } = state;
  status(state.ready ? "READY" : "UNLOADING", state.ready ? "ready" : "draining: takes no new requests");
  at("uptime").textContent = uptime(state.uptime_s);
  const chosen = models.find((model) => idOf(model) === selected) ?? models.find((model) => model.state === "READY") ?? models[0];
  cards(at("models"), models, chosen && idOf(chosen), choose);
  at("detail").hidden = !chosen;
  if (!chosen) return;
  document.title = `${chosen.name} – halfserve`;
  plots ??= new Plots(at("plots"), state);
  heading(at("heading"), chosen);
  figures(at("figures"), chosen);
  plots.update(chosen, state.time_s);
  tryCard.update(chosen);
  certificateCard.update(chosen);
  guard(at("guard"), chosen, state.events);
  facts(at("facts"), chosen);
}

function choose(id) {
  selected = id;
  history.replaceState(null, "", `#${encodeURIComponent(id)}`);
  draw();
  const button = at("models").querySelector('[aria-pressed="true"]');
  button?.focus();
}

function status(dot, text) {
  const element = at("status");
  if (element.dataset.text === text) return; // said once, not once a second
  element.dataset.text = text;
  element.replaceChildren(h("span", { class: "dot", "data-state": dot }), h("span", {}, text));
}

function fromHash() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return ""; // somebody cut the address in the middle of a character
  }
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
}

const remembered = localStorage.getItem("theme");
if (remembered === "dark" || remembered === "light") document.documentElement.dataset.theme = remembered;
at("theme").addEventListener("click", theme);
window.addEventListener("hashchange", () => {
  selected = fromHash();
  if (state) draw();
});
poll();
