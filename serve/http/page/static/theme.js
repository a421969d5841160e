// Light and dark: as the reader's system has it, until the button says otherwise.
const root = document.documentElement;
const remembered = localStorage.getItem("theme");
if (remembered === "dark" || remembered === "light") root.dataset.theme = remembered;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});
