// Asks the server once a second what it does, and shows it.
import { CertificateCard } from "./certificate.js";
import { h } from "./dom.js";
import { Plots, cards, facts, figures, guard, heading, idOf, uptime } from "./models.js";
import { ask, token } from "./requests.js";
import { ServerCard } from "./server.js";
import { SignIn } from "./sign_in.js";
import "./theme.js";
import { Try } from "./try.js";

const at = (id) => document.getElementById(id);
const samples = new Map(); // by a model's id: all that are kept, oldest first
const tryCard = new Try(at("try"));
const certificateCard = new CertificateCard(at("certificate"));
const serverCard = new ServerCard(at("server"));
const signIn = new SignIn(at("sign-in"), at("holder"), restart);
let state = null;
let latest = 0;
let selected = fromHash();
let plots = null;

let next = null;
let round = 0; // of looks; a new one begins when somebody signs in or out

async function poll() {
  const own = round;
  try {
    const response = await ask(`/ui/state?since=${latest}`, { signal: AbortSignal.timeout(5000) });
    const content = await response.json();
    if (own !== round) return;
    if (response.status === 401 || response.status === 403) {
      refused(response.status === 401 && !token() ? "" : content.error);
      return;
    }
    if (!response.ok) throw new Error(content.error);
    take(content);
    signIn.done(content.holder);
    draw();
    serverCard.update();
  } catch {
    if (own !== round) return;
    status("lost", "no answer from the server; trying again");
  }
  next = setTimeout(poll, document.hidden ? 5000 : (state?.interval_s ?? 1) * 1000);
}

function refused(error) {
  status("unknown", "asks for a token");
  forget();
  signIn.ask(error);
}

function forget() {
  state = null;
  latest = 0;
  samples.clear();
  serverCard.reset();
  at("detail").hidden = true;
  for (const id of ["models", "uptime"]) at(id).replaceChildren();
  for (const id of ["models", "try", "certificate"]) delete at(id).dataset.key;
}

function restart() {
  clearTimeout(next);
  round += 1;
  forget();
  poll();
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

// A browser follows a link without the token, so that the page shows what it is about.
at("metrics").addEventListener("click", async (event) => {
  if (!token()) return;
  event.preventDefault();
  const response = await ask("/metrics");
  location.assign(URL.createObjectURL(new Blob([await response.text()], { type: "text/plain; charset=utf-8" })));
});
window.addEventListener("hashchange", () => {
  selected = fromHash();
  if (state) draw();
});
poll();
