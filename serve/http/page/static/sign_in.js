// Where a server asks for a token: the form for it, and who has signed in.
import { h, show } from "./dom.js";
import { signIn, token } from "./requests.js";

export class SignIn {
  constructor(element, holder, changed) {
    Object.assign(this, { element, holder, changed });
  }

  // Ask for a token; `refusal` is what the server said of the one that was sent, "" before one is.
  ask(refusal) {
    this.element.hidden = false;
    this.holder.hidden = true;
    show(this.element, `ask ${refusal}`, () => this.#form(refusal));
  }

  // Show whose token it is; "" where the server asks for none.
  done(name) {
    this.element.hidden = true;
    delete this.element.dataset.key;
    this.element.replaceChildren();
    this.holder.hidden = !name;
    const out = () => h("button", { class: "plain", type: "button", onclick: () => this.#take("") }, "Sign out");
    show(this.holder, name, () => [`signed in as ${name} `, token() ? out() : null]);
  }

  #form(refusal) {
    const field = h("input", { type: "password", autocomplete: "off", required: true, name: "token" });
    const form = h("form", {}, h("label", {}, "token", field), h("div", { class: "row" }, h("button", { class: "main", type: "submit" }, "Sign in")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#take(field.value.trim());
    });
    return [
      h("h2", { id: "sign-in-title" }, "Sign in"),
      h("p", { class: "quiet" }, "This server asks for a token. The page then shows and does what the token may. It forgets the token with this tab."),
      refusal ? h("p", { class: "error", role: "alert" }, refusal) : null,
      form,
    ];
  }

  #take(given) {
    signIn(given);
    this.changed();
  }
}
