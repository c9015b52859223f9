// Edits of routes: pure functions over a list in which a route has at most one scale other than 1.
import type { Edit } from "../types";

export function scaleOf(edits: Edit[], row: number, source: number): number {
  return edits.find((edit) => edit.row === row && edit.source === source)?.scale ?? 1;
}

/** The list with one route's scale; 1 removes the edit. */
export function withScale(edits: Edit[], row: number, source: number, scale: number): Edit[] {
  const others = edits.filter((edit) => edit.row !== row || edit.source !== source);
  return scale === 1 ? others : [...others, { row, source, scale }];
}

/** The list with every route from a source at one scale. */
export function sourceScaled(edits: Edit[], rows: number[], source: number, scale: number): Edit[] {
  return rows.reduce((list, row) => withScale(list, row, source, scale), edits);
}

export interface EditGroup {
  source: number;
  /** null: every reader of the source. */
  row: number | null;
  scale: number;
}

/** Edits as a reader lists them: a source that all of its readers see at one scale is one entry. */
export function groupEdits(edits: Edit[], readersOf: (source: number) => number[]): EditGroup[] {
  const groups: EditGroup[] = [];
  const whole = new Set<number>();
  for (const source of [...new Set(edits.map((edit) => edit.source))]) {
    const readers = readersOf(source);
    const scales = new Set(readers.map((row) => scaleOf(edits, row, source)));
    const [scale] = scales;
    if (readers.length > 1 && scales.size === 1 && scale !== undefined && scale !== 1) {
      whole.add(source);
      groups.push({ source, row: null, scale });
    }
  }
  return [...groups, ...edits.filter((edit) => !whole.has(edit.source) || !readersOf(edit.source).includes(edit.row))];
}
