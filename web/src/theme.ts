// Light or dark: the system's choice until the button is used; nothing is stored.
import { el } from "./dom";

type Theme = "light" | "dark";

export function currentTheme(): Theme {
  const chosen = document.documentElement.dataset["theme"];
  if (chosen === "light" || chosen === "dark") return chosen;
  return window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

export function themeButton(): HTMLButtonElement {
  const button = el("button", { type: "button", class: "quiet", "data-test": "theme" });
  const label = (): void => {
    button.textContent = currentTheme() === "dark" ? "☀ Light theme" : "☾ Dark theme";
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset["theme"] = currentTheme() === "dark" ? "light" : "dark";
    label();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();
  return button;
}
