// A text as tokens coloured by a number; one of them is chosen.
import { el, replace } from "./dom";
import { loss, token, visible } from "./format";

export interface ChipsOptions {
  label: string;
  choose: (index: number) => void;
}

export interface Chips {
  node: HTMLElement;
  /** Values decide the shade: from 0 to the highest, or both ways around 0 if signed. */
  update: (tokens: string[], values: (number | null)[], signed?: boolean) => void;
  choose: (index: number) => void;
  /** Shows a token as chosen without telling anyone. */
  mark: (index: number) => void;
}

function shade(value: number | null | undefined, high: number, signed: boolean): string | null {
  if (value === null || value === undefined || !Number.isFinite(value) || !high) return null;
  const share = Math.min(1, Math.abs(value) / high);
  const colour = signed && value < 0 ? "--cool" : "--heat";
  return `background:color-mix(in oklab, var(${colour}) ${Math.round(100 * share)}%, var(--chip))`;
}

export function chips(options: ChipsOptions): Chips {
  const box = el("div", {
    class: "chips",
    role: "listbox",
    "aria-label": options.label,
    "aria-orientation": "horizontal",
  });
  let chosen = -1;
  const all = (): HTMLElement[] => [...box.querySelectorAll<HTMLElement>("[role=option]")];
  const mark = (index: number): void => {
    all().forEach((chip, at) => {
      chip.setAttribute("aria-selected", at === index ? "true" : "false");
      chip.tabIndex = at === Math.max(0, index) ? 0 : -1;
    });
    chosen = index;
  };
  const choose = (index: number, focus = false): void => {
    const list = all();
    const next = Math.min(list.length - 1, Math.max(0, index));
    if (next < 0) return;
    mark(next);
    if (focus) list[next]?.focus();
    options.choose(next);
  };
  box.addEventListener("click", (event) => {
    const chip = (event.target as HTMLElement).closest<HTMLElement>("[data-index]");
    if (chip) choose(Number(chip.dataset["index"]));
  });
  box.addEventListener("keydown", (event) => {
    const by: Record<string, number> = {
      ArrowRight: chosen + 1,
      ArrowDown: chosen + 1,
      ArrowLeft: chosen - 1,
      ArrowUp: chosen - 1,
      Home: 0,
      End: Infinity,
      Enter: chosen,
      " ": chosen,
    };
    const next = by[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(Math.min(next, all().length - 1), true);
  });
  return {
    node: box,
    choose: (index) => choose(index),
    mark,
    update: (tokens, values, signed = false) => {
      const sizes = values.filter((value): value is number => value !== null && Number.isFinite(value)).map(Math.abs);
      const high = Math.max(signed ? 1e-9 : 0, ...sizes);
      const focused = box.contains(document.activeElement);
      replace(
        box,
        ...tokens.map((text, index) => {
          const value = values[index];
          const says =
            value === null || value === undefined ? "no loss" : `loss ${signed ? "change " : ""}${loss(value)}`;
          return el(
            "bdi",
            {
              role: "option",
              class: "chip",
              "data-test": "token",
              "data-index": index,
              tabindex: index === 0 ? 0 : -1,
              "aria-selected": "false",
              "aria-label": `token ${index + 1}: ${visible(text) || "empty"}, ${says}`,
              title: `${index + 1}: ${says}`,
              style: shade(value, high, signed),
            },
            token(text),
          );
        }),
      );
      mark(Math.min(chosen, tokens.length - 1));
      if (focused) all()[Math.max(0, chosen)]?.focus();
    },
  };
}
