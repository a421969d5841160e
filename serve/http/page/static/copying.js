// Text with a button that copies it.
import { h } from "./dom.js";

const LONGEST = 20_000; // characters that are shown; all are copied

export function copyable(text, name) {
  const shown = text.length > LONGEST ? `${text.slice(0, LONGEST)} … (${text.length.toLocaleString("en")} characters)` : text;
  const pre = h("pre", { tabindex: 0, "aria-label": name }, shown);
  const button = h("button", { type: "button", class: "plain copy", "aria-label": `Copy ${name}` }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text)) ? "Copied" : "Select it and press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return h("div", { class: "copyable" }, button, pre);
}

// Pages over plain HTTP have a clipboard on this machine alone; elsewhere an old command of browsers copies what is selected.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", { class: "unseen", readonly: true });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

export function save(text, name) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
