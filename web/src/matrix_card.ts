// One run's matrix among those of others, and what to say about it.
import { el, nameText, userText } from "./dom";
import { downloadButtons } from "./download";
import { swatch, type NamedRun } from "./figure";
import { createMatrix, type Cursor, type MatrixView } from "./matrix";
import { mechanismName } from "./names";
import { reason } from "./section";
import type { Run } from "./types";

export interface Card {
  node: HTMLElement;
  run: Run;
  view: MatrixView;
  note: HTMLElement;
  index: number;
}

export function remark(run: Run, quantity: string): string {
  if (run.kv_mechanism && run.mechanism === "residual" && quantity !== "values") {
    return "Its residual is plain, so M is 1 everywhere. What it learned is in the mixing of values: choose that quantity.";
  }
  if (run.trace?.kind === "operator" && quantity === "M") return run.trace.summary;
  if (quantity === "M" && run.trace?.source_names.some((name) => name.startsWith("block"))) {
    return "M repeats the weight of a block for each output in it; weights over sources show each block once.";
  }
  return "";
}

export function whyNot(run: Run, quantity: string): string {
  if (quantity === "values" && !run.kv_mechanism)
    return "This run has no KV mechanism: attention takes its own values only.";
  if (quantity === "weights" && run.trace && !run.trace.source_names.length)
    return "This mechanism weights no list of sources; see M.";
  return reason(run, /trace|snapshot|matri|\bM\b/i, "Neither a trace nor snapshots of this run were saved.");
}

export function makeCard(
  { run, index }: NamedRun,
  move: (card: () => Card, cursor: Cursor | null) => void,
  subject: () => string[],
): Card {
  const view = createMatrix({
    label: `Matrix of ${run.name}, its rows and columns as the text above says`,
    onMove: (cursor) => move(() => card, cursor),
  });
  const note = el("p", { class: "hint" });
  const head = el(
    "div",
    { class: "figure-head" },
    el("h3", { class: "run-name" }, swatch(index), nameText(run.name)),
    downloadButtons({ title: run.name, name: `matrix-${run.name}`, subject, svg: view.svg }),
  );
  const node = el(
    "figure",
    { class: "card small-multiple", "data-run": index },
    el(
      "figcaption",
      {},
      head,
      mechanismName(run) === run.name ? null : el("p", { class: "says" }, userText(mechanismName(run))),
    ),
    view.node,
    note,
  );
  const card: Card = { node, run, view, note, index };
  return card;
}
