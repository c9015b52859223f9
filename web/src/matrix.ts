// A matrix as a picture that arrow keys walk through: rows are readers, columns are sources.
import { el, freshId, svg } from "./dom";
import { number, visible } from "./format";
import type { Grid } from "./grid";
import {
  LEFT,
  TOP,
  axes,
  colourBar,
  firstCell,
  layoutOf,
  step,
  type Cursor,
  type Layout,
  type Measures,
} from "./matrix_parts";
import { cellColour, type Domain } from "./palette";

export type { Cursor };

export interface Marked extends Cursor {
  off: boolean;
}

export interface MatrixOptions extends Measures {
  label: string;
  test?: string;
  onMove?: (cursor: Cursor | null) => void;
  onSelect?: (cursor: Cursor) => void;
  /** What the readout adds after the value. */
  note?: (cursor: Cursor) => string;
}

export interface MatrixView {
  node: HTMLElement;
  update: (grid: Grid, domain: Domain) => void;
  /** Moves the cursor without telling onMove; null hides it. */
  show: (cursor: Cursor | null) => void;
  /** Outlines cells with an edit; those that are off are crossed out. */
  outline: (cells: Marked[]) => void;
  svg: () => SVGSVGElement;
}

/** "sublayer 7 (attention) reads output 2 (MLP): 0.31". */
export function sentenceOf(grid: Grid, { row, column }: Cursor): string {
  const value = grid.values[row * grid.columns + column] ?? NaN;
  const shown = grid.readable(row, column) ? number(value) : "not read";
  return visible(`${grid.row.name(row)} ← ${grid.column.name(column)}: ${shown}`);
}

export function createMatrix(options: MatrixOptions): MatrixView {
  const picture = svg("svg", {
    class: "matrix",
    role: "grid",
    tabindex: 0,
    "aria-label": `${options.label}. Arrow keys move over the cells.`,
    "data-test": options.test ?? null,
  });
  const readout = el("output", {
    class: "readout",
    "data-test": "matrix-readout",
    "aria-live": "polite",
    id: freshId("readout"),
  });
  const node = el("div", { class: "matrix-box" }, el("div", { class: "scroll-x" }, picture), readout);
  let grid: Grid | null = null;
  let layout: Layout | null = null;
  let cells = new Map<string, SVGRectElement>();
  let cursor: Cursor | null = null;
  let shape = "";
  let ring = svg("g", { "aria-hidden": "true" });
  let marks = svg("g", { "aria-hidden": "true" });
  let outlined: Marked[] = [];
  let barGroup = svg("g");

  const place = (at: Cursor): { x: number; y: number; width: number; height: number } | null => {
    const index = grid?.rowIds.indexOf(at.row) ?? -1;
    if (!grid || !layout || index < 0 || at.column >= grid.columns) return null;
    return {
      x: LEFT + at.column * layout.cellWidth,
      y: TOP + index * layout.cellHeight,
      width: layout.cellWidth,
      height: layout.cellHeight,
    };
  };
  const write = (): void => {
    if (!grid) return;
    readout.textContent = cursor
      ? sentenceOf(grid, cursor) + (options.note?.(cursor) ?? "")
      : "Point at a cell, or press the arrow keys.";
    readout.classList.toggle("empty", !cursor);
  };
  const drawCursor = (): void => {
    const box = cursor && place(cursor);
    ring.replaceChildren();
    if (!box) return;
    ring.append(svg("rect", { ...box, class: "ring-outer" }), svg("rect", { ...box, class: "ring" }));
  };
  const drawMarks = (): void => {
    marks.replaceChildren(
      ...outlined.flatMap((at) => {
        const box = place(at);
        if (!box) return [];
        const inner = { x: box.x + 0.5, y: box.y + 0.5, width: box.width - 1.6, height: box.height - 1.6 };
        const [right, foot] = [inner.x + inner.width, inner.y + inner.height];
        const cross = `M${inner.x},${inner.y}L${right},${foot}M${right},${inner.y}L${inner.x},${foot}`;
        return [
          svg("rect", { ...inner, class: at.off ? "edited off" : "edited" }),
          ...(at.off ? [svg("path", { d: cross, class: "edited" })] : []),
        ];
      }),
    );
  };
  const show = (next: Cursor | null): void => {
    cursor = next;
    drawCursor();
    write();
  };
  const move = (next: Cursor): void => {
    readout.setAttribute("aria-live", "polite");
    show(next);
    options.onMove?.(next);
  };
  const build = (): void => {
    if (!grid || !layout) return;
    cells = new Map();
    const body = svg("g", { role: "rowgroup" });
    grid.rowIds.forEach((row, index) => {
      const line = svg("g", { role: "row" });
      for (let column = 0; column < (grid?.columns ?? 0); column++) {
        if (!grid?.readable(row, column) || !layout) continue;
        const rect = svg("rect", {
          role: "gridcell",
          x: LEFT + column * layout.cellWidth,
          y: TOP + index * layout.cellHeight,
          width: layout.cellWidth - layout.gap,
          height: layout.cellHeight - layout.gap,
          rx: 1,
          "data-test": "matrix-cell",
          "data-row": row,
          "data-column": column,
          class: "cell",
        });
        cells.set(`${row},${column}`, rect);
        line.append(rect);
      }
      if (line.childNodes.length) body.append(line);
    });
    barGroup = svg("g");
    picture.replaceChildren(axes(grid, layout), body, marks, ring, barGroup);
    picture.setAttribute("viewBox", `0 0 ${layout.width} ${layout.height}`);
    picture.style.minWidth = `${Math.min(layout.width, 250)}px`;
    picture.style.maxWidth = `${Math.round(layout.width * 1.5)}px`;
  };
  const update = (next: Grid, domain: Domain): void => {
    grid = next;
    const now = `${next.rowIds.join()}|${next.columns}|${next.axes.columns}|${next.axes.rows}|${[...Array(next.columns).keys()].map(next.column.label).join()}`;
    if (now !== shape) {
      shape = now;
      layout = layoutOf(next, options);
      build();
      if (cursor && (!place(cursor) || !next.readable(cursor.row, cursor.column))) cursor = null;
    }
    cells.forEach((rect, key) => {
      const [row = 0, column = 0] = key.split(",").map(Number);
      const value = next.values[row * next.columns + column] ?? NaN;
      rect.style.fill = Number.isFinite(value) ? cellColour(value, next.kind, domain) : "none";
      rect.classList.toggle("no-value", !Number.isFinite(value));
    });
    if (layout) barGroup.replaceChildren(colourBar(next, domain, layout));
    drawMarks();
    drawCursor();
    write();
  };
  const cellOf = (event: Event): Cursor | null => {
    const target = event.target as SVGElement;
    if (target.dataset?.["test"] !== "matrix-cell") return null;
    return { row: Number(target.dataset["row"]), column: Number(target.dataset["column"]) };
  };
  picture.addEventListener("pointermove", (event) => {
    const at = cellOf(event);
    if (at && (at.row !== cursor?.row || at.column !== cursor.column)) move(at);
  });
  picture.addEventListener("click", (event) => {
    const at = cellOf(event);
    if (!at) return;
    move(at);
    options.onSelect?.(at);
  });
  picture.addEventListener("focus", () => {
    if (!cursor && grid && picture.matches(":focus-visible")) move(firstCell(grid));
  });
  picture.addEventListener("keydown", (event) => {
    if (!grid) return;
    const next = step(grid, cursor ?? firstCell(grid), event.key);
    if (next) {
      event.preventDefault();
      move(next);
    } else if ((event.key === "Enter" || event.key === " ") && cursor) {
      event.preventDefault();
      options.onSelect?.(cursor);
    }
  });
  return {
    node,
    update,
    svg: () => picture,
    show: (next) => {
      readout.setAttribute("aria-live", "off");
      show(next);
    },
    outline: (list) => {
      outlined = list;
      drawMarks();
    },
  };
}
