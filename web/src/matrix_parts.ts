// The fixed parts of a matrix picture: its measures, axes and colour bar; and where the arrow keys lead.
import { svg } from "./dom";
import { number, visible } from "./format";
import type { Grid } from "./grid";
import { cellColour, type Domain } from "./palette";

export interface Cursor {
  row: number;
  column: number;
}

export interface Measures {
  /** Width of the cells together, in units of the picture. */
  width?: number;
  maxCell?: number;
}

export const LEFT = 52;
export const TOP = 6;
const BOTTOM = 86;

export interface Layout {
  cellWidth: number;
  cellHeight: number;
  gap: number;
  width: number;
  height: number;
}

export function layoutOf(grid: Grid, options: Measures): Layout {
  const width = options.width ?? 300;
  const most = options.maxCell ?? 30;
  const fit = (size: number, total: number): number => Math.min(most, Math.max(3, total / Math.max(1, size)));
  const cellWidth = fit(grid.columns, width);
  const cellHeight = Math.min(options.maxCell ?? 30, fit(grid.rowIds.length, Math.min(width, 300)));
  return {
    cellWidth,
    cellHeight,
    gap: Math.min(0.6, 0.08 * Math.min(cellWidth, cellHeight)),
    width: LEFT + Math.max(cellWidth * grid.columns, 150, titleLength(grid.axes.columns)) + 10,
    height: TOP + cellHeight * grid.rowIds.length + BOTTOM,
  };
}

/** An axis title with its arrow, in units of the picture. */
function titleLength(title: string): number {
  return 6.1 * (title.length + 2);
}

function every(size: number, room: number): number {
  for (const step of [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 50]) if (step * size >= room) return step;
  return 100;
}

export function axes(grid: Grid, layout: Layout): SVGGElement {
  const group = svg("g", { "aria-hidden": "true", class: "axis" });
  const rowStep = every(layout.cellHeight, 12.5);
  const columnStep = every(layout.cellWidth, 19);
  const foot = TOP + layout.cellHeight * grid.rowIds.length;
  grid.rowIds.forEach((row, index) => {
    const y = TOP + layout.cellHeight * (index + 0.5);
    const kind = grid.row.kind?.(row);
    if (kind)
      group.append(
        svg("rect", {
          x: LEFT - 6,
          y: y - layout.cellHeight / 2,
          width: 3,
          height: layout.cellHeight,
          class: `kind-${kind.toLowerCase()}`,
        }),
      );
    const last = index === grid.rowIds.length - 1;
    const clash = !last && (grid.rowIds.length - 1 - index) * layout.cellHeight < 12;
    if (!clash && (index % rowStep === rowStep - 1 || last || rowStep === 1)) {
      group.append(svg("text", { x: LEFT - 9, y: y + 3.8, "text-anchor": "end" }, visible(grid.row.label(row))));
    }
  });
  for (let column = 0; column < grid.columns; column += columnStep) {
    const x = LEFT + layout.cellWidth * (column + 0.5);
    group.append(svg("text", { x, y: foot + 14, "text-anchor": "middle" }, visible(grid.column.label(column))));
  }
  const middle = Math.max(TOP + (layout.cellHeight * grid.rowIds.length) / 2, 2 + titleLength(grid.axes.rows) / 2);
  group.append(
    svg("text", { x: LEFT, y: foot + 30, class: "axis-title" }, `${grid.axes.columns} →`),
    svg(
      "text",
      { x: 11, y: middle, class: "axis-title", "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` },
      `← ${grid.axes.rows}`,
    ),
  );
  return group;
}

export function colourBar(grid: Grid, domain: Domain, layout: Layout): SVGGElement {
  const group = svg("g", { "aria-hidden": "true", class: "axis" });
  const y = layout.height - 42;
  const steps = 36;
  for (let i = 0; i < steps; i++) {
    const value = domain.low + ((i + 0.5) / steps) * (domain.high - domain.low);
    group.append(
      svg("rect", { x: LEFT + i * 4, y, width: 4.3, height: 8, style: `fill:${cellColour(value, grid.kind, domain)}` }),
    );
  }
  const over = highest(grid) > domain.high * 1.0001;
  group.append(
    svg("text", { x: LEFT, y: y + 21 }, number(domain.low, 2)),
    svg("text", { x: LEFT + 144, y: y + 21, "text-anchor": "end" }, `${over ? "≥ " : ""}${number(domain.high, 2)}`),
    svg("text", { x: LEFT, y: y + 36, class: "axis-title" }, grid.unit),
  );
  return group;
}

function highest(grid: Grid): number {
  let most = -Infinity;
  for (const row of grid.rowIds) {
    for (let column = 0; column < grid.columns; column++) {
      const value = grid.values[row * grid.columns + column] ?? NaN;
      if (grid.readable(row, column) && value > most) most = value;
    }
  }
  return most;
}

export function firstCell(grid: Grid): Cursor {
  const row = grid.rowIds.at(-1) ?? 0;
  return { row, column: 0 };
}

/** The next cell in the direction of a key that can be read; null if the key moves nothing. */
export function step(grid: Grid, from: Cursor, key: string): Cursor | null {
  const index = grid.rowIds.indexOf(from.row);
  const last = grid.rowIds.length - 1;
  const moves: Record<string, [number, number]> = {
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    PageUp: [-5, 0],
    PageDown: [5, 0],
    Home: [0, -grid.columns],
    End: [0, grid.columns],
  };
  const by = moves[key];
  if (!by) return null;
  const row = grid.rowIds[Math.min(last, Math.max(0, index + by[0]))] ?? from.row;
  const wanted = Math.min(grid.columns - 1, Math.max(0, from.column + by[1]));
  const direction = by[1] > 0 ? 1 : -1;
  for (const sign of [direction, -direction]) {
    for (let column = wanted; column >= 0 && column < grid.columns; column += sign) {
      if (grid.readable(row, column)) return { row, column };
    }
  }
  return from;
}
