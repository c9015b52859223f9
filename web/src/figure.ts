// The frame of every figure: title, one sentence, controls, body, hint, downloads.
import { el, freshId, nameText, replace, userText, type Child } from "./dom";
import { downloadButtons, type LegendEntry } from "./download";
import { runStyle } from "./palette";
import type { Run } from "./types";

/** What a figure shows at the moment: the run that was chosen, the series. It is in its caption and its downloads. */
export interface Subject {
  node: HTMLElement;
  set: (...texts: string[]) => void;
  texts: () => string[];
}

export function subject(...first: string[]): Subject {
  const node = el("p", { class: "subject", "data-test": "subject" });
  let now: string[] = [];
  const set = (...texts: string[]): void => {
    now = texts.filter(Boolean);
    replace(node, ...now.flatMap((text, index) => [index ? " · " : null, index ? userText(text) : nameText(text)]));
    node.hidden = !now.length;
  };
  set(...first);
  return { node, set, texts: () => now };
}

export interface FigureOptions {
  title: string;
  /** One sentence: what the figure shows. */
  says: string;
  hint?: string;
  name: string;
  subject?: Subject;
  controls?: Child;
  legend?: () => LegendEntry[];
  /** Figures whose parts have their own downloads set this to false. */
  downloads?: boolean;
  level?: "h3" | "h4";
}

export function figure(options: FigureOptions, ...body: Child[]): HTMLElement {
  const id = freshId("figure");
  const content = el("div", { class: "figure-body" }, ...body);
  const picture = {
    title: options.title,
    name: options.name,
    subject: options.subject?.texts,
    legend: options.legend,
    svg: () => content.querySelector<SVGSVGElement>("svg:not(.swatch)"),
  };
  const head = el(
    "div",
    { class: "figure-head" },
    el(options.level ?? "h3", { id }, options.title),
    options.downloads === false ? null : downloadButtons(picture),
  );
  return el(
    "figure",
    { class: "card", "aria-labelledby": id },
    el("figcaption", {}, head, options.subject?.node, el("p", { class: "says" }, options.says)),
    options.controls,
    content,
    options.hint ? el("p", { class: "hint" }, options.hint) : null,
  );
}

/** A sample of a run's line. */
export function swatch(index: number): HTMLElement {
  const style = runStyle(index);
  const box = el("span", { class: "swatch-box", "aria-hidden": "true" });
  const ns = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(ns, "svg");
  picture.setAttribute("class", "swatch");
  picture.setAttribute("viewBox", "0 0 24 8");
  const line = document.createElementNS(ns, "line");
  for (const [name, value] of Object.entries({ x1: 1, x2: 23, y1: 4, y2: 4 })) line.setAttribute(name, String(value));
  line.setAttribute("style", `stroke:${style.colour};stroke-width:3;stroke-dasharray:${style.dash || "none"}`);
  picture.append(line);
  box.append(picture);
  return box;
}

export interface NamedRun {
  run: Run;
  index: number;
}

/** Buttons that show or hide the line of a run. */
export function runLegend(runs: NamedRun[], hidden: Set<number>, redraw: () => void): HTMLElement {
  const items = runs.map(({ run, index }) => {
    const press = el(
      "button",
      { type: "button", class: "legend-item", "aria-pressed": !hidden.has(index) ? "true" : "false" },
      swatch(index),
      nameText(run.name),
    );
    press.addEventListener("click", () => {
      if (!hidden.delete(index)) hidden.add(index);
      press.setAttribute("aria-pressed", hidden.has(index) ? "false" : "true");
      redraw();
    });
    return press;
  });
  return el("div", { class: "legend", role: "group", "aria-label": "Runs shown" }, ...items);
}

export function legendEntries(runs: NamedRun[], hidden: Set<number> = new Set()): LegendEntry[] {
  return runs
    .filter(({ index }) => !hidden.has(index))
    .map(({ run, index }) => ({ name: run.name, colour: runStyle(index).colour, dash: runStyle(index).dash }));
}
