// The most probable next tokens before and after the edits, as pairs of bars.
import { el, replace, svg } from "../dom";
import { percent, shorten, token } from "../format";
import type { NextToken, Outcome } from "../types";

export interface NextRow {
  text: string;
  before: number | null;
  after: number | null;
}

/** The tokens of both lists, those that gained or held most first. null: not among the tokens that were sent. */
export function pairNext(before: NextToken[], after: NextToken[] | null, most = 12): NextRow[] {
  const rows = new Map<number, NextRow>();
  for (const { id, text, probability } of before) rows.set(id, { text, before: probability, after: null });
  for (const { id, text, probability } of after ?? []) {
    const row = rows.get(id) ?? { text, before: null, after: null };
    rows.set(id, { ...row, after: probability });
  }
  const size = (row: NextRow): number => Math.max(row.before ?? 0, row.after ?? 0);
  return [...rows.values()].sort((a, b) => size(b) - size(a)).slice(0, most);
}

const LABEL = 112;
const WIDTH = 460;
const BAR = WIDTH - LABEL - 62;

function line(row: NextRow, y: number, paired: boolean, most: number): SVGGElement {
  const height = paired ? 9 : 16;
  const bar = (value: number | null, top: number, kind: string): SVGElement[] => [
    svg("rect", {
      x: LABEL,
      y: top,
      width: Math.max(value ? 1 : 0, (BAR * (value ?? 0)) / most),
      height,
      class: `next-${kind}`,
      rx: 1.5,
    }),
    svg(
      "text",
      { x: LABEL + (BAR * (value ?? 0)) / most + 5, y: top + height - (paired ? 1 : 3.5), class: "next-value" },
      value === null ? "below the list" : percent(value),
    ),
  ];
  return svg(
    "g",
    { "data-test": "next-token", "data-text": row.text },
    svg(
      "text",
      { x: LABEL - 8, y: y + (paired ? 14 : 12.5), "text-anchor": "end", class: "next-label" },
      shorten(token(row.text), 14),
    ),
    ...bar(row.before, y, "before"),
    ...(paired ? bar(row.after, y + 10, "after") : []),
  );
}

/** Draws the bars into a box. */
export function showNext(box: HTMLElement, plain: Outcome, edited: Outcome | null): void {
  const rows = pairNext(plain.next, edited?.next ?? null);
  if (!rows.length) {
    replace(box, el("p", { class: "hint" }, "No next token was sent for this position."));
    return;
  }
  const step = edited ? 26 : 22;
  const most = Math.max(1e-9, ...rows.map((row) => Math.max(row.before ?? 0, row.after ?? 0)));
  const says = rows
    .slice(0, 5)
    .map((row) => `${token(row.text)} ${percent(row.before)}${edited ? ` then ${percent(row.after)}` : ""}`)
    .join("; ");
  const height = rows.length * step + 4;
  replace(
    box,
    edited
      ? el(
          "div",
          { class: "key-row" },
          el("span", {}, el("span", { class: "next-key before", "aria-hidden": "true" }), "before the edits"),
          el("span", {}, el("span", { class: "next-key after", "aria-hidden": "true" }), "after"),
        )
      : null,
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", class: "next", "aria-label": `Next tokens: ${says}.` },
      ...rows.map((row, index) => line(row, 2 + index * step, edited !== null, most)),
    ),
  );
}
