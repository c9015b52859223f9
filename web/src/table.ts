// Tables with captions that scroll inside their own box.
import { el, freshId, userText, type Child } from "./dom";

export type Cell = string | Node | null;

export interface TableOptions {
  caption: string;
  headings: Child[];
  rows: Cell[][];
  /** Columns that hold numbers, aligned to the right. */
  numeric?: number[];
  rowHeadings?: boolean;
}

function looksNumeric(text: string): boolean {
  return /^[\s+−–-]*[\d.,]+/.test(text) || /^[–-]?$/.test(text.trim());
}

function numericColumns(rows: Cell[][]): number[] {
  const width = Math.max(0, ...rows.map((row) => row.length));
  return [...Array(width).keys()].filter(
    (column) =>
      column > 0 && rows.every((row) => typeof row[column] !== "object" && looksNumeric(String(row[column] ?? ""))),
  );
}

function cellNode(cell: Cell): Child {
  if (cell === null) return "–";
  return typeof cell === "string" ? userText(cell) : cell;
}

export function table(options: TableOptions): HTMLElement {
  const id = freshId("table");
  const numeric = new Set(options.numeric ?? numericColumns(options.rows));
  const align = (column: number): string | null => (numeric.has(column) ? "number" : null);
  const head = el(
    "tr",
    {},
    ...options.headings.map((heading, column) =>
      el("th", { scope: "col", class: align(column) }, typeof heading === "string" ? userText(heading) : heading),
    ),
  );
  const body = options.rows.map((row) =>
    el(
      "tr",
      {},
      ...row.map((cell, column) =>
        column === 0 && options.rowHeadings !== false
          ? el("th", { scope: "row" }, cellNode(cell))
          : el("td", { class: align(column) }, cellNode(cell)),
      ),
    ),
  );
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": id },
    el(
      "table",
      {},
      el("caption", { id }, el("span", {}, options.caption)),
      el("thead", {}, head),
      el("tbody", {}, ...body),
    ),
  );
}
