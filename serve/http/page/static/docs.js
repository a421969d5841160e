// The OpenAPI document as a page: each route with its parameters, bodies, answers and a command that asks it.
import { copyable } from "./copying.js";
import { badge, h, prose } from "./dom.js";
import { ask, curl } from "./requests.js";
import { remark, resolve, typeText } from "./schema_text.js";
import { SignIn } from "./sign_in.js";
import "./theme.js";

const at = (id) => document.getElementById(id);
const signIn = new SignIn(at("sign-in"), at("holder"), load);

async function load() {
  try {
    const response = await ask("/openapi.json");
    const content = await response.json();
    if (response.status === 401 || response.status === 403) {
      at("routes").replaceChildren();
      signIn.ask(response.status === 401 ? "" : content.error);
      return;
    }
    if (!response.ok) throw new Error(content.error);
    signIn.done("");
    show(content);
  } catch (error) {
    at("routes").replaceChildren(h("p", { class: "card error" }, `The document cannot be read: ${error.message}. Load the page again.`));
  }
}

function show(content) {
  const all = Object.entries(content.paths).flatMap(([path, item]) =>
    Object.entries(item)
      .filter(([method]) => method !== "parameters")
      .map(([method, operation]) => ({ path, method, operation, parameters: [...(item.parameters ?? []), ...(operation.parameters ?? [])] })),
  );
  const search = h("input", { type: "search", "aria-label": "find a route" });
  const sections = content.tags.map(({ name }) => {
    const own = all.filter(({ operation }) => operation.tags.includes(name));
    return h("section", { class: "card", "aria-label": name }, h("h2", {}, name), own.map((one) => route(one, content)));
  });
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    for (const section of sections) {
      const routes = [...section.querySelectorAll(".route")];
      for (const one of routes) one.hidden = !one.querySelector("summary").textContent.toLowerCase().includes(wanted);
      section.hidden = routes.every((one) => one.hidden);
    }
  });
  const { title, version, description } = content.info;
  const head = h("section", { class: "card" }, h("h2", {}, `${title} ${version}`), h("p", {}, prose(description)), h("p", {}, h("label", {}, "find a route", search)));
  at("routes").replaceChildren(head, ...sections);
  at(decodeURIComponent(location.hash.slice(1)))?.setAttribute("open", "");
}

function route({ path, method, operation, parameters }, content) {
  const summary = h("summary", {}, badge(method.toUpperCase(), "method"), " ", h("span", { class: "mono" }, path), " ", h("span", { class: "quiet" }, operation.summary));
  const element = h("details", { class: "route", id: operation.operationId }, summary);
  // Made when it is opened first, as there are many.
  element.addEventListener("toggle", () => {
    if (element.open && element.children.length === 1) element.append(body({ path, method, operation, parameters }, content));
  });
  return element;
}

function body({ path, method, operation, parameters }, content) {
  const takes = resolve(operation.requestBody, content);
  return h(
    "div",
    { class: "inside" },
    operation.description ? h("p", {}, prose(operation.description)) : null,
    parameters.length ? [h("h3", {}, "Parameters"), h("dl", {}, parameters.flatMap((one) => parameter(resolve(one, content), content)))] : null,
    takes ? [h("h3", {}, takes.required ? "Body" : "Body, which may be left out"), bodies(takes.content, content)] : null,
    h("h3", {}, "From a shell"),
    copyable(command(path, method, takes), "the command"),
    h("h3", {}, "Answers"),
    Object.entries(operation.responses).map(([status, one]) => answer(status, resolve(one, content), content)),
  );
}

function parameter(one, content) {
  const text = [typeText(one.schema, content), one.description, remark(one.schema)].filter(Boolean).join("; ");
  return [h("dt", { class: "mono" }, one.name), h("dd", {}, `in the ${one.in}, ${one.required ? "required" : "optional"}: ${text}`)];
}

function bodies(contents, content) {
  return Object.entries(contents ?? {}).map(([type, { schema, example }]) =>
    h(
      "div",
      {},
      h("p", { class: "mono quiet" }, type),
      schema ? h("pre", {}, typeText(schema, content)) : null,
      example === undefined ? null : [h("p", { class: "quiet" }, "for example"), copyable(JSON.stringify(example, null, 2), "the example")],
    ),
  );
}

function answer(status, one, content) {
  const head = h("p", {}, badge(status, status < 300 ? "good" : "warn"), " ", prose(one.description));
  if (status < 300) return h("div", {}, head, bodies(one.content, content));
  return h("details", {}, h("summary", {}, head), bodies(one.content, content));
}

// Names of models and versions stand in capitals, as a shell and curl mean something else by braces.
function command(path, method, takes) {
  const example = path.replace(/\{(\w+)\}/g, (_, name) => name.toUpperCase());
  const json = takes?.content["application/json"];
  if (!takes) return method === "get" ? curl(example) : curl(example).replace("curl", "curl -X POST");
  if (json?.example !== undefined) return curl(example, JSON.stringify(json.example));
  return json && Object.keys(takes.content).length === 1 ? curl(example, null) : curl(example, { file: "FILE" });
}

load();
