// Labelled form controls.
import { el, freshId, type Child } from "./dom";
import { visible } from "./format";

export interface Option {
  value: string;
  label: string;
}

export interface SelectControl {
  node: HTMLElement;
  select: HTMLSelectElement;
}

export function select(
  label: string,
  options: Option[],
  value: string,
  change: (value: string) => void,
  test?: string,
): SelectControl {
  const id = freshId("select");
  const box = el("select", { id, "data-test": test ?? null });
  setOptions(box, options, value);
  box.addEventListener("change", () => change(box.value));
  return { node: el("div", { class: "control" }, el("label", { for: id }, label), box), select: box };
}

export function setOptions(box: HTMLSelectElement, options: Option[], value: string): void {
  box.replaceChildren(...options.map((option) => el("option", { value: option.value }, visible(option.label))));
  box.value = options.some((option) => option.value === value) ? value : (options[0]?.value ?? "");
}

export interface Slider {
  node: HTMLElement;
  input: HTMLInputElement;
  show: (text: string) => void;
}

export function slider(
  label: string,
  range: { low: number; high: number; step: number; value: number },
  change: (value: number) => void,
  test?: string,
): Slider {
  const id = freshId("slider");
  const input = el("input", {
    id,
    type: "range",
    min: range.low,
    max: range.high,
    step: range.step,
    value: range.value,
    "data-test": test ?? null,
  });
  const output = el("output", { for: id });
  input.addEventListener("input", () => change(Number(input.value)));
  const show = (text: string): void => {
    output.textContent = text;
    input.setAttribute("aria-valuetext", text);
  };
  show(String(range.value));
  return { node: el("div", { class: "control slider" }, el("label", { for: id }, label), input, output), input, show };
}

export function toggle(label: string, checked: boolean, change: (on: boolean) => void, test?: string): HTMLElement {
  const id = freshId("toggle");
  const box = el("input", { id, type: "checkbox", role: "switch", "data-test": test ?? null });
  box.checked = checked;
  box.addEventListener("change", () => change(box.checked));
  return el("div", { class: "control switch" }, box, el("label", { for: id }, label));
}

/** A row of exclusive choices. */
export function choices(
  legend: string,
  options: Option[],
  value: string,
  change: (value: string) => void,
): HTMLElement {
  const name = freshId("choice");
  const items = options.map((option) => {
    const id = freshId("radio");
    const box = el("input", { id, type: "radio", name, value: option.value });
    box.checked = option.value === value;
    box.addEventListener("change", () => box.checked && change(option.value));
    return el("span", { class: "choice" }, box, el("label", { for: id }, option.label));
  });
  return el("fieldset", { class: "control choices" }, el("legend", {}, legend), ...items);
}

export function button(label: Child, press: () => void, className = "", test?: string): HTMLButtonElement {
  return el("button", { type: "button", class: className || null, "data-test": test ?? null, onclick: press }, label);
}

export function bar(...controls: Child[]): HTMLElement {
  return el("div", { class: "controls" }, ...controls);
}
