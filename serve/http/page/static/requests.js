// Requests to the server, with the token of this tab, and the commands that send them from a shell.

import { answered } from "./tensors.js";

const KEY = "token"; // of the tab's own storage, which ends with the tab
const LONGEST = 50_000; // characters of a body that a shell takes as one word

export const token = () => sessionStorage.getItem(KEY);

export function signIn(given) {
  if (given) sessionStorage.setItem(KEY, given);
  else sessionStorage.removeItem(KEY);
}

// The server's answer. Without the first header, a refusal would make the browser ask for a name and a password. A page whose own
// address has these may not fetch a relative path.
export function ask(path, { headers = {}, ...options } = {}) {
  const own = { "x-requested-with": "halfserve" };
  if (token()) own.authorization = `Bearer ${token()}`;
  return fetch(location.origin + path, { ...options, headers: { ...own, ...headers } });
}

export async function post(path, body, type) {
  const started = performance.now();
  let response;
  try {
    response = await ask(path, { method: "POST", headers: { "content-type": type }, body });
  } catch {
    throw new Error("the server did not answer; it may be stopping, or the connection is lost");
  }
  const took = performance.now() - started;
  const text = await response.text();
  const content = answered(text);
  if (!response.ok) throw new Error(`${response.status}: ${content.error?.message ?? content.message ?? content.error}`);
  return { content, text, took };
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const plain = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : quoted(text));

// The command that posts a body: JSON as text, `{file: name}`, or null for what is too long and stands in request.json; without a
// body it gets.
export function curl(path, body, { origin = location.origin, hasToken = Boolean(token()) } = {}) {
  const parts = ["curl", plain(origin + path)];
  if (hasToken) parts.push('-H "authorization: Bearer $TOKEN"');
  if (body === undefined) return parts.join(" ");
  if (body?.file) parts.push(`--data-binary ${plain(`@${body.file}`)}`);
  else parts.push("-H 'content-type: application/json'", `-d ${body === null || body.length > LONGEST ? "@request.json" : quoted(body)}`);
  return parts.join(" ");
}
