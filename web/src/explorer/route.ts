// The chosen route: switch it off or on, scale it, cut its source everywhere; and the list of edits.
import { bar, button, slider } from "../controls";
import { el, replace, userText } from "../dom";
import { number } from "../format";
import type { Grid } from "../grid";
import type { Cursor as Cell } from "../matrix";
import type { Edit } from "../types";
import { groupEdits, scaleOf, sourceScaled, withScale } from "./edits";

export interface RoutePanel {
  node: HTMLElement;
  select: (grid: Grid, cursor: Cell) => void;
  /** Draws the panel and the list anew. */
  refresh: (grid: Grid | null) => void;
}

interface Host {
  edits: () => Edit[];
  change: (edits: Edit[]) => void;
}

/** True where a row reads one source only: without it, nothing would be left to read. */
function single(grid: Grid, row: number): boolean {
  let sources = 0;
  for (let column = 0; column < grid.columns; column++) if (grid.readable(row, column)) sources++;
  return sources < 2;
}

/** The readers that a cut of the source everywhere changes: those that read something else, too. */
export function readers(grid: Grid, source: number): number[] {
  return grid.rowIds.filter((row) => grid.readable(row, source) && !single(grid, row));
}

function everyReader(grid: Grid, source: number): string {
  const left = grid.rowIds.filter((row) => grid.readable(row, source) && single(grid, row));
  return left.length
    ? `every reader but ${left.map(grid.row.name).join(", ")}, which reads nothing else`
    : "every reader";
}

function scaleText(scale: number): string {
  return scale === 0 ? "off" : `× ${number(scale)}`;
}

function editList(grid: Grid, host: Host): HTMLElement {
  const groups = groupEdits(host.edits(), (source) => readers(grid, source));
  const items = groups.map((group) => {
    const reader = group.row === null ? everyReader(grid, group.source) : grid.row.name(group.row);
    const remove = (): void =>
      host.change(
        group.row === null
          ? sourceScaled(host.edits(), readers(grid, group.source), group.source, 1)
          : withScale(host.edits(), group.row, group.source, 1),
      );
    const label = `${grid.column.name(group.source)} → ${reader}`;
    const press = button("✕", remove, "", "remove-edit");
    press.setAttribute("aria-label", `Remove the edit ${label}`);
    return el("li", { "data-test": "edit" }, el("span", {}, userText(label), `: ${scaleText(group.scale)}`), press);
  });
  if (items.length > 1)
    items.push(
      el(
        "li",
        {},
        button("Remove all", () => host.change([]), "", "remove-all"),
      ),
    );
  return el("ul", { class: "edits", "aria-label": "Active edits" }, ...items);
}

export function routePanel(host: Host): RoutePanel {
  let grid: Grid | null = null;
  let cursor: { row: number; source: number } | null = null;
  const name = el("p", {});
  const list = el("div", {});
  const apply = (scale: number): void => {
    if (cursor) host.change(withScale(host.edits(), cursor.row, cursor.source, scale));
  };
  const toggle = button(
    "",
    () => cursor && apply(scaleOf(host.edits(), cursor.row, cursor.source) === 0 ? 1 : 0),
    "",
    "route-switch",
  );
  const scale = slider("Scale", { low: 0, high: 2, step: 0.05, value: 1 }, apply, "route-scale");
  const everywhere = button(
    "Cut this source everywhere",
    () => {
      if (grid && cursor) host.change(sourceScaled(host.edits(), readers(grid, cursor.source), cursor.source, 0));
    },
    "",
    "cut-source",
  );
  const controls = bar(toggle, scale.node, everywhere);
  const node = el("div", { class: "route-panel" }, name, controls, list);
  const draw = (): void => {
    controls.hidden = !cursor || !grid;
    if (!cursor || !grid) {
      name.textContent = "Click a cell of the matrix, or press Enter on it, to change that route.";
    } else {
      const now = scaleOf(host.edits(), cursor.row, cursor.source);
      replace(
        name,
        el("strong", {}, userText(`${grid.column.name(cursor.source)} → ${grid.row.name(cursor.row)}`)),
        `: weight ${number(grid.values[cursor.row * grid.columns + cursor.source])} of this token, ${now === 1 ? "as learned" : scaleText(now)}.`,
      );
      toggle.textContent = now === 0 ? "Switch on" : "Switch off";
      scale.input.value = String(now);
      scale.show(scaleText(now));
      everywhere.disabled = !readers(grid, cursor.source).length;
    }
    replace(list, grid && host.edits().length ? editList(grid, host) : null);
  };
  return {
    node,
    select: (next, at) => {
      [grid, cursor] = [next, { row: at.row, source: at.column }];
      draw();
    },
    refresh: (next) => {
      grid = next;
      if (cursor && !(next && next.rowIds.includes(cursor.row) && next.readable(cursor.row, cursor.source)))
        cursor = null;
      draw();
    },
  };
}
